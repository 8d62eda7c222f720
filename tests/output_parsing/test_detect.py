"""A chat template gives away how its model writes calls and thoughts."""

import json

import pytest

from quire.output_parsing.parser import DetectedFormat, detect, make_parser
from quire.output_parsing.reasoning import MISTRAL_THINK, THINK
from quire.output_parsing.template_messages import Tool, normal_calls, tool_instructions
from quire.output_parsing.tool_formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, QWEN_CODER
from quire.text.tokenizer import Tokenizer
from tests.output_parsing import templates
from tests.output_parsing.parsing import calls, hear


@pytest.mark.parametrize(
    ("template", "manner"),
    [
        ("QWEN_2_5", DetectedFormat(HERMES, None)),
        ("QWEN_3", DetectedFormat(HERMES, THINK)),
        ("QWEN_3_CODER", DetectedFormat(QWEN_CODER, None)),
        ("HERMES_2_PRO", DetectedFormat(HERMES, None)),
        ("LLAMA_3_1", DetectedFormat(LLAMA, None)),
        ("LLAMA_3_2", DetectedFormat(LLAMA, None)),
        ("LLAMA_4", DetectedFormat(PYTHONIC, None)),
        ("OLMO_3", DetectedFormat(PYTHONIC, None)),
        ("MISTRAL_V3", DetectedFormat(MISTRAL, None)),
        ("MISTRAL_V13", DetectedFormat(MISTRAL_ARGS, None)),
        ("MAGISTRAL", DetectedFormat(MISTRAL_ARGS, MISTRAL_THINK)),
        ("DEEPSEEK_R1", DetectedFormat(None, THINK)),
        ("SMOLLM_2", DetectedFormat(None, None)),
        ("UNKNOWN_TOOLS", DetectedFormat(None, None)),
    ],
)
def test_a_template_gives_its_manner_away(template: str, manner: DetectedFormat) -> None:
    assert detect(getattr(templates, template)) == manner


def test_no_template_has_no_manner() -> None:
    assert detect(None) == detect("") == DetectedFormat(None, None)


def test_the_default_model_is_told_of_tools_in_words(default_tokenizer: Tokenizer) -> None:
    assert detect(default_tokenizer.chat_template) == DetectedFormat(None, None)


def test_whoever_follows_the_instructions_is_understood() -> None:
    tool = Tool("get_weather", "The weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
    told = tool_instructions([tool, Tool("now")])
    declared = [json.loads(line) for line in told.splitlines() if line.startswith('{"type"')]
    assert [each["function"]["name"] for each in declared] == ["get_weather", "now"]
    assert declared[0]["function"]["parameters"] == tool.parameters
    example = told[told.index("<tool_call>") : told.index("</tool_call>") + len("</tool_call>")]
    parser = make_parser(detect(templates.SMOLLM_2), tools=True, reasoning=True)
    assert [*parser.push(example), *parser.finish()] == calls(("the function", '{"an argument": "its value"}'))


def test_calls_are_not_looked_for_where_no_tools_were_offered() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [event.text for event in hear(None, [text]) if hasattr(event, "text")] == [text]


@pytest.mark.parametrize(
    ("arguments", "normal"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ("[1]", "[1]"),
        ("not json", "not json"),
        ('{"a": ' + "[" * 100_000, '{"a": ' + "[" * 100_000),
        ({"a": 1}, {"a": 1}),
        (None, None),
    ],
)
def test_earlier_calls_carry_objects(arguments: object, normal: object) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, "odd", {"function": 3}]}
    changed = normal_calls(message)
    assert changed["tool_calls"] == [{**call, "function": {"name": "f", "arguments": normal}}, "odd", {"function": 3}]
    assert call["function"] == {"name": "f", "arguments": arguments}, "the caller's message is not touched"


def test_a_message_without_calls_stays_as_it_is() -> None:
    assert normal_calls({"role": "user", "content": "hi"}) == {"role": "user", "content": "hi"}
