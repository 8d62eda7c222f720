"""Laws of every tool format: cuts change nothing, nothing raises, nothing is lost, and what was written is heard."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.output_parsing.events import SpeechEvent
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
from tests.output_parsing.parsing import calls, has_call, hear, pieces_of, text_of, thought_of

FRAGMENTS = [
    *(marker for each in FORMATS.values() for marker in each.markers),
    *("<parameter=a>", "</parameter>", "</function>", "</function_calls>", "<tool_", "[TOOL", "<|python"),
    *('{"name": "f"', ', "arguments": ', ', "parameters": ', '{"name": "f", "arguments": {"a": [', '"x\\u00', '"'),
    *("{", "}", "[", "]", "(", ")", ",", ";", ":", "=", "\\", "'", '"""', "f(a=1", "f(", "g()"),
    *("true", "Tru", "-1e", "nul"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", " ", "\n", "\t", "word", "é", "😀", "\x00", "\u2028"),
]
MODEL_LIKE = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join)
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
@given(text=MODEL_LIKE, cuts=CUTS, tags=TAGS, forced=st.booleans())
def test_where_the_text_is_cut_makes_no_difference(
    tool_format: ToolFormat, text: str, cuts: list[int], tags: ReasoningTags | None, forced: bool
) -> None:
    whole = hear(tool_format, [text], tags=tags, forced_thought=forced)
    assert hear(tool_format, list(text), tags=tags, forced_thought=forced) == whole
    assert hear(tool_format, pieces_of(text, cuts), tags=tags, forced_thought=forced) == whole


@all_formats
@given(text=MODEL_LIKE)
def test_text_without_a_call_is_told_to_the_letter(tool_format: ToolFormat, text: str) -> None:
    events = hear(tool_format, [text])
    assert has_call(events) or text_of(events) == text


@given(text=MODEL_LIKE, tags=st.sampled_from([THINK, MISTRAL_THINK]), forced=st.booleans())
def test_thoughts_and_answer_are_all_there_is(text: str, tags: ReasoningTags, forced: bool) -> None:
    events = hear(None, [text], tags=tags, forced_thought=forced)
    told = thought_of(events) + text_of(events)
    without_first_tags = text.replace(tags.start, "", 1).replace(tags.end, "", 1)
    assert "".join(told.split()) in {
        "".join(each.split()) for each in (text, without_first_tags, text.replace(tags.end, "", 1))
    }


@pytest.mark.parametrize(
    ("tool_format", "before", "write", "between", "after"), WRITERS, ids=lambda each: getattr(each, "name", "")
)
@given(written=CALLS, cuts=CUTS)
def test_calls_are_heard_as_they_were_written(
    tool_format: ToolFormat,
    before: str,
    write: Callable[[str, Arguments], str],
    between: str,
    after: str,
    written: list[tuple[str, Arguments]],
    cuts: list[int],
) -> None:
    text = before + between.join(write(name, arguments) for name, arguments in written) + after
    events = hear(tool_format, pieces_of(text, cuts))
    if tool_format is not PYTHONIC:  # Python's literals are translated, the others' JSON is told as it stands
        assert events == calls(*((name, json.dumps(arguments)) for name, arguments in written))
    assert [read(event) for event in events] == [
        read(event) for event in calls(*((name, json.dumps(arguments)) for name, arguments in written))
    ]


def read(event: SpeechEvent) -> object:
    return json.loads(event.text) if hasattr(event, "text") else event


@pytest.mark.parametrize("depth", [1, 60, 127])
def test_arguments_may_be_deep(depth: int) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    assert hear(HERMES, [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>']) == calls(
        ("f", arguments)
    )
