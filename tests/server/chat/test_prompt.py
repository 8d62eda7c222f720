"""Chat prompts: allowed tools, and the messages of earlier turns."""

import json
from typing import Any

import pytest

from quire.core.errors import InvalidParameter, InvalidPrompt
from quire.engine.model_format import ToolChoice
from quire.server.chat.prompt import ChatPrompt, chat_prompt
from quire.server.context import ServedModel
from quire.server.openai.responses_input import ResponsesBody, as_chat
from quire.server.request.decode import decode
from quire.server.request.schema import ChatBody

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
FUNCTIONS = [{"type": "function", "name": name} for name in ("f", "g", "h")]


def chat(**fields: Any) -> ChatPrompt:
    return chat_prompt(decode(json.dumps({"messages": HI, **fields}).encode(), ChatBody))


def response(**fields: Any) -> ChatPrompt:
    body = decode(json.dumps({"input": "hi", **fields}).encode(), ResponsesBody)
    return chat_prompt(as_chat(body, (), lambda _: None))


def names(parsed: ChatPrompt) -> list[object]:
    return [tool["function"]["name"] for tool in parsed.callable_tools]  # type: ignore[index]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called(mode: str) -> None:
    allowed = {"mode": mode, "tools": [TOOLS[2], TOOLS[0]]}
    received = chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    flat = {"type": "allowed_tools", "mode": mode, "tools": [FUNCTIONS[2], FUNCTIONS[0], {"type": "web_search"}]}
    from_responses = response(tools=FUNCTIONS, tool_choice=flat)
    for parsed in (received, from_responses):
        assert names(parsed) == ["f", "h"] and parsed.tool_choice == ToolChoice(mode)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "x"}}]}}, "'x'"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "no tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "often", "tools": TOOLS}}, "'often'"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": TOOLS}}, "mode is missing"),
        ({"type": "allowed_tools"}, '"allowed_tools": {"mode": …'),
        ({"type": "function"}, '"function": {"name": …}'),
        ({"type": "custom", "custom": {"name": "f"}}, '"function": {"name": …}'),
    ],
)
def test_an_invalid_tool_choice_names_the_valid_ones(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat(tools=TOOLS, tool_choice=choice)
    assert words in caught.value.message and str(caught.value.param).startswith("tool_choice")


def test_the_choice_of_an_ignored_tool_is_ignored() -> None:
    hosted = {"type": "web_search"}
    assert response(tools=[hosted, *FUNCTIONS], tool_choice=hosted).tool_choice == ToolChoice("auto")


@pytest.mark.parametrize(
    "refused",
    [
        {"content": [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "I will not."}]},
        {"content": None, "refusal": "Well.\nI will not."},
    ],
)
def test_a_refusal_of_the_assistant_becomes_text(model: ServedModel, refused: dict[str, Any]) -> None:
    text = chat(messages=[*HI, {"role": "assistant", **refused}, *HI]).render(model)
    assert "assistant\nWell.\nI will not.<|im_end|>" in text
    with pytest.raises(InvalidPrompt):
        chat(messages=[{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}]).render(model)


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ([1], "[0]"),
        ("f", ""),
        ({"function": {"name": "f"}}, ""),
        ([{"function": "x"}], "[0]"),
        ([{"function": {"name": "f", "arguments": "{}"}}, {"function": {"arguments": "{}"}}], "[1]"),
        ([{"function": {"name": "f", "arguments": 7}}], "[0]"),
    ],
)
def test_an_invalid_earlier_call_is_refused_with_its_place(model: ServedModel, calls: Any, place: str) -> None:
    turn = {"role": "assistant", "content": "So.", "tool_calls": calls}
    with pytest.raises(InvalidPrompt) as caught:
        chat(messages=[*HI, turn]).render(model)
    assert caught.value.param == f"messages[1].tool_calls{place}"


@pytest.mark.parametrize("arguments", ['{"a": 1}', "no JSON", "", None, {"a": 1}])
def test_earlier_calls_of_clients_are_rendered(model: ServedModel, arguments: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {**HI[0], "tool_calls": None}]
    assert '"name": "f"' in chat(messages=messages).render(model)
