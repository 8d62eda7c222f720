"""Each tool format by example: valid calls, text that is no call, and calls that break off."""

import pytest

from quire.core.errors import ConfigError
from quire.output_parsing.events import OutputEvent, PlainText, ToolArguments, ToolStart
from quire.output_parsing.tool_formats import (
    FORMATS,
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    QWEN_CODER,
    ToolFormat,
    tool_format_by_name,
)
from tests.output_parsing.parsing import calls, parse

F = ("f", '{"a": 1}')
G = ("g", "{}")
TAGGED = ("f", '{"a": "</tool_call>"}')
LITERALS = (
    "m.f",
    r"""{"a": -1.5e3, "b": "it's \"x\"\u00e9\\q", "c": [true, null], "d": {"k": false}, "e": "p\n'q' "}""",
)

RIGHT: list[tuple[ToolFormat, str, list[OutputEvent]]] = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', calls(F)),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
        calls(F, G),
    ),
    (HERMES, 'I look.\n\n<tool_call>{"name": "g", "arguments": null}</tool_call>', [PlainText("I look."), *calls(G)]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', calls(F)),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', calls(F)),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "parameters": {"a": 1}, "x": []}</tool_call>', calls(F)),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {TAGGED[1]}}}</tool_call>', calls(TAGGED)),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', calls(("f", '{"a": "x\\ny"}'))),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> So.', [*calls(F), PlainText(" So.")]),
    (GENERIC, 'Yes. <tool_call>{"name": "g", "arguments": {}}</tool_call>', [PlainText("Yes."), *calls(G)]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', calls(F)),
    (LLAMA, '\n{"type": "function", "name": "f", "parameters": {"a": 1}}', calls(F)),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', calls(F, G)),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', calls(F)),
    (LLAMA, 'Now <function=f>{"a": 1}</function>', [PlainText("Now"), *calls(F)]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', calls(F, G)),
    (MISTRAL, 'Well.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "Ab3"}]', [PlainText("Well."), *calls(F)]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', calls(F, G)),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[CALL_ID]Ab3[ARGS]{"a": 1}[TOOL_CALLS]g{}', calls(F, G)),
    (PYTHONIC, "[f(a=1), g()]", calls(F, G)),
    (PYTHONIC, "<|python_start|>[f(a=1), g(),]<|python_end|>", calls(F, G)),
    (PYTHONIC, "<function_calls>\nf(a=1)\ng()\n</function_calls>", calls(F, G)),
    (
        PYTHONIC,
        "[m.f(a=-1.5e3, b='it\\'s \"x\"\\u00e9\\q', c=[True, None,], d={'k': False}, e='''p\n'q' ''')]",
        calls(LITERALS),
    ),
    (PYTHONIC, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', calls(F)),
    (
        QWEN_CODER,
        "I do.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [PlainText("I do."), *calls(F, G)],
    ),
    (QWEN_CODER, "<function=f><parameter=s>x < y\n\n</parameter></function>", calls(("f", '{"s": "x < y\\n"}'))),
    (QWEN_CODER, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', calls(F)),
]

NO_CALLS = [
    (HERMES, '{"name": "f", "arguments": {"a": 1}}'),
    (HERMES, "<tool_call> is what I would write"),
    (HERMES, '<tool_call>{"name": "f", oops} <tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "not json"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "argum'),
    (LLAMA, '{"name": "Bob", "age": 3}'),
    (LLAMA, '{"name": "Bob"}'),
    (LLAMA, '{"answer": 42} and so on'),
    (LLAMA, 'The object {"name": "f", "parameters": {}} is one.'),
    (LLAMA, '<|python_tag|>search.call(query="x")'),
    (LLAMA, "<function=f and more"),
    (MISTRAL, "[TOOL_CALLS] []"),
    (MISTRAL, "[TOOL_CALLS] f and g"),
    (PYTHONIC, "[a link](https://example.org)"),
    (PYTHONIC, "[1, 2, 3]"),
    (PYTHONIC, "[f(x)]"),
    (PYTHONIC, "  f(a=1)"),
    (QWEN_CODER, "<tool_call>\n<function=>"),
]


@pytest.mark.parametrize(("tool_format", "text", "events"), RIGHT)
def test_a_call_is_parsed(tool_format: ToolFormat, text: str, events: list[OutputEvent]) -> None:
    assert parse(tool_format, [text]) == events


@pytest.mark.parametrize(("tool_format", "text"), NO_CALLS)
def test_text_that_is_no_call_is_unchanged(tool_format: ToolFormat, text: str) -> None:
    assert parse(tool_format, [text]) == [PlainText(text)]


def test_arguments_are_emitted_as_they_are_written() -> None:
    from_start = '<tool_call>\n{"name": "f", "arguments": {"city": "Os'
    assert parse(HERMES, [from_start]) == calls(("f", '{"city": "Os'))


@pytest.mark.parametrize(
    ("tool_format", "text", "events"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": tru', calls(("f", '{"a": tru'))),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": yes}}', [*calls(("f", '{"a": ')), PlainText("yes}}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, oops', [*calls(F), PlainText(", oops")]),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, oops]', [*calls(F), PlainText(", oops]")]),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}; so', [*calls(F), PlainText("; so")]),
        (PYTHONIC, "[f(a=1, so it", [*calls(("f", '{"a": 1')), PlainText(", so it")]),
        (QWEN_CODER, "<function=f><parameter=a>1</parameter><param", [*calls(("f", '{"a": 1}')), PlainText("<param")]),
        (QWEN_CODER, "<function=f><parameter=a>1", [*calls(("f", "{")), PlainText("<parameter=a>1")]),
    ],
)
def test_a_call_that_breaks_off_keeps_the_arguments_emitted(
    tool_format: ToolFormat, text: str, events: list[OutputEvent]
) -> None:
    assert parse(tool_format, [text]) == events


