"""POST /v1/messages over HTTP, through Anthropic's own client and bare."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.server.api_server import LINES, MODEL, PLAIN, named_events, scripted_server

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ASK: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("messages")) as url:
        yield url


def message_body(text: str, **fields: object) -> dict[str, Any]:
    return {"max_tokens": 50, "messages": [{"role": "user", "content": text}], **fields}


def num_input(usage: dict[str, Any]) -> int:
    """Tokens of the prompt, as clients add them up."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] for name in names)


def streamed(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    answer = http.post("/v1/messages", json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    return named_events(answer.text)


def test_a_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    assert message.content[0].text == PLAIN  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.id.startswith("msg_") and message.model == MODEL
    assert message.usage.output_tokens > 5 and message.usage.cache_creation_input_tokens == 0


def test_the_object_validates_against_the_clients_type(http: httpx.Client) -> None:
    body = http.post(
        "/v1/messages?beta=true", json=message_body("hi"), headers={"anthropic-beta": "whatever-2026"}
    ).json()
    Message.model_validate(body, strict=True)
    assert {name for name, field in Message.model_fields.items() if field.is_required()} <= set(body)


def test_the_events_of_a_text_in_order(http: httpx.Client) -> None:
    events = streamed(http, **message_body("hi"))
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas >= 1, "a reader that is late gets several in one"
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * num_deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == PLAIN
    assert {event["index"] for event in events if "index" in event} == {0}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    whole = http.post("/v1/messages", json=message_body("hi")).json()
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert first == {**last, "output_tokens": 0}
    assert num_input(first) == num_input(whole["usage"])
    assert last["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stream_assembles_to_the_whole_response(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, max_tokens=50, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = claude.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    assert text == PLAIN and final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert final.usage.cache_read_input_tokens is not None and final.usage.cache_read_input_tokens >= 0


def test_stop_reasons(claude: anthropic.Anthropic) -> None:
    endless: list[Any] = [{"role": "user", "content": "endless"}]
    assert claude.messages.create(model=MODEL, max_tokens=3, messages=endless).stop_reason == "max_tokens"
    stopped = claude.messages.create(model=MODEL, max_tokens=50, messages=endless, stop_sequences=["n an", "zzz"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "n an")
    assert stopped.content[0].text == "o"  # type: ignore[union-attr]
    with claude.messages.stream(model=MODEL, max_tokens=50, messages=endless, stop_sequences=["n an"]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "n an")
    assert final.content[0].text == "o"  # type: ignore[union-attr]


def test_max_tokens_beyond_the_context_is_clamped(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json=message_body("endless", max_tokens=32000)).json()
    assert answer["stop_reason"] == "max_tokens"
    assert num_input(answer["usage"]) + answer["usage"]["output_tokens"] == 1024
    long = http.post("/v1/messages", json=message_body("word " * 2000, max_tokens=32000))
    assert long.status_code == 400 and "maximum context length" in long.json()["error"]["message"]


def test_count_tokens_equals_the_usage(claude: anthropic.Anthropic) -> None:
    conversation: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"},
                                              {"type": "text", "text": "Let me see."}]},
            {"role": "user", "content": "Well?"},
        ],
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    counted = claude.messages.count_tokens(model=MODEL, **conversation)
    for _ in range(2):
        usage = claude.messages.create(model=MODEL, max_tokens=5, **conversation).usage
        assert num_input(usage.model_dump()) == counted.input_tokens
    assert usage.cache_read_input_tokens is not None and usage.cache_read_input_tokens > 0


MARK = {"type": "ephemeral"}


@pytest.mark.parametrize("streaming", [False, True])
def test_each_token_of_a_prompt_is_counted_under_one_name(claude: anthropic.Anthropic, streaming: bool) -> None:
    """Clients add the three counts. The scripted engine caches all of a prompt but its last token."""

    def usage(text: str, **fields: Any) -> tuple[int, int | None, int | None]:
        body: Any = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": text}], **fields}
        if not streaming:
            found = claude.messages.create(**body).usage
        else:
            with claude.messages.stream(**body) as stream:
                events = list(stream)
            found = stream.get_final_message().usage
            [start] = [event.message.usage for event in events if event.type == "message_start"]
            assert start.cache_read_input_tokens == found.cache_read_input_tokens
            assert start.cache_creation_input_tokens == found.cache_creation_input_tokens
            assert start.input_tokens == found.input_tokens
        return found.input_tokens, found.cache_read_input_tokens, found.cache_creation_input_tokens

    def counted(text: str) -> int:
        return claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": text}]).input_tokens

    text = f"Once upon a {'second' if streaming else 'first'} time there was a cache."
    shared, first, _ = usage(text)[1], usage(text), usage(text)
    assert shared is not None and shared < counted(text) - 1
    assert first == (1, counted(text) - 1, 0), "a prompt that was sent before"
    plain, marked = text + " It had a lid.", text + " One day it was full."
    num_input, num_read, num_created = usage(plain)
    assert num_read and num_input == counted(plain) - num_read and num_created == 0
    num_input, num_read, num_created = usage(marked, system=[{"type": "text", "text": "", "cache_control": MARK}])
    assert num_read and num_input == 1 and num_created == counted(marked) - num_read - 1


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": MARK},
        {"system": [{"type": "text", "text": "x", "cache_control": MARK}]},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": MARK}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "marked", "cache_control": MARK}]}]},
    ],
)
def test_a_mark_anywhere_makes_tokens_created(http: httpx.Client, fields: dict[str, Any]) -> None:
    usage = http.post("/v1/messages", json={**message_body(f"mark {sorted(fields)}"), **fields}).json()["usage"]
    assert usage["input_tokens"] == 1 and usage["cache_creation_input_tokens"] > 0


