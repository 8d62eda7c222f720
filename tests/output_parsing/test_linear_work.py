"""Parsing takes linear work for any text. Counted in function calls, not timed."""

import sys
from types import FrameType

import pytest

from quire.output_parsing.json_calls import MAX_DEPTH
from quire.output_parsing.reader import MAX_MARKED_CHARACTERS, StreamReader
from quire.output_parsing.tool_formats import FORMATS, HERMES, LLAMA, MISTRAL, PYTHONIC, QWEN_CODER, ToolFormat
from tests.output_parsing.parsing import calls, parse, text_of
from tests.tiers import examples

CALL = '<tool_call>{"name": "f", "arguments": '
NUM_CHARACTERS = examples(600, 4000)
FLOODS = {
    "text": (LLAMA, "", "word "),
    "space": (LLAMA, "", " \n"),
    "markers": (MISTRAL, "", "<tool_call>[TOOL_CALLS]<|python_tag|>[<function=f>"),
    "open objects": (HERMES, CALL, '{"a": '),
    "open lists": (HERMES, f'{CALL}{{"a": ', "["),
    "python lists": (PYTHONIC, "[f(a=", "["),
    "a list": (HERMES, f'{CALL}{{"a": [0', ", 1"),
    "a string": (HERMES, f'{CALL}{{"a": "', "abc\\n\\u00e9"),
    "quotes": (PYTHONIC, "[f(a='", '"'),
    "a number": (HERMES, f'{CALL}{{"a": ', "1"),
    "a name": (MISTRAL, "[TOOL_CALLS]", "f"),
    "keys without a name": (HERMES, "<tool_call>{", '"a": 1, '),
    "space in a call": (HERMES, "<tool_call>", " "),
    "calls": (HERMES, "", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'),
    "python calls": (PYTHONIC, "[", f"f(a='{'word ' * 12}'), "),
    "parameters": (QWEN_CODER, "<function=f>", "<parameter=a>1</parameter>"),
    "half a closing tag": (QWEN_CODER, "<function=f><parameter=a>", "</parameter"),
}


def count_work(tool_format: ToolFormat, parts: list[str]) -> int:
    """Calls of functions, Python's and C's, while parsing."""
    work = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal work
        work += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        parse(tool_format, parts)
    finally:
        sys.setprofile(None)
    return work


def flood(name: str, num_characters: int) -> str:
    _, before, again = FLOODS[name]
    return before + again * (num_characters // len(again))


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda each: each.name)
def test_work_is_linear_in_the_length(tool_format: ToolFormat, name: str) -> None:
    whole, half = flood(name, NUM_CHARACTERS), flood(name, NUM_CHARACTERS // 2)
    assert count_work(tool_format, [whole]) <= 2.2 * count_work(tool_format, [half]) + 200
    assert count_work(tool_format, list(whole)) <= 2.2 * count_work(tool_format, list(half)) + 200


@pytest.mark.parametrize("name", FLOODS)
def test_a_long_text_is_parsed(name: str) -> None:
    size = examples(1 << 15, 1 << 20)
    text = flood(name, size)
    tool_format = FLOODS[name][0]
    assert parse(tool_format, [text]) == parse(tool_format, [text[: size // 3], text[size // 3 :]])


class CountingReader(StreamReader):
    """Counts the characters it copies."""

    __slots__ = ("num_copied",)

    def __init__(self) -> None:
        super().__init__()
        self.num_copied = 0

    def feed(self, text: str) -> None:
        self.num_copied += len(self._text) - self._place
        super().feed(text)


@pytest.mark.parametrize("name", FLOODS)
def test_text_already_read_is_not_copied_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[CountingReader] = []

    def new_reader() -> CountingReader:
        readers.append(CountingReader())
        return readers[-1]

    monkeypatch.setattr("quire.output_parsing.parser.StreamReader", new_reader)
    text = flood(name, NUM_CHARACTERS)
    longest_marker = 20
    for tool_format in FORMATS.values():
        parse(tool_format, list(text))
    assert all(reader.num_copied <= longest_marker * len(text) for reader in readers)
    assert len(readers) == len(FORMATS)


def test_nesting_is_limited() -> None:
    deep = "[" * MAX_DEPTH
    events = parse(HERMES, [f'{CALL}{{"a": {deep}'])
    assert events == [*calls(("f", '{"a": ' + deep[:-1])), *parse(HERMES, ["["])]


def test_a_call_without_a_name_becomes_text_at_the_limit() -> None:
    text = "<tool_call>{" + '"a": 1, ' * (MAX_MARKED_CHARACTERS // 8) + '"name": "f", "arguments": {}}'
    assert text_of(parse(HERMES, [text])) == text
