"""Laws of every tool format: splitting changes nothing, nothing raises, no text is lost, written calls are parsed."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.output_parsing.events import OutputEvent
from quire.output_parsing.reasoning import MISTRAL_THINK, THINK, ReasoningTags
from quire.output_parsing.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    QWEN_CODER,
    ToolFormat,
)
from tests.output_parsing.parsing import calls, has_call, parse, reasoning_of, split_at, text_of
from tests.tiers import examples

FRAGMENTS = [
    *(marker for each in FORMATS.values() for marker in each.markers),
    *("<parameter=a>", "</parameter>", "</function>", "</function_calls>", "<tool_", "[TOOL", "<|python"),
    *('{"name": "f"', ', "arguments": ', ', "parameters": ', '{"name": "f", "arguments": {"a": [', '"x\\u00', '"'),
    *("{", "}", "[", "]", "(", ")", ",", ";", ":", "=", "\\", "'", '"""', "f(a=1", "f(", "g()"),
    *("true", "Tru", "-1e", "nul"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", " ", "\n", "\t", "word", "é", "😀", "\x00", "\u2028"),
]
MODEL_LIKE = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join)
LAW = settings(max_examples=examples(20, 60))
CUTS = st.lists(st.integers(0, 500), max_size=8)
TAGS = st.sampled_from([None, THINK, MISTRAL_THINK])

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | LETTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LETTERS, inner, max_size=3),
    max_leaves=8,
)
Arguments = dict[str, object]
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)


def with_name(key: str) -> Callable[[str, Arguments], str]:
    return lambda name, arguments: json.dumps({"name": name, key: arguments})


def in_tags(name: str, arguments: Arguments) -> str:
    return f"<tool_call>\n{with_name('arguments')(name, arguments)}\n</tool_call>"


def in_python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


WRITERS: list[tuple[ToolFormat, str, Callable[[str, Arguments], str], str, str]] = [
    (HERMES, "", in_tags, "\n", ""),
    (LLAMA, "", with_name("parameters"), "; ", ""),
    (MISTRAL, "[TOOL_CALLS] [", with_name("arguments"), ", ", "]"),
    (MISTRAL_ARGS, "[TOOL_CALLS]", lambda name, arguments: f"{name}[ARGS]{json.dumps(arguments)}", "[TOOL_CALLS]", ""),
    (PYTHONIC, "[", in_python, ", ", "]"),
    (QWEN_CODER, "", in_tags, "\n", ""),
]


def all_formats(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda each: each.name)(test)


@all_formats
@LAW
@given(text=MODEL_LIKE, cuts=CUTS, tags=TAGS, starts_in_reasoning=st.booleans())
def test_splitting_the_text_changes_no_event(
    tool_format: ToolFormat, text: str, cuts: list[int], tags: ReasoningTags | None, starts_in_reasoning: bool
) -> None:
    whole = parse(tool_format, [text], tags=tags, starts_in_reasoning=starts_in_reasoning)
    assert parse(tool_format, list(text), tags=tags, starts_in_reasoning=starts_in_reasoning) == whole
    assert parse(tool_format, split_at(text, cuts), tags=tags, starts_in_reasoning=starts_in_reasoning) == whole


@all_formats
@LAW
@given(text=MODEL_LIKE)
def test_text_without_a_call_is_unchanged(tool_format: ToolFormat, text: str) -> None:
    events = parse(tool_format, [text])
    assert has_call(events) or text_of(events) == text


@given(text=MODEL_LIKE, tags=st.sampled_from([THINK, MISTRAL_THINK]), starts_in_reasoning=st.booleans())
def test_reasoning_and_answer_make_up_the_whole_text(text: str, tags: ReasoningTags, starts_in_reasoning: bool) -> None:
    events = parse(None, [text], tags=tags, starts_in_reasoning=starts_in_reasoning)
    output = reasoning_of(events) + text_of(events)
    without_first_tags = text.replace(tags.start, "", 1).replace(tags.end, "", 1)
    assert "".join(output.split()) in {
        "".join(each.split()) for each in (text, without_first_tags, text.replace(tags.end, "", 1))
    }


@pytest.mark.parametrize(
    ("tool_format", "before", "write", "between", "after"), WRITERS, ids=lambda each: getattr(each, "name", "")
)
@LAW
@given(written=CALLS, cuts=CUTS)
def test_written_calls_are_parsed(
    tool_format: ToolFormat,
    before: str,
    write: Callable[[str, Arguments], str],
    between: str,
    after: str,
    written: list[tuple[str, Arguments]],
    cuts: list[int],
) -> None:
    text = before + between.join(write(name, arguments) for name, arguments in written) + after
    events = parse(tool_format, split_at(text, cuts))
    if tool_format is not PYTHONIC:  # Python literals are translated; JSON is copied
        assert events == calls(*((name, json.dumps(arguments)) for name, arguments in written))
    assert [read(event) for event in events] == [
        read(event) for event in calls(*((name, json.dumps(arguments)) for name, arguments in written))
    ]


def read(event: OutputEvent) -> object:
    return json.loads(event.text) if hasattr(event, "text") else event


@pytest.mark.parametrize("depth", [1, 60, 127])
def test_nested_arguments_are_parsed(depth: int) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    assert parse(HERMES, [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>']) == calls(
        ("f", arguments)
    )