def test_without_a_prefix_cache_nothing_is_created(default_model_path: Path, tmp_path: Path) -> None:
    with scripted_server(tmp_path, LINES, "--no-enable-prefix-caching") as url, httpx.Client(base_url=url) as http:
        usage = http.post("/v1/messages", json=message_body("hi", cache_control=MARK)).json()["usage"]
    assert usage["input_tokens"] > 1 and num_input(usage) == usage["input_tokens"]


def test_the_billing_block_is_dropped(http: httpx.Client) -> None:
    def count(*system: str) -> int:
        blocks = [{"type": "text", "text": text} for text in system]
        body = {"messages": ASK, "system": blocks}
        return int(http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    billing = "x-anthropic-billing-header: cc_version=2.1; cch=abcde;"
    assert count(billing, "Be brief.") == count("Be brief.")
    assert count("Be brief.", billing) > count("Be brief.")


def test_system_blocks_are_one_message(http: httpx.Client) -> None:
    blocks = [{"type": "text", "text": "Rule one.\n"}, {"type": "text", "text": "Rule two."}]
    answer = http.post("/v1/messages", json=message_body("hi", system=blocks)).json()
    assert answer["content"][0]["text"] == "Rules heard."


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_empty_tool_result(http: httpx.Client, content: dict[str, Any]) -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", **content}
    response = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = http.post("/v1/messages/count_tokens", json={"messages": response})
    nothing = http.post("/v1/messages/count_tokens", json={"messages": [*response[:2], {"role": "user", "content": [
        {**result, "content": ""}]}]})  # fmt: skip
    assert answer.status_code == 200 and answer.json() == nothing.json()


def test_a_final_assistant_message_is_continued(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    begun: list[Any] = [*ASK, {"role": "assistant", "content": "Once upon a time"}]
    message = claude.messages.create(model=MODEL, max_tokens=50, messages=begun)
    assert message.content[0].text == "and so on."  # type: ignore[union-attr]
    open_ended = {"messages": begun, "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert num_input(message.usage.model_dump()) == http.post("/tokenize", json=open_ended).json()["count"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "name"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "absent"}}, "absent"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"top_p": 7}, "top_p"),
    ],
)
def test_unsupported_requests_are_refused_before_the_first_byte(
    http: httpx.Client, body: dict[str, Any], words: str
) -> None:
    for stream in (False, True):
        answer = http.post("/v1/messages", json={**message_body("hi"), "stream": stream, **body})
        assert answer.status_code == 400, answer.text
        response = answer.json()
        assert response["type"] == "error" and response["error"]["type"] == "invalid_request_error"
        assert words in response["error"]["message"]
        assert response["request_id"] == answer.headers["x-quire-request-id"] == answer.headers["request-id"]


def test_the_request_id_reaches_the_client(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    message = claude.messages.create(model=MODEL, max_tokens=5, messages=ASK)
    counted = claude.messages.count_tokens(model=MODEL, messages=ASK)
    with claude.messages.stream(model=MODEL, max_tokens=5, messages=ASK) as stream:
        ids = [message._request_id, counted._request_id, stream.request_id]
    assert all(ids) and len(set(ids)) == 3
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="claude-none", max_tokens=5, messages=ASK)
    assert unknown.value.request_id == unknown.value.body["request_id"]  # type: ignore[index]
    mine = http.post("/v1/messages", json=message_body("hi"), headers={"x-request-id": "mine"}).headers
    assert (mine["x-request-id"], mine["request-id"]) == ("mine", mine["x-quire-request-id"])
    assert "request-id" not in http.get("/v1/models").headers


def test_errors_through_the_client(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="claude-none", max_tokens=5, messages=ASK)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": []}])
    boom: list[Any] = [{"role": "user", "content": "boom"}]
    with pytest.raises(anthropic.InternalServerError):
        claude.messages.create(model=MODEL, max_tokens=50, messages=boom)
    with (
        pytest.raises(anthropic.APIStatusError) as broken,
        claude.messages.stream(model=MODEL, max_tokens=50, messages=boom) as stream,
    ):
        text = "".join(stream.text_stream)
        raise AssertionError(f"the stream ended as if nothing had happened, after {text!r}")
    assert broken.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert broken.value.body["request_id"]  # type: ignore[index]
