"""Reasoning through the chat endpoint: whole, streamed, with calls, truncated, excluded, and in the history."""

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
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with speaking(tmp_path_factory.mktemp("script"), LINES, QWEN_3) as (client, started):
        assert "reasoning: think" in started
        yield client


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model whose prompt ends inside reasoning: it writes the end tag only."""
    with speaking(tmp_path_factory.mktemp("script"), ALWAYS_LINES, ALWAYS_THINKING) as (client, started):
        assert "tools: generic · reasoning: think" in started
        yield client


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **fields)


def output(message: Any) -> tuple[str | None, str | None, str | None]:
    extra = message.model_extra or {}
    return message.content, extra.get("reasoning"), extra.get("reasoning_content")


@pytest.mark.parametrize("name", ["reasoner", "always"])
def test_reasoning_is_not_part_of_the_content(name: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(name)
    answer = ask(client, "Hi")
    assert output(answer.choices[0].message) == ("It rains.", THOUGHT, THOUGHT)
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    received = [output(chunk.choices[0].delta) for chunk in ask(client, "Hi", stream=True)]
    assert ["".join(part or "" for part in parts) for parts in zip(*received, strict=True)] == [
        "It rains.", THOUGHT, THOUGHT
    ]  # fmt: skip


def test_reasoning_is_streamed(reasoner: openai.OpenAI) -> None:
    """Long reasoning: short reasoning may arrive in one chunk if the client reads late."""
    stream = ask(reasoner, "endless please", stream=True, max_tokens=2_000)
    assert len([chunk for chunk in stream if output(chunk.choices[0].delta)[1]]) > 1


def test_reasoning_precedes_a_call(reasoner: openai.OpenAI) -> None:
    [choice] = ask(reasoner, "call please", tools=[CLOCK]).choices
    assert output(choice.message) == ("Let me see.", THOUGHT, THOUGHT)
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.finish_reason == "tool_calls"


def test_a_forced_call_may_follow_reasoning(always: openai.OpenAI) -> None:
    [choice] = ask(always, "call please", tools=[CLOCK], tool_choice="required").choices
    assert output(choice.message) == (None, THOUGHT, THOUGHT)
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]


def test_output_without_reasoning_is_all_content(reasoner: openai.OpenAI) -> None:
    assert output(ask(reasoner, "plain please").choices[0].message) == ("Plain.", None, None)


def test_truncated_reasoning_stays_reasoning(reasoner: openai.OpenAI) -> None:
    [choice] = ask(reasoner, "endless please", max_tokens=30).choices
    content, reasoning, _ = output(choice.message)
    assert (content, choice.finish_reason) == ("", "length")
    assert reasoning is not None and reasoning.startswith("on and on")


def test_include_reasoning_false_omits_reasoning(reasoner: openai.OpenAI) -> None:
    unwanted = {"include_reasoning": False}
    assert output(ask(reasoner, "Hi", extra_body=unwanted).choices[0].message) == ("It rains.", None, None)
    received = [output(chunk.choices[0].delta) for chunk in ask(reasoner, "Hi", stream=True, extra_body=unwanted)]
    assert "".join(part[0] or "" for part in received) == "It rains."
    assert {part[1:] for part in received} == {(None, None)}


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]
)
def test_reasoning_can_be_disabled(reasoner: openai.OpenAI, fields: dict[str, Any]) -> None:
    assert output(ask(reasoner, "Hi", **fields).choices[0].message) == ("Not thinking.", None, None)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_history_may_hold_reasoning_under_either_name(reasoner: openai.OpenAI, name: str) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "It rains.", name: "Rain?"},
        {"role": "user", "content": "Sure?"},
    ]
    answer = reasoner._client.post(reasoner.base_url.join("/apply-template"), json={"messages": messages})
    assert "<think>\nRain?\n</think>\n\nIt rains." in answer.json()["prompt"]


@pytest.mark.parametrize("constraint", [{"json_object": True}, {"choice": ['{"ok": true}', "no"]}])
@pytest.mark.parametrize("name", ["reasoner", "always"])
def test_structured_output_may_follow_reasoning(
    name: str, constraint: dict[str, object], request: pytest.FixtureRequest
) -> None:
    answer = ask(request.getfixturevalue(name), "json please", extra_body={"structured_outputs": constraint})
    assert output(answer.choices[0].message) == ('{"ok": true}', THOUGHT, THOUGHT)
    assert answer.choices[0].finish_reason == "stop"


def test_structured_output_starts_at_once_with_reasoning_disabled(reasoner: openai.OpenAI) -> None:
    [choice] = ask(
        reasoner,
        "Hi",
        reasoning_effort="none",
        extra_body={"structured_outputs": {"choice": ["<think>", "Not"]}},
    ).choices
    assert output(choice.message) == ("Not", None, None)


def test_a_grammar_that_cannot_follow_reasoning_is_refused(always: openai.OpenAI) -> None:
    for constraint in ({"regex": "[ab]+"}, {"grammar": 'start: "a"'}):
        with pytest.raises(openai.BadRequestError, match="ends inside reasoning") as refused:
            ask(always, "Hi", extra_body={"structured_outputs": constraint})
        assert json.loads(refused.value.response.text)["error"]["param"] == "structured_outputs"
