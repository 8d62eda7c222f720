"""Structured output over HTTP with the default model: constraints hold, and invalid ones are refused before queueing.

What a grammar allows is tested in tests/grammar; here, that it reaches the sampler and holds over HTTP.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.chat.test_tools import CITY, NAMED, TOOLS, hermes, named_arguments
from tests.server.chat_server import MODEL, speaking
from tests.server.conftest import Running
from tests.tiers import long_only

DOCS = Path(__file__).parents[3] / "docs" / "structured-output.md"
ASK: Any = [{"role": "user", "content": "Tell me of a person."}]
SHORT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "pattern": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "pattern": "^[A-Z]\\d$"}},
        "required": ["day", "id"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["red", "green", "日本", None]}, "minItems": 1, "maxItems": 4},
    "union": {
        "$defs": {"box": {"type": "object", "properties": {"in": {"const": "box"}}, "required": ["in"],
                          "additionalProperties": False}},
        "anyOf": [{"$ref": "#/$defs/box"}, {"type": "boolean"}],
    },
}  # fmt: skip


class Person(BaseModel):
    """As users of the client's own helpers write it."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


def as_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("person", 0.0), *((name, 1.0) for name in SCHEMAS), *long_only((name, 0.0) for name in [*SCHEMAS][1:])],
)
def test_output_follows_its_schema(client: openai.OpenAI, name: str, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_format=as_format(SCHEMAS[name]),
        temperature=temperature,
        seed=7,
        n=2,
        max_tokens=200,
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "stop", choice
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[name])


def test_the_parse_helper_returns_its_type(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Person, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, Person)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Person, max_tokens=3)


def test_json_object_is_an_object(client: openai.OpenAI) -> None:
    request_fields: Any = {
        "model": MODEL,
        "messages": ASK,
        "response_format": {"type": "json_object"},
        "temperature": 0,
    }
    choice = client.chat.completions.create(**request_fields, max_tokens=24).choices[0]
    content = choice.message.content or ""
    assert content.startswith("{")
    if choice.finish_reason == "stop":
        json.loads(content)
    else:
        assert choice.finish_reason == "length"
    streamed = client.chat.completions.create(**request_fields, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == content


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "(yes|no), [0-9]{3}"}, "(yes|no), [0-9]{3}"),
        ({"choice": ["apple pie", "Apfelkuchen", "リンゴ"]}, "apple pie|Apfelkuchen|リンゴ"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'}, "<[a-z]{1,5}>"),
        ({"json": {"enum": ["a", "b"]}}, '"a"|"b"'),
    ],
)
def test_other_constraints_hold_in_chats_and_completions(http: httpx.Client, constraint: Any, pattern: str) -> None:
    request_fields = {"structured_outputs": constraint, "max_tokens": 40, "temperature": 1}
    chat = http.post("/v1/chat/completions", json={"messages": ASK, **request_fields}).json()["choices"][0]
    plain = http.post("/v1/completions", json={"prompt": ["Say:", "What?"], **request_fields}).json()["choices"]
    for text in (chat["message"]["content"], plain[0]["text"], plain[1]["text"]):
        assert re.fullmatch(pattern, text), text
    assert {chat["finish_reason"], *(choice["finish_reason"] for choice in plain)} == {"stop"}


