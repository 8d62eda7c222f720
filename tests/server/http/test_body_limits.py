"""Limits on bodies are checked before any work: nothing is tokenized and nothing is submitted."""

import asyncio
import threading
from collections.abc import Iterable

import pytest
from starlette.requests import Request
from starlette.types import Message

from quire.server.anthropic import messages
from quire.server.chat import messages as conversation
from quire.server.chat import prompt as dialogue
from quire.server.chat import prompt as fitting
from quire.server.chat.messages import MessageBuilder
from quire.server.chat.prompt import ChatPrompt
from quire.server.context import ServedModel
from quire.server.http.sse import run_inline_if_short
from quire.server.openai import models as tokenizing
from quire.server.openai import responses
from quire.text.tokenizer import Tokenizer
from tests.server.scripted_app import Script, app_over, post

CHAT = [{"role": "user", "content": "hi"}]
LONG = "a" * (128 * 1024 + 1)  # one character more than 1,024 tokens could have


def refused(model: ServedModel, path: str, body: dict[str, object]) -> dict[str, str]:
    script = Script(["Hello."])
    response = post(app_over(script, model), path, body)
    assert response.status_code == 400 and not script.submitted, response.text
    return response.json()["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "prompt_fields"), [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": CHAT})]
)
def test_more_allowed_ids_than_tokens_never_reach_the_engine(
    model: ServedModel, path: str, prompt_fields: dict[str, object]
) -> None:
    most = model.vocab_size
    error = refused(model, path, {**prompt_fields, "allowed_token_ids": [5] * (most + 1)})
    assert error["param"] == "allowed_token_ids"
    assert error["message"] == f"allowed_token_ids has {most + 1} entries; the limit is {most}."


@pytest.mark.parametrize(
    ("path", "name", "more"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 5}),
        ("/v1/messages/count_tokens", "messages", {}),
        ("/tokenize", "messages", {}),
        ("/apply-template", "messages", {}),
    ],
)
def test_more_messages_than_the_context_has_tokens_are_neither_joined_nor_rendered(
    model: ServedModel, path: str, name: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, verb in ((dialogue, "render"), (messages, "as_chat"), (responses, "as_chat")):
        monkeypatch.delattr(module, verb)
    error = refused(model, path, {name: [{"role": "assistant", "content": "a"}] * 1025, **more})
    assert "maximum context length is 1024" in error["message"] and "1025 in the messages" in error["message"]
    assert error.get("param", name) == name  # Anthropic's errors name no field


def test_more_parts_than_the_context_has_tokens_are_not_rendered(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(dialogue, "render")
    parts = [{"type": "text", "text": "a"}] * 1024
    body = {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "a"}]}
    assert "1025 in the messages" in refused(model, "/v1/chat/completions", body)["message"]


def test_a_long_conversation_is_shortened_without_a_copy_for_every_turn(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[dict[str, object]] = [
        {"role": role, "content": str(place)} for place in range(10_000) for role in ("user", "assistant")
    ]
    copies = []

    def replaced(whole: ChatPrompt, messages: list[dict[str, object]]) -> ChatPrompt:
        copies.append(len(messages))
        return ChatPrompt(messages)

    monkeypatch.setattr(fitting, "replace", replaced)
    kept = fitting.drop_oldest_turns(ChatPrompt(turns), model, max_tokens=100).messages
    assert len(copies) < 20
    assert 50 < len(kept) < 200 and kept == turns[-len(kept) :] and kept[0]["role"] == "user"


def test_turns_too_long_to_tokenize_are_dropped_too(model: ServedModel) -> None:
    turns = [
        {"role": "user", "content": "ab " * 46_666},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "hi"},
    ]
    assert refused(model, "/v1/responses", {"input": turns})["code"] == "context_length_exceeded"
    script = Script(["Hello."])
    response = post(app_over(script, model), "/v1/responses", {"input": turns, "truncation": "auto"})
    assert response.status_code == 200, response.text
    [(ids, _, _)] = script.submitted
    assert "hi" in model.decode(ids) and "ok" not in model.decode(ids)


