"""Thoughts, told apart from answers: whole, streamed, beside calls, cut short, unwanted, and as part of a history."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.chat.test_tools import CLOCK, hermes
from tests.server.chat_server import MODEL, speaking
from tests.server.chat_templates import ALWAYS_THINKING, QWEN_3

THOUGHT = "Rain?\n\nOr <tool_call> snow?"
CALL = hermes("now", {})
LINES = [
    {"say": "Not thinking.", "when": "<think>\n\n</think>"},
    {"say": f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{CALL}", "when": "call please"},
    {"say": "<think>\non and on", "end": False, "when": "endless please"},
    {"say": "Plain.", "when": "plain please"},
    {"say": f'<think>\n{THOUGHT}\n</think>\n\n{{"ok": true}}', "when": "json please"},
    {"say": f"<think>\n{THOUGHT}\n</think>\n\nIt rains."},
]
ALWAYS_LINES = [
    {"say": f"{THOUGHT}\n</think>\n\n{CALL}", "when": "call please"},
    {"say": f'{THOUGHT}\n</think>\n\n{{"ok": true}}', "when": "json please"},
    {"say": f"{THOUGHT}\n</think>\n\nIt rains."},
]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with speaking(tmp_path_factory.mktemp("script"), LINES, QWEN_3) as (client, started):
        assert "reasoning: think" in started
        yield client


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model whose prompt ends inside a thought, so that it writes the end tag alone."""
    with speaking(tmp_path_factory.mktemp("script"), ALWAYS_LINES, ALWAYS_THINKING) as (client, started):
        assert "tools: generic · reasoning: think" in started
        yield client


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **fields)


def said(message: Any) -> tuple[str | None, str | None, str | None]:
    extra = message.model_extra or {}
    return message.content, extra.get("reasoning"), extra.get("reasoning_content")


@pytest.mark.parametrize("name", ["thinker", "always"])
def test_a_thought_is_no_part_of_the_answer(name: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(name)
    answer = ask(client, "Hi")
    assert said(answer.choices[0].message) == ("It rains.", THOUGHT, THOUGHT)
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    told = [said(chunk.choices[0].delta) for chunk in ask(client, "Hi", stream=True)]
    assert ["".join(part or "" for part in parts) for parts in zip(*told, strict=True)] == [
        "It rains.", THOUGHT, THOUGHT
    ]  # fmt: skip


def test_thoughts_are_told_as_they_come(thinker: openai.OpenAI) -> None:
    """A long one: of a short one a late reader may hear all at once."""
    stream = ask(thinker, "endless please", stream=True, max_tokens=2_000)
    assert len([chunk for chunk in stream if said(chunk.choices[0].delta)[1]]) > 1


def test_a_thought_goes_before_a_call(thinker: openai.OpenAI) -> None:
    [choice] = ask(thinker, "call please", tools=[CLOCK]).choices
    assert said(choice.message) == ("Let me see.", THOUGHT, THOUGHT)
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.finish_reason == "tool_calls"


def test_a_forced_call_may_come_after_a_thought(always: openai.OpenAI) -> None:
    [choice] = ask(always, "call please", tools=[CLOCK], tool_choice="required").choices
    assert said(choice.message) == (None, THOUGHT, THOUGHT)
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]


def test_who_does_not_think_is_heard_in_full(thinker: openai.OpenAI) -> None:
    assert said(ask(thinker, "plain please").choices[0].message) == ("Plain.", None, None)


def test_a_thought_that_is_cut_stays_a_thought(thinker: openai.OpenAI) -> None:
    [choice] = ask(thinker, "endless please", max_tokens=30).choices
    content, reasoning, _ = said(choice.message)
    assert (content, choice.finish_reason) == ("", "length")
    assert reasoning is not None and reasoning.startswith("on and on")


def test_thoughts_are_kept_from_who_does_not_want_them(thinker: openai.OpenAI) -> None:
    unwanted = {"include_reasoning": False}
    assert said(ask(thinker, "Hi", extra_body=unwanted).choices[0].message) == ("It rains.", None, None)
    told = [said(chunk.choices[0].delta) for chunk in ask(thinker, "Hi", stream=True, extra_body=unwanted)]
    assert "".join(part[0] or "" for part in told) == "It rains."
    assert {part[1:] for part in told} == {(None, None)}


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]
)
def test_thinking_can_be_turned_off(thinker: openai.OpenAI, fields: dict[str, Any]) -> None:
    assert said(ask(thinker, "Hi", **fields).choices[0].message) == ("Not thinking.", None, None)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_history_may_hold_thoughts_under_either_name(thinker: openai.OpenAI, name: str) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "It rains.", name: "Rain?"},
        {"role": "user", "content": "Sure?"},
    ]
    answer = thinker._client.post(thinker.base_url.join("/apply-template"), json={"messages": messages})
    assert "<think>\nRain?\n</think>\n\nIt rains." in answer.json()["prompt"]


@pytest.mark.parametrize("constraint", [{"json_object": True}, {"choice": ['{"ok": true}', "no"]}])
@pytest.mark.parametrize("name", ["thinker", "always"])
def test_an_answer_of_a_form_may_come_after_a_thought(
    name: str, constraint: dict[str, object], request: pytest.FixtureRequest
) -> None:
    answer = ask(request.getfixturevalue(name), "json please", extra_body={"structured_outputs": constraint})
    assert said(answer.choices[0].message) == ('{"ok": true}', THOUGHT, THOUGHT)
    assert answer.choices[0].finish_reason == "stop"


def test_who_was_told_not_to_think_answers_at_once(thinker: openai.OpenAI) -> None:
    [choice] = ask(
        thinker, "Hi", reasoning_effort="none", extra_body={"structured_outputs": {"choice": ["<think>", "Not"]}}
    ).choices
    assert said(choice.message) == ("Not", None, None)


def test_a_grammar_that_cannot_come_after_a_thought_is_refused(always: openai.OpenAI) -> None:
    for constraint in ({"regex": "[ab]+"}, {"grammar": 'start: "a"'}):
        with pytest.raises(openai.BadRequestError, match="ends inside reasoning") as refused:
            ask(always, "Hi", extra_body={"structured_outputs": constraint})
        assert json.loads(refused.value.response.text)["error"]["param"] == "structured_outputs"
