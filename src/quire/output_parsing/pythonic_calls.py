"""Pythonic tool calls of Llama 4 and Olmo 3: `[f(a=1, b="x"), g()]`, and a reader from Python literals to JSON.

The list is at the start of the answer, or follows `<|python_start|>`. Olmo writes one call per line, without brackets,
between `<function_calls>` and its closing tag. Hermes tags are accepted too: a forced call is written with them
(`grammars.py`).

`read_literal` translates a literal to JSON text. It evaluates nothing and builds no value. Accepted: strings, numbers,
True, False, None (and JSON's keywords for them), lists, and dictionaries with string keys. Rejected: tuples, sets,
prefixed and concatenated strings. An unknown escape keeps its backslash, as in Python.
"""

import json
import re

from quire.output_parsing.events import EventEmitter, emit_text_until, skip_call_end
from quire.output_parsing.json_calls import (
    MAX_DEPTH,
    MAX_NAME_CHARACTERS,
    MAX_SCALAR_CHARACTERS,
    BrokenJson,
    Write,
    emit_held,
)
from quire.output_parsing.json_dialects import OPEN, read_tagged_call
from quire.output_parsing.reader import Markers, Reading, StreamReader

_PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_KEYWORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_NUM_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"{": "}", "[": "]"}

PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
FUNCTION_CALLS = "<function_calls>"
_ENDS = {PYTHON_START: PYTHON_END, FUNCTION_CALLS: "</function_calls>"}
_MARKERS = Markers(PYTHON_START, FUNCTION_CALLS, OPEN)
_NAME = re.compile(r"[A-Za-z0-9_.]+")


def read_literal(reader: StreamReader, write: Write) -> Reading[None]:
    """Reads one literal and writes it as JSON."""
    closers: list[str] = []
    while True:
        char = yield from reader.skip_space()
        if char in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise BrokenJson
            closers.append(_CLOSERS[char])
            write(reader.take())
            following = yield from reader.skip_space()
            if following != closers[-1]:
                yield from _key(reader, write, closers[-1])
                continue
        elif char in ("'", '"'):
            yield from _string(reader, write)
        else:
            yield from _keyword_or_number(reader, write, char)
        if not (yield from _after_value(reader, write, closers)):
            return


def _after_value(reader: StreamReader, write: Write, closers: list[str]) -> Reading[bool]:
    """Closes the lists and dictionaries that end here. Whether another value follows. Trailing commas are dropped."""
    while closers:
        char = yield from reader.skip_space()
        if char == ",":
            reader.take()
            char = yield from reader.skip_space()
            if char != closers[-1]:
                write(", ")
                yield from _key(reader, write, closers[-1])
                return True
        if char != closers[-1]:
            raise BrokenJson
        write(reader.take())
        closers.pop()
    return False


def _key(reader: StreamReader, write: Write, closer: str) -> Reading[None]:
    """Reads the key and colon before a value of a dictionary; nothing in a list."""
    if closer == "]":
        return
    if (yield from reader.peek()) not in ("'", '"'):
        raise BrokenJson
    yield from _string(reader, write)
    if (yield from reader.skip_space()) != ":":
        raise BrokenJson
    reader.take()
    write(": ")


def _keyword_or_number(reader: StreamReader, write: Write, char: str) -> Reading[None]:
    word = ""
    while char in _WORD_CHARS and len(word) < MAX_SCALAR_CHARACTERS:
        word += reader.take()
        char = yield from reader.peek()
    if word in _KEYWORDS:
        write(_KEYWORDS[word])
    elif _NUMBER.fullmatch(word):
        write(word)
    else:
        raise BrokenJson(word)


def _string(reader: StreamReader, write: Write) -> Reading[None]:
    quote = reader.take()
    write('"')
    if (yield from reader.accept(quote * 2)):
        end = quote * 3
    elif (yield from reader.accept(quote)):
        write('"')
        return
    else:
        end = quote
    while True:
        char = yield from reader.peek()
        if char == "":
            raise BrokenJson
        if char == "\\":
            yield from _escape(reader, write)
        elif char != quote:
            write(_escaped(reader.take_match(_PLAIN[quote])))
        elif (yield from reader.accept(end)):
            write('"')
            return
        else:
            write(_escaped(reader.take()))