def test_consecutive_texts_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_joined = [0]

    class Counting(str):
        __slots__ = ()

        def join(self, pieces: Iterable[str], /) -> str:
            whole = str.join(self, pieces)
            num_joined[0] += len(whole)
            return whole

    for role in conversation._SEPARATORS:
        monkeypatch.setitem(conversation._SEPARATORS, role, Counting("\n"))
    builder = MessageBuilder()
    for role in ("system", "assistant"):
        for _ in range(1000):
            builder.add_text(role, "ab")
    for _ in range(1000):
        builder.add_reasoning("cd")
    system, assistant = builder.messages()
    assert system["content"] == assistant["content"] == "\n".join(["ab"] * 1000)
    assert assistant["reasoning_content"] == "\n".join(["cd"] * 1000)
    assert num_joined[0] == 3 * 2999


@pytest.mark.parametrize("module", [messages, responses])
def test_a_large_body_is_translated_off_the_event_loop(
    module: object, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    translators = []
    as_chat = module.as_chat  # type: ignore[attr-defined]

    def noted(*arguments: object) -> object:
        translators.append(threading.current_thread())
        return as_chat(*arguments)

    monkeypatch.setattr(module, "as_chat", noted)
    name, path = ("messages", "/v1/messages") if module is messages else ("input", "/v1/responses")
    for words in ("hi", "hi " * 30_000):
        body = {
            name: [{"role": "user", "content": words}],
            "max_tokens" if module is messages else "max_output_tokens": 5,
        }
        post(app_over(Script(["Hello."]), model), path, body)
    small, large = translators
    assert small is threading.current_thread() is not large


def test_long_bodies_are_read_one_at_a_time_and_others_pass_them() -> None:
    """Three long bodies, two of which come first, and a medium one: it is done while the first long one is at work."""
    at_work, medium_done = [0], threading.Event()
    most = 0

    def work(is_long: bool) -> None:
        nonlocal most
        if not is_long:
            medium_done.set()
            return
        at_work[0] += 1
        most = max(most, at_work[0])
        assert medium_done.wait(30)
        at_work[0] -= 1

    async def run_all() -> None:
        def request_of(num_bytes: int) -> Request:
            async def receive() -> Message:
                return {"type": "http.request", "body": b" " * num_bytes}

            return Request({"type": "http", "method": "POST", "headers": []}, receive)

        sizes = [2 << 20, 2 << 20, 1 << 19, 2 << 20]
        await asyncio.gather(*[run_inline_if_short(request_of(size), work, size > 1 << 20) for size in sizes])

    asyncio.run(run_all())
    assert most == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": ["short", LONG], "truncate_prompt_tokens": 10}, "input"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/generate", {"inputs": LONG}, None),
        ("/generate_stream", {"inputs": LONG}, None),
        ("/", {"inputs": LONG}, None),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(
    model: ServedModel, path: str, body: dict[str, object], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.tokenizer is not None
    read: list[str] = []

    def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        read.append(text)
        return [5]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    script = Script(["Hello."])
    response = post(app_over(script, model), path, body)
    assert LONG not in read and not script.submitted
    if param is None:  # text-generation-inference's form
        assert response.status_code == 422 and "maximum context length is 1024" in response.json()["error"]
        return
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "1025 in the messages" in error["message"]


def test_no_input_is_tokenized_after_one_that_is_too_long(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        read.append(text)
        return [5] * len(text)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    error = refused(model, "/v1/embeddings", {"input": ["a", "b" * 1025, "c"]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert read == ["a", "b" * 1025]


def test_token_ids_are_bounded_and_decoded_off_the_event_loop(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkers = []
    check = ServedModel.checked_ids

    def noted(model: ServedModel, ids: list[int], param: str) -> list[int]:
        checkers.append(threading.current_thread())
        return check(model, ids, param)

    monkeypatch.setattr(ServedModel, "checked_ids", noted)
    app = app_over(Script([]), model)
    assert post(app, "/detokenize", {"tokens": [504, 3575]}).json() == {"prompt": "The capital"}
    error = post(app, "/detokenize", {"tokens": [504, -1]}).json()["error"]
    assert error["param"] == "tokens" and "no token -1" in error["message"]
    assert len(checkers) == 2 and threading.current_thread() not in checkers
    monkeypatch.setattr(tokenizing, "MAX_DETOKENIZED", 2000)
    assert post(app, "/detokenize", {"tokens": [504] * 2000}).status_code == 200
    error = post(app, "/detokenize", {"tokens": [504] * 2001}).json()["error"]
    assert error["param"] == "tokens" and error["message"] == "There are 2001 tokens; a request may bring 2000."
    assert len(checkers) == 3
