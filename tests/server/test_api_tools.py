"""Reasoning and tool calls in Responses and Messages: whole, streamed, cut, and sent back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.api_server import MODEL, named_events, scripted_server
from tests.server.chat_templates import QWEN_3

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 🙂"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LINES: tuple[dict[str, Any], ...] = (
    {"say": "It rains.", "when": "<tool_response>\nrain\n</tool_response>"},
    {"say": f"<think>\nHm, let me see.\n</think>\n\nI will look.\n{CALL}\n{CLOCK}", "when": "weather?"},
    {"say": CALL, "when": "briefly?"},
    {"say": "Nothing to do."},
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": SCHEMA},
    {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "unknown", "description": "", "tools": []},
]
TOOLS: list[Any] = [
    {"name": "weather", "description": "Tells.", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": {"type": "object"}},
    {"type": "bash_20250124", "name": "bash"},
]


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "template.jinja").write_text(QWEN_3)
    with scripted_server(folder, LINES, "--chat-template", str(folder / "template.jinja")) as url:
        yield url


def test_a_response_with_reasoning_text_and_calls(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="weather?", tools=FUNCTIONS)
    reasoning, text, call, second = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and "let me see" in reasoning.content[0].text
    assert text.type == "message" and response.output_text == "I will look."
    assert call.type == "function_call" and second.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo 🙂"})
    assert (second.name, json.loads(second.arguments)) == ("clock", {})
    assert [item.id[:3] for item in response.output if item.id] == ["rs_", "msg", "fc_", "fc_"]
    assert call.call_id.startswith("call_") and call.call_id != second.call_id
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0


def test_the_events_of_a_response(http: httpx.Client) -> None:
    response = http.post("/v1/responses", json={"input": "weather?", "tools": FUNCTIONS, "stream": True})
    events = named_events(response.text)
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert len(output) == 4
    for place, item in enumerate(output):
        mine = [event for event in events if event.get("output_index") == place]
        added, *between, done = mine
        assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
        assert done["item"] == item and {event["item_id"] for event in between} == {added["item"]["id"]} == {item["id"]}
        delta_text = "".join(event["delta"] for event in between if event["type"].endswith(".delta"))
        assert delta_text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        kinds = list(dict.fromkeys(event["type"] for event in between))
        if item["type"] == "function_call":
            assert added["item"]["call_id"] == item["call_id"] and added["item"]["arguments"] == ""
            assert kinds == ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
        else:
            name = "reasoning" if item["type"] == "reasoning" else "output"
            assert kinds == [
                "response.content_part.added", f"response.{name}_text.delta", f"response.{name}_text.done",
                "response.content_part.done",
            ]  # fmt: skip


def test_the_result_of_a_call_is_sent_back(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "weather?"}]
    with client.responses.stream(model=MODEL, input=history, tools=FUNCTIONS) as stream:
        first = stream.get_final_response()
    [call, _] = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history += [item.model_dump(exclude_none=True) for item in first.output]
    assert client.responses.create(model=MODEL, input=[*history, result], tools=FUNCTIONS).output_text == "It rains."


def test_tool_choice_of_responses(client: openai.OpenAI) -> None:
    weather = {"type": "function", "name": "weather"}
    choices: list[Any] = ["required", weather, {"type": "allowed_tools", "mode": "auto", "tools": [weather]}]
    for choice in choices:
        response = client.responses.create(model=MODEL, input="briefly?", tools=FUNCTIONS, tool_choice=choice)
        [call] = response.output
        assert call.type == "function_call" and call.name == "weather"
    free = client.responses.create(model=MODEL, input="briefly?", tools=FUNCTIONS, tool_choice="none")
    assert [item.type for item in free.output] == ["message"]


def test_a_response_after_a_schema(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input="json",
        max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "boolean"}, "strict": True}},
    )
    assert json.loads(response.output_text) in (True, False)


def test_a_message_with_reasoning_text_and_calls(claude: anthropic.Anthropic) -> None:
    history: list[Any] = [{"role": "user", "content": "weather?"}]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = claude.messages.create(model=MODEL, max_tokens=500, messages=history, tools=TOOLS, thinking=thinking)
    reasoning, text, call, second = message.content
    assert reasoning.type == "thinking" and "let me see" in reasoning.thinking and reasoning.signature
    assert text.type == "text" and text.text == "I will look."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Oslo 🙂"})
    assert second.type == "tool_use" and (second.name, second.input) == ("clock", {}) and second.id != call.id
    assert message.stop_reason == "tool_use"
    with claude.messages.stream(
        model=MODEL, max_tokens=500, messages=history, tools=TOOLS, thinking=thinking
    ) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[2].input == call.input and final.stop_reason == "tool_use"  # type: ignore[union-attr]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id,
                                           "content": [{"type": "text", "text": "rain"}]}]}  # fmt: skip
    history += [{"role": "assistant", "content": final.content}, result]
    last = claude.messages.create(model=MODEL, max_tokens=500, messages=history, tools=TOOLS)
    assert last.content[0].text == "It rains." and last.stop_reason == "end_turn"  # type: ignore[union-attr]
    counted = claude.messages.count_tokens(model=MODEL, messages=history, tools=TOOLS).input_tokens
    assert counted == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)


def test_the_content_blocks_of_a_message(http: httpx.Client) -> None:
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": "weather?"}], "tools": TOOLS, "stream": True}
    events = named_events(http.post("/v1/messages", json=body).text)
    for event in events:
        TypeAdapter(RawMessageStreamEvent).validate_python(event)
    places = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert places == list(range(len(places)))
    for place in places:
        mine = [event["type"] for event in events if event.get("index") == place]
        assert mine == ["content_block_start", *["content_block_delta"] * (len(mine) - 2), "content_block_stop"]
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces).startswith('{"city": "Oslo')


def test_tool_choice_of_messages(claude: anthropic.Anthropic) -> None:
    history: list[Any] = [{"role": "user", "content": "briefly?"}]
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "weather"},
                          {"type": "auto", "disable_parallel_tool_use": True}]  # fmt: skip
    for choice in choices:
        message = claude.messages.create(model=MODEL, max_tokens=500, messages=history, tools=TOOLS, tool_choice=choice)
        assert message.stop_reason == "tool_use" and message.content[-1].name == "weather"  # type: ignore[union-attr]
    none: Any = {"type": "none"}
    message = claude.messages.create(model=MODEL, max_tokens=500, messages=history, tools=TOOLS, tool_choice=none)
    assert [block.type for block in message.content] == ["text"] and message.stop_reason == "end_turn"


def test_a_call_that_is_cut_by_the_length(http: httpx.Client) -> None:
    body = {"max_tokens": 16, "messages": [{"role": "user", "content": "briefly?"}], "tools": TOOLS}
    message = http.post("/v1/messages", json=body).json()
    assert message["stop_reason"] == "max_tokens"
    [call] = message["content"]
    assert call["type"] == "text" or list(call["input"]) == ["invalid_json"]