def _escape(reader: StreamReader, write: Write) -> Reading[None]:
    escape = reader.take()
    char = yield from reader.peek()
    if char == "":
        raise BrokenJson(escape)
    escape += reader.take()
    if char in _ESCAPES:
        write(_escaped(_ESCAPES[char]))
        return
    digits = ""
    for _ in range(_NUM_HEXADECIMAL.get(char, 0)):
        if (yield from reader.peek()) not in _HEXADECIMAL:
            raise BrokenJson(escape + digits)
        digits += reader.take()
    if not digits:
        write(_escaped(escape))
    elif int(digits, 16) <= 0x10FFFF:
        write(json.dumps(chr(int(digits, 16)))[1:-1])
    else:
        raise BrokenJson(escape + digits)


def _escaped(text: str) -> str:
    """The text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_pythonic(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    reader.mark()
    if (yield from reader.skip_space()) == "[":
        yield from _read_calls(reader, emitter)
    else:
        emitter.emit_text(reader.take_marked())
    while marker := (yield from emit_text_until(reader, emitter, _MARKERS)):
        if marker == OPEN:
            yield from read_tagged_call(reader, emitter)
            continue
        reader.mark()
        reader.take(len(marker))
        yield from reader.skip_space()
        if (yield from _read_calls(reader, emitter)):
            yield from skip_call_end(reader, emitter, _ENDS[marker])


def _read_calls(reader: StreamReader, emitter: EventEmitter) -> Reading[bool]:
    """Calls in a list, or without brackets until something else follows. Whether there was one.

    The text that may be the next call is marked; the mark is dropped at the end.
    """
    in_list = yield from reader.accept("[")
    num_calls = 0
    while (yield from _read_call(reader, emitter)):
        num_calls += 1
        reader.mark()
        char = yield from reader.skip_space()
        if char == ",":
            reader.take()
            char = yield from reader.skip_space()
        elif in_list and char != "]":
            break
        if char == "]" and in_list:
            reader.take()
            reader.drop_mark()
            return True
    emitter.emit_text(reader.take_marked())
    return num_calls > 0


def _read_call(reader: StreamReader, emitter: EventEmitter) -> Reading[bool]:
    """Reads one call. Whether it was one; if so, the mark is dropped."""
    yield from reader.skip_space()
    name = yield from _read_name(reader)
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not (yield from reader.accept("(")):
        return False
    key = ""
    if (yield from reader.skip_space()) != ")":
        key = yield from _read_key(reader)
        if not key:
            return False
    reader.drop_mark()
    emitter.start_call(name)
    try:
        yield from _read_arguments(reader, emitter, key)
    except BrokenJson as broken:
        emit_held(reader, emitter, broken)
        emitter.emit_text(reader.take_marked())
    return True


def _read_arguments(reader: StreamReader, emitter: EventEmitter, key: str) -> Reading[None]:
    """The arguments after the first key, or the closing parenthesis where there is no key."""
    emitter.emit_arguments("{")
    while key:
        emitter.emit_arguments(f'"{key}": ')
        yield from read_literal(reader, emitter.emit_arguments)
        key = yield from _read_next_key(reader)
        emitter.emit_arguments(", " if key else "")
    if not (yield from reader.accept(")")):
        raise BrokenJson
    emitter.emit_arguments("}")


def _read_next_key(reader: StreamReader) -> Reading[str]:
    """The key after a comma; empty at the end of the arguments, with or without a comma."""
    reader.mark()
    if (yield from reader.skip_space()) == ",":
        reader.take()
        if (yield from reader.skip_space()) != ")":
            key = yield from _read_key(reader)
            if not key:
                raise BrokenJson
            reader.drop_mark()
            return key
    reader.drop_mark()
    return ""


def _read_key(reader: StreamReader) -> Reading[str]:
    """Reads `key=`; empty if that is not next."""
    key = yield from _read_name(reader)
    yield from reader.skip_space()
    return key if (yield from reader.accept("=")) else ""


def _read_name(reader: StreamReader) -> Reading[str]:
    parts: list[str] = []
    while _NAME.match((yield from reader.peek())):
        parts.append(reader.take_match(_NAME))
    return "".join(parts)
