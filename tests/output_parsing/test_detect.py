"""Tool format and reasoning tags are detected in the chat template."""

import json

import pytest

from quire.output_parsing.parser import DetectedFormat, detect, make_parser
from quire.output_parsing.reasoning import MISTRAL_THINK, THINK
from quire.output_parsing.template_messages import Tool, tool_instructions, with_parsed_arguments
from quire.output_parsing.tool_formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, QWEN_CODER
from quire.text.tokenizer import Tokenizer
from tests.output_parsing import templates
from tests.output_parsing.parsing import calls, parse


@pytest.mark.parametrize(
    ("template", "detected"),
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
def test_formats_are_detected_in_real_templates(template: str, detected: DetectedFormat) -> None:
    assert detect(getattr(templates, template)) == detected


def test_without_a_template_nothing_is_detected() -> None:
    assert detect(None) == detect("") == DetectedFormat(None, None)


def test_the_default_models_template_has_no_tool_format(default_tokenizer: Tokenizer) -> None:
    assert detect(default_tokenizer.chat_template) == DetectedFormat(None, None)


def test_the_example_in_the_instructions_parses_as_a_call() -> None:
    tool = Tool("get_weather", "The weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
    instructions = tool_instructions([tool, Tool("now")])
    declared = [json.loads(line) for line in instructions.splitlines() if line.startswith('{"type"')]
    assert [each["function"]["name"] for each in declared] == ["get_weather", "now"]
    assert declared[0]["function"]["parameters"] == tool.parameters
    example = instructions[instructions.index("<tool_call>") : instructions.index("</tool_call>") + len("</tool_call>")]
    parser = make_parser(detect(templates.SMOLLM_2), tools=True, reasoning=True)
    assert [*parser.push(example), *parser.finish()] == calls(("the function", '{"an argument": "its value"}'))


def test_without_tools_calls_are_not_parsed() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [event.text for event in parse(None, [text]) if hasattr(event, "text")] == [text]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
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
def test_arguments_of_earlier_calls_become_objects(arguments: object, parsed: object) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, "odd", {"function": 3}]}
    changed = with_parsed_arguments(message)
    assert changed["tool_calls"] == [{**call, "function": {"name": "f", "arguments": parsed}}, "odd", {"function": 3}]
    assert call["function"] == {"name": "f", "arguments": arguments}, "the caller's message is not touched"


def test_a_message_without_calls_is_unchanged() -> None:
    assert with_parsed_arguments({"role": "user", "content": "hi"}) == {"role": "user", "content": "hi"}
