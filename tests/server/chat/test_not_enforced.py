"""Real clients' schemas over HTTP: what is not strict is served, and a header says what of it is not enforced."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from quire.server.request.params import _WARNING_CHARACTERS, _warning
from tests.server.api_server import scripted_server
from tests.server.chat.test_tools import NAMED, hermes, named_arguments
from tests.server.chat_server import MODEL

ASK: Any = [{"role": "user", "content": "go"}]
HEADER = "x-quire-warning"
TAGS = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2}
SCHEMA = {"type": "object", "properties": {"tägs": TAGS}, "required": ["tägs"], "additionalProperties": False}
WARNING = "not enforced: schema#/properties/t%C3%A4gs/uniqueItems"
CALL = {"city": "Oslo", "at": {"x": 1}}
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "strict": True,
    "type": "object",
    "properties": {
        "city": {"type": "string", "format": "city-name"},
        "at": {"type": "object", "propertyNames": {"enum": ["x"]}, "additionalProperties": {"type": "integer"}},
    },
    "required": ["city", "at"],
}
CALL_WARNING = "not enforced: tools.get_weather#/properties/city/format, tools.get_weather#/properties/at/propertyNames"
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
LINES: list[dict[str, Any]] = [
    {"say": hermes("get_weather", CALL), "when": "get_weather"},
    {"say": '{"tägs": ["a"]}'},
]


def as_format(schema: Any, **fields: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("loose"), LINES) as url:
        yield url


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": ASK, "response_format": as_format(SCHEMA)}),
    ("/v1/chat/completions", {"messages": ASK, "response_format": as_format(SCHEMA, strict=False), "stream": True}),
    ("/v1/chat/completions", {"messages": ASK, "structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"prompt": "go", "response_format": as_format(SCHEMA), "max_tokens": 30}),
    ("/v1/responses", {"input": "go", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 30,
                      "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/generate", {"inputs": "go", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_header_says_what_is_not_enforced(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == WARNING


def test_a_schema_that_is_enforced_has_no_warning(http: httpx.Client) -> None:
    enforced = {**SCHEMA, "properties": {"tägs": {"type": "array", "x-order": 1, "description": "y"}}}
    for schema in (enforced, {**enforced, "$schema": "http://json-schema.org/draft-07/schema#", "strict": True}):
        answer = http.post("/v1/chat/completions", json={"messages": ASK, "response_format": as_format(schema)})
        assert answer.status_code == 200 and HEADER not in answer.headers
    assert HEADER not in http.post("/v1/chat/completions", json={"messages": ASK}).headers


def test_what_is_strict_is_refused(http: httpx.Client) -> None:
    strict_tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    strict_format = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    anthropic_tool = {"name": "get_weather", "input_schema": PARAMETERS, "strict": True}
    for path, body in (
        ("/v1/chat/completions", {"messages": ASK, "response_format": as_format(SCHEMA, strict=True)}),
        ("/v1/chat/completions", {"messages": ASK, "tools": [strict_tool]}),
        ("/v1/chat/completions", {"messages": ASK, "tools": [strict_tool], "tool_choice": "required"}),
        ("/v1/responses", {"input": "go", "text": {"format": strict_format}}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9, "tools": [anthropic_tool], "tool_choice": {"type": "any"}}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "is not supported" in answer.text


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize(
    "answer_format",
    [as_format(SCHEMA), as_format({"type": "object"}, strict=True), {"type": "json_object"}, {"type": "text"}],
    ids=["loose", "strict", "object", "text"],
)
def test_a_forced_call_is_served_beside_a_format(client: openai.OpenAI, choice: Any, answer_format: Any) -> None:
    """The format is of text answers: the grammar of the call alone applies."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, response_format=answer_format, max_tokens=60
    )
    [choice] = raw.parse().choices
    assert named_arguments(choice.message) == [("get_weather", CALL)] and not choice.message.content
    assert raw.headers[HEADER] == CALL_WARNING


def test_a_forced_call_is_served_beside_other_constraints_and_in_streams(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    answer = client.chat.completions.create(**request, extra_body={"structured_outputs": {"regex": "no+"}})
    assert named_arguments(answer.choices[0].message) == [("get_weather", CALL)]
    with client.chat.completions.stream(**request, response_format={"type": "json_object"}) as events:
        [choice] = events.get_final_completion().choices
    assert named_arguments(choice.message) == [("get_weather", CALL)]


def test_a_forced_call_is_served_beside_a_format_in_other_apis(url: str, http: httpx.Client) -> None:
    function = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
    shape = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    body = {"input": "go", "tools": [function], "tool_choice": "required", "text": shape}
    [item] = http.post("/v1/responses", json=body).json()["output"]
    assert (item["type"], json.loads(item["arguments"])) == ("function_call", CALL)
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as messages:
        raw = messages.messages.with_raw_response.create(
            model=MODEL,
            max_tokens=60,
            messages=ASK,
            tools=[{"name": "get_weather", "input_schema": PARAMETERS}],
            tool_choice={"type": "tool", "name": "get_weather"},
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )
    [block] = raw.parse().content
    assert block.type == "tool_use" and block.input == CALL
    assert raw.headers[HEADER] == CALL_WARNING


def test_with_auto_the_text_follows_the_format_and_calls_stay_possible(http: httpx.Client) -> None:
    body = {"messages": ASK, "tools": [TOOL], "response_format": as_format(SCHEMA), "max_tokens": 60}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text
    assert answer.headers[HEADER] == f"{WARNING}, {CALL_WARNING.removeprefix('not enforced: ')}"
    silent = http.post("/v1/chat/completions", json={**body, "tool_choice": "none"})
    assert json.loads(silent.json()["choices"][0]["message"]["content"])["tägs"] == ["a"]
    assert silent.headers[HEADER] == WARNING


def test_without_a_grammar_nothing_is_enforced_and_nothing_warned(http: httpx.Client) -> None:
    """Under auto, arguments are what the model wrote."""
    answer = http.post("/v1/chat/completions", json={"messages": ASK, "tools": [TOOL]})
    assert answer.status_code == 200 and HEADER not in answer.headers


def test_a_tool_that_is_too_large_is_named(http: httpx.Client) -> None:
    large = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 70_000]}}}
    answer = http.post("/v1/chat/completions", json={"messages": ASK, "tools": [large], "tool_choice": "required"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text


def test_a_long_warning_is_cut() -> None:
    places = tuple(f"schema#/properties/p{place}/uniqueItems" for place in range(200))
    assert _warning(places[:2]) == f"not enforced: {places[0]}, {places[1]}"
    long = _warning(places)
    assert len(long) < _WARNING_CHARACTERS + 100 and long.endswith(" more") and places[3] in long
    assert len(_warning(("x" * 5000,))) < _WARNING_CHARACTERS + 100