@pytest.mark.parametrize(
    ("tool_format", "whole", "closing"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "\n</tool_call>"),
        (GENERIC, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "\n</tool_call>"),
        (LLAMA, '<function=f>{"a": 1}', "</function>"),
        (PYTHONIC, "<|python_start|>[f(a=1)]", "<|python_end|>"),
        (PYTHONIC, "<function_calls>\nf(a=1)", "\n</function_calls>"),
        (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "\n</tool_call>"),
    ],
)
def test_a_truncated_closing_tag_is_not_text(tool_format: ToolFormat, whole: str, closing: str) -> None:
    """Else an output that ends by length would have `</too` as text beside its call."""
    for length in range(len(closing) + 1):
        assert parse(tool_format, [whole + closing[:length]]) == calls(F), closing[:length]
        assert parse(tool_format, list(whole + closing[:length])) == calls(F), closing[:length]


@pytest.mark.parametrize(
    ("schema", "value"),
    [("string", '"12"'), ("integer", "12"), (["string", "null"], '"12"'), (["string", "number"], "12"), (None, "12")],
)
def test_bare_values_are_typed_by_the_schema(schema: object, value: str) -> None:
    text = "<function=f><parameter=a>12</parameter></function>"
    schemas = {"f": {"properties": {"a": {"type": schema}}}}
    assert parse(QWEN_CODER, [text], schemas=schemas) == [ToolStart(0, "f"), ToolArguments(0, f'{{"a": {value}}}')]


def test_formats_are_found_by_name() -> None:
    assert {tool_format_by_name(name) for name in FORMATS} == set(FORMATS.values())
    with pytest.raises(
        ConfigError, match="no tool format 'herms'; choose one of generic, hermes, llama3_json, mistral"
    ):
        tool_format_by_name("herms")
    with pytest.raises(ConfigError, match="The format of qwen25 is hermes here"):  # of SGLang
        tool_format_by_name("qwen25")
