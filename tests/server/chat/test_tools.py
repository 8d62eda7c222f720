"""Tool calls through OpenAI's client, in the formats of four model families: whole, streamed, forced, and as history.

The model is a script behind the real server, so its output is exact. Forced calls of a real model are tested in
tests/server/openai/test_response_format.py.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from quire.core.errors import InvalidGrammar
from quire.engine.model_format import ModelFormat, ToolChoice, find_model_format
from quire.output_parsing.tool_formats import MISTRAL
from quire.server.context import ServedModel
from quire.text.detokenizer import SequenceText
from quire.text.hf_tokenizer import TokenizerFiles
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer
from tests.cli.commands import Shell
from tests.server.chat_server import MODEL, speaking
from tests.server.chat_templates import LLAMA_3_1, MISTRAL_V3, QWEN_3

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Tells.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]
OSLO = {"city": 'Oslo "æ" 🙂 日本', "days": 2}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A template, and how its model writes one call, two, and something that is none."""

    name: str
    template: str | None
    one: str
    two: str
    broken: str


def hermes(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def llama(name: str, arguments: object) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'


def mistral(*calls: tuple[str, object]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": data} for name, data in calls], ensure_ascii=False)


ONE, TWO = ("get_weather", OSLO), ("now", {})
DIALECTS = [
    Dialect("generic", None, hermes(*ONE), f"{hermes(*ONE)}\n{hermes(*TWO)}", '<tool_call>{"name": now}</tool_call>'),
    Dialect("hermes", QWEN_3, hermes(*ONE), f"{hermes(*ONE)}\n{hermes(*TWO)}", '<tool_call>{"name": 1}</tool_call>'),
    Dialect("llama3_json", LLAMA_3_1, llama(*ONE), f"{llama(*ONE)}; {llama(*TWO)}", '{"name": "now", "because": 1}'),
    Dialect("mistral", MISTRAL_V3, mistral(ONE), mistral(ONE, TWO), "[TOOL_CALLS] [now]"),
]


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    dialect: Dialect
    client: openai.OpenAI
    started: str

    def ask(self, text: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model=MODEL, messages=messages, **({"tools": TOOLS} | fields))

    def rendered(self, messages: list[dict[str, Any]], **fields: Any) -> str:
        url = self.client.base_url.join("/apply-template")
        answer = self.client._client.post(url, json={"messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["prompt"])


@pytest.fixture(scope="module", params=DIALECTS, ids=lambda dialect: dialect.name)
def scripted_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedModel]:
    dialect: Dialect = request.param
    lines = [
        {"say": "It is 14 degrees.", "when": "14 degrees"},
        {"say": dialect.two, "when": "two please"},
        {"say": dialect.broken, "when": "broken please"},
        {"say": dialect.one, "when": "one please"},
        {"say": "No need."},
    ]
    with speaking(tmp_path_factory.mktemp("script"), lines, dialect.template) as (client, started):
        yield ScriptedModel(dialect, client, started)


ON_GENERIC_ALONE = pytest.mark.parametrize("scripted_model", DIALECTS[:1], indirect=True, ids=["generic"])


def named_arguments(message: Any) -> list[tuple[str, object]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_the_format_is_detected_in_the_template(scripted_model: ScriptedModel) -> None:
    assert f"tools: {scripted_model.dialect.name} · reasoning: " in scripted_model.started


def test_a_call_is_returned(scripted_model: ScriptedModel) -> None:
    [choice] = scripted_model.ask("one please").choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert named_arguments(choice.message) == [ONE]
    assert choice.message.tool_calls[0].id.startswith("call_")


def test_parallel_calls_are_returned_unless_disabled(scripted_model: ScriptedModel) -> None:
    message = scripted_model.ask("two please").choices[0].message
    assert named_arguments(message) == [ONE, TWO]
    assert len({call.id for call in message.tool_calls}) == 2
    one = scripted_model.ask("two please", parallel_tool_calls=False).choices[0]
    assert (named_arguments(one.message), one.finish_reason) == ([ONE], "tool_calls")


@pytest.mark.parametrize(("question", "calls"), [("one please", [ONE]), ("two please", [ONE, TWO])])
def test_streamed_fragments_concatenate_to_the_same_calls(
    scripted_model: ScriptedModel, question: str, calls: list[tuple[str, object]]
) -> None:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reasons = []
    for chunk in scripted_model.ask(question, stream=True):
        [choice] = chunk.choices
        reasons.append(choice.finish_reason)
        for fragment in choice.delta.tool_calls or []:
            if fragment.function.name is not None:
                assert fragment.index not in names and fragment.id and fragment.type == "function"
                names[fragment.index] = fragment.function.name
            else:
                assert fragment.id is None
            arguments[fragment.index] = arguments.get(fragment.index, "") + fragment.function.arguments
    assert [(names[place], json.loads(arguments[place])) for place in sorted(names)] == calls
    assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_the_stream_helper_assembles_calls(scripted_model: ScriptedModel) -> None:
    messages: Any = [{"role": "user", "content": "two please"}]
    tools: Any = TOOLS
    with scripted_model.client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [ONE, TWO]
    assert (named_arguments(final.message), final.finish_reason) == ([ONE, TWO], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_call_has_finish_reason_length(scripted_model: ScriptedModel, stream: bool) -> None:
    whole = json.dumps(OSLO, ensure_ascii=False)
    answer = scripted_model.ask("one please", max_tokens=24, stream=stream)
    response = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    parts = [choice.delta if stream else choice.message for choice in response]
    written = "".join(call.function.arguments for part in parts for call in part.tool_calls or [])
    assert whole.startswith(written) and written != whole
    assert response[-1].finish_reason == "length"


def test_an_invalid_call_is_text(scripted_model: ScriptedModel) -> None:
    [choice] = scripted_model.ask("broken please").choices
    assert (choice.message.content, choice.finish_reason) == (scripted_model.dialect.broken, "stop")
    assert not choice.message.tool_calls
    streamed = scripted_model.ask("broken please", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == scripted_model.dialect.broken


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}])
def test_without_tools_everything_is_text(scripted_model: ScriptedModel, fields: dict[str, Any]) -> None:
    [choice] = scripted_model.ask("one please", **fields).choices
    assert (choice.message.content, choice.finish_reason) == (scripted_model.dialect.one, "stop")
    assert not choice.message.tool_calls


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_forced_call_is_returned_as_a_call(scripted_model: ScriptedModel, choice: Any, reason: str) -> None:
    [response] = scripted_model.ask("one please", tool_choice=choice).choices
    assert (named_arguments(response.message), response.finish_reason) == ([ONE], reason)


def test_tools_are_rendered_unless_tool_choice_is_none(scripted_model: ScriptedModel) -> None:
    prompt = scripted_model.rendered([{"role": "user", "content": "Hi"}], tools=TOOLS)
    assert "get_weather" in prompt and '"integer"' in prompt and "Hi" in prompt
    assert "get_weather" not in scripted_model.rendered([{"role": "user", "content": "Hi"}])


def test_calls_and_results_are_rendered(scripted_model: ScriptedModel) -> None:
    """As the client's own objects, the way its documentation shows it."""
    messages: list[Any] = [{"role": "user", "content": "one please"}]
    called = (
        scripted_model.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
    )  # type: ignore[arg-type]
    messages.append(called)
    messages.append({"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": '"14 degrees"'})  # type: ignore[index]
    answer = scripted_model.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "It is 14 degrees."
    prompt = scripted_model.rendered([messages[0], called.model_dump(exclude_none=True), messages[2]])
    calling, result = prompt.index('"get_weather"'), prompt.index("14 degrees")
    assert prompt.index("one please") < calling < prompt.index('"days": 2') < result
    assert '\\"days\\"' not in prompt, "arguments are data, not a text in a text"


@ON_GENERIC_ALONE
def test_a_template_without_tool_support_gets_instructions(scripted_model: ScriptedModel) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_1", "content": "midnight"},
    ]
    prompt = scripted_model.rendered(messages, tools=TOOLS)
    response = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert prompt.startswith("<|im_start|>system\nBe\nbrief.\n\nYou can call functions.")
    assert (
        f"<|im_start|>assistant\nWell.\n{response}\n{response}<|im_end|>\n<|im_start|>user\n<tool_response>\nnoon\n"
        in prompt
    )
    assert prompt.count("<|im_start|>user") == 2


@ON_GENERIC_ALONE
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": openai.NOT_GIVEN}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused(scripted_model: ScriptedModel, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted_model.ask("one please", **fields)
    assert refused.value.body["param"] == param  # type: ignore[index]


@ON_GENERIC_ALONE
@pytest.mark.parametrize("stream", [False, True])
def test_an_unsupported_schema_is_refused_if_it_is_strict(scripted_model: ScriptedModel, stream: bool) -> None:
    """See test_not_enforced.py for those that are not."""
    parameters = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    loose = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    strict = {"type": "function", "function": {**loose["function"], "strict": True}}  # type: ignore[dict-item]
    assert scripted_model.ask("one please", tools=[loose]).choices[0].finish_reason == "tool_calls"
    for fields in ({"tools": [strict], "tool_choice": "required"}, {"tools": [strict]}):
        with pytest.raises(openai.BadRequestError, match="'not'") as refused:
            scripted_model.ask("one please", stream=stream, **fields)
        assert refused.value.body["param"] == "tools"  # type: ignore[index]


def test_options_override_the_detected_parsers(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("named")
    lines = [{"say": f"<think>Hm.</think>{mistral(ONE)}"}]
    with speaking(folder, lines, None, "--tool-call-parser", "mistral", "--reasoning-parser", "think") as (
        client,
        output,
    ):
        assert "tools: mistral · reasoning: think" in output
        named = ScriptedModel(DIALECTS[0], client, output).ask("Hi").choices[0].message
    assert named_arguments(named) == [ONE]
    assert named.model_extra["reasoning"] == "Hm."


@pytest.mark.parametrize(("option", "known"), [("--tool-call-parser", "hermes"), ("--reasoning-parser", "think")])
def test_an_unknown_parser_is_refused_with_the_known_ones(
    option: str, known: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Shell(monkeypatch, capsys)("serve", "--port", "0", option, "herms")
    assert result.status == 2
    assert "'herms'" in result.err and known in result.err and "Traceback" not in result.err


def test_markers_that_are_special_tokens_reach_the_parser(model: ServedModel) -> None:
    """Special tokens are usually left out of a text; those that mark calls must not be, and go by id in a grammar."""
    assert model.tokenizer is not None
    backend = type(model.tokenizer._backend).from_str(model.tokenizer.to_json())
    backend.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer = Tokenizer(TokenizerFiles(backend, None, 2, (2,), MISTRAL_V3))
    model_format = find_model_format(MISTRAL_V3, tokenizer)
    [mark] = model_format.special_tokens.values()
    assert model_format.tool_format is MISTRAL
    assert model_format.keeps_special_tokens(tools=True) and not model_format.keeps_special_tokens(tools=False)
    text = SequenceText(tokenizer, StopStrings(()), skip_special_tokens=False)
    output = text.push(tokenizer.encode(mistral(ONE), add_special_tokens=False)).text + text.finish().text
    parser = model_format.parser(tools=TOOLS, parallel=True, prompt="")
    assert [*parser.push(output), *parser.finish()]
    forced = model_format.call_grammar(TOOLS, ToolChoice("required"), parallel=True, prompt="").grammar
    assert forced is not None and f"<[{mark}]>" in forced.text


@pytest.mark.parametrize(("count", "num_bytes"), [(129, 10), (5, 30_000)])
def test_tools_that_no_grammar_can_hold_are_refused_before_their_schemas_are_read(count: int, num_bytes: int) -> None:
    """Reading them took a fraction of a second for each: a thousand took minutes."""
    not_a_schema = {"type": "object", "properties": {"a": 7}, "description": "x" * num_bytes}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": not_a_schema}} for n in range(count)]
    with pytest.raises(InvalidGrammar, match=r"the limit is (128|65536)") as refused:
        ModelFormat().call_grammar(tools, ToolChoice("required"), parallel=True, prompt="")
    assert refused.value.param == "tools"