@pytest.mark.parametrize(
    ("choice", "temperature", "stream"),
    [
        ("required", 1.0, False),
        (NAMED, 1.0, True),
        *long_only([("required", 0.0, stream) for stream in (False, True)]),
        *long_only([("required", 1.0, True), (NAMED, 1.0, False), (NAMED, 0.0, False), (NAMED, 0.0, True)]),
    ],
)
def test_a_forced_call_follows_its_schema(client: openai.OpenAI, choice: Any, temperature: float, stream: bool) -> None:
    """The default model has no words for tools and would rather chat."""
    city = {**CITY, "properties": {"city": SHORT, "days": {"type": "integer", "minimum": 0, "maximum": 9}}}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": city}}, TOOLS[1]]
    request_fields: Any = {
        "model": MODEL,
        "messages": ASK,
        "tools": tools,
        "tool_choice": choice,
        "seed": 3,
        "max_tokens": 200,
    }
    request_fields.update(temperature=temperature, parallel_tool_calls=False)
    if stream:
        with client.chat.completions.stream(**request_fields) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**request_fields).choices[0].message
    [(name, arguments)] = named_arguments(message)
    assert name in (("get_weather", "now") if choice == "required" else ("get_weather",))
    jsonschema.validate(arguments, city if name == "get_weather" else {"type": "object", "maxProperties": 0})
    assert not message.content


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": as_format({"type": "object", "propertyNames": {"maxLength": 9}})},
            "response_format",
            "propertyNames",
        ),
        ({"response_format": as_format({"type": "string", "format": "color"})}, "response_format", "format"),
        ({"response_format": as_format({"$ref": "http://x/y"})}, "response_format", "outside this schema"),
        ({"response_format": as_format({"enum": []})}, "response_format", "compiled"),
        ({"response_format": as_format({"enum": ["x" * 70_000]})}, "response_format", "65536 bytes"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "compiled"),
        ({"structured_outputs": {"grammar": "begin: a"}}, "structured_outputs", "compiled"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"guided_json": {"type": "object"}}, "guided_json", "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_constraint_is_refused_before_it_is_queued(
    http: httpx.Client, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    num_before = num_requests(http)
    for path, prompt in (("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "Hi"})):
        answer = http.post(path, json={**prompt, **fields, "stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param and words in error["message"], error
    assert num_requests(http) == num_before


@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_allow_no_token_are_a_client_error(http: httpx.Client, stream: bool) -> None:
    request_fields = {
        "messages": ASK,
        "response_format": {"type": "json_object"},
        "allowed_token_ids": [100],
        "stream": stream,
    }
    answer = http.post("/v1/chat/completions", json=request_fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "nothing_left", "allowed_token_ids")
    assert "the form of the answer and allowed_token_ids left none" in error["message"]


def num_requests(http: httpx.Client) -> float:
    """How many have reached the engine and ended."""
    counted = re.findall(r"^quire_request_success_total\{.*\} ([0-9.e+]+)$", http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, counted))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A scripted model that ignores the request unless constrained."""
    lines = [
        {"say": hermes("now", {}), "when": "call please"},
        {"say": hermes("get_weather", {"city": 3}), "when": "wrong please"},
        {"say": '{"ok": true}', "when": "json please"},
        {"say": "Hello there, what a day."},
    ]
    with speaking(tmp_path_factory.mktemp("script"), lines) as (client, _):
        yield client


def test_with_tools_output_follows_the_schema_or_is_a_call(scripted: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip

    def ask(text: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        request_fields = {"tools": TOOLS, "response_format": as_format(schema), **fields}
        return scripted.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=100, **request_fields
        ).choices[0]

    assert named_arguments(ask("call please").message) == [("now", {})]
    answered = ask("json please")
    assert (answered.message.content, answered.message.tool_calls) == ('{"ok": true}', None)
    forbidden = ask("call please", tool_choice="none")
    assert not forbidden.message.tool_calls
    if forbidden.finish_reason == "stop":
        jsonschema.validate(json.loads(forbidden.message.content), schema)


def test_a_call_of_a_strict_tool_follows_its_schema(scripted: openai.OpenAI) -> None:
    strict: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}}
    messages: Any = [{"role": "user", "content": "wrong please"}]
    loose = scripted.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    assert named_arguments(loose.choices[0].message) == [("get_weather", {"city": 3})]
    held = scripted.chat.completions.create(model=MODEL, messages=messages, tools=[strict], max_tokens=40).choices[0]
    assert held.message.tool_calls is not None
    written = held.message.tool_calls[0].function.arguments  # type: ignore[union-attr]
    assert re.match(r'\{\s*"city":\s*"', written), "a number was not to be had"


def test_the_documented_examples_work(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) >= 3
    code = "\n".join(examples).replace("http://127.0.0.1:8000", server.url)
    exec(compile(code, DOCS.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("\n") >= len(examples)
