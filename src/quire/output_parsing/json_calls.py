"""Incremental JSON reader, and tool calls in JSON: an object with name and arguments, or a name and then an object.

`read_json` copies the text of one value as it arrives. It builds no value, so depth and size cannot overflow. The
written text is a prefix of valid JSON at every point: a number or keyword is written once complete and valid. Raw line
breaks inside strings, which models write and JSON forbids, are escaped.

A call starts when its function name is certain. Until then the reader holds a mark that the caller has set; if there
is not a call, the caller emits the marked text. Does not depend on the delimiters around calls.
"""

import json
import re
from collections.abc import Callable

from quire.output_parsing.events import EventEmitter
from quire.output_parsing.reader import SPACE, Reading, StreamReader

MAX_DEPTH = 128  # of nested lists and objects; request bodies, and so schemas, may have half of it
MAX_SCALAR_CHARACTERS = 400  # the longest double has 309 digits before the point
MAX_NAME_CHARACTERS = 256

Write = Callable[[str], None]

# Runs of simple values are matched at once. Possessive quantifiers: no backtracking, linear time.
_INSIDE = r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
_NUMBER = r"-?(?:0|[1-9][0-9]{0,17}+)(?:\.[0-9]{1,18}+)?(?:[eE][+-]?[0-9]{1,3}+)?"
_ITEM = rf'(?:"{_INSIDE}*+"|{_NUMBER}|true|false|null)[ \t\r\n]*+,[ \t\r\n]*+'
_MEMBER = rf'"{_INSIDE}*+"[ \t\r\n]*+:[ \t\r\n]*+{_ITEM}'
_STRING_RUN = re.compile(f"{_INSIDE}++")
_VALUE_RUNS = {"]": re.compile(f"(?:{_ITEM})++"), "}": re.compile(f"(?:{_MEMBER})++")}
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_NAME = re.compile(r"[\w.:-]+")
_ARGUMENTS_KEYS = ("arguments", "parameters")
_EXTRA_KEYS = ("type", "id")  # other keys a bare call may have; with any further key the object is an answer


class BrokenJson(Exception):
    """Invalid JSON from here on, or the text ended. `held` was taken from the reader and not written."""

    def __init__(self, held: str = "") -> None:
        super().__init__(held)
        self.held = held


def read_json(reader: StreamReader, write: Write) -> Reading[None]:
    """Reads one value and writes its text."""
    closers: list[str] = []
    while True:
        char = yield from _space(reader, write)
        if char in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise BrokenJson
            closers.append(_CLOSERS[char])
            write(reader.take())
            following = yield from _space(reader, write)
            if following != closers[-1]:
                yield from _key(reader, write, closers[-1])
                continue
        else:
            yield from _simple(reader, write, char)
        if not (yield from _after_value(reader, write, closers)):
            return


def _after_value(reader: StreamReader, write: Write, closers: list[str]) -> Reading[bool]:
    """Closes the lists and objects that end here. Whether another value follows."""
    while closers:
        char = yield from _space(reader, write)
        if char == ",":
            write(reader.take())
            yield from _key(reader, write, closers[-1])
            return True
        if char != closers[-1]:
            raise BrokenJson
        write(reader.take())
        closers.pop()
    return False


def _key(reader: StreamReader, write: Write, closer: str) -> Reading[None]:
    """Reads a run of simple values, then in an object the key and colon of the next value."""
    yield from _space(reader, write)
    write(reader.take_match(_VALUE_RUNS[closer]))
    if closer == "]":
        return
    if (yield from _space(reader, write)) != '"':
        raise BrokenJson
    yield from _string(reader, write)
    if (yield from _space(reader, write)) != ":":
        raise BrokenJson
    write(reader.take())


def _simple(reader: StreamReader, write: Write, char: str) -> Reading[None]:
    if char == '"':
        yield from _string(reader, write)
        return
    word = ""
    while char in _SCALAR_CHARS and len(word) < MAX_SCALAR_CHARACTERS:
        word += reader.take()
        char = yield from reader.peek()
    if _SCALAR.fullmatch(word) is None:
        raise BrokenJson(word)
    write(word)


def _string(reader: StreamReader, write: Write) -> Reading[None]:
    write(reader.take())
    while True:
        char = reader.next_char or (yield from reader.peek())
        if char == "":
            raise BrokenJson
        run = reader.take_match(_STRING_RUN)
        if run:
            write(run)
        elif char == "\\":
            yield from _escape(reader, write)
        elif char < " ":
            write(json.dumps(reader.take())[1:-1])
        else:
            write(reader.take())
            return


def _escape(reader: StreamReader, write: Write) -> Reading[None]:
    escape = reader.take()
    char = yield from reader.peek()
    if char == "" or char not in '"\\/bfnrtu':
        raise BrokenJson(escape)
    escape += reader.take()
    for _ in range(4 if char == "u" else 0):
        if (yield from reader.peek()) not in _HEXADECIMAL:
            raise BrokenJson(escape)
        escape += reader.take()
    write(escape)


def _space(reader: StreamReader, write: Write) -> Reading[str]:
    while True:
        char = reader.next_char or (yield from reader.peek())
        if char not in (" ", "\n", "\t", "\r"):
            return char
        write(reader.take_match(SPACE))


def read_string(reader: StreamReader) -> Reading[str]:
    """The value of a string, for keys and names."""
    if (yield from reader.peek()) != '"':
        raise BrokenJson
    parts: list[str] = []
    yield from _string(reader, parts.append)
    value = json.loads("".join(parts))
    assert isinstance(value, str)
    return value


class PartialCall:
    """State of a call whose object is being read."""

    __slots__ = ("arguments", "is_started", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.is_started = False


def read_call(reader: StreamReader, emitter: EventEmitter, *, bare: bool = False) -> Reading[bool]:
    """Reads `{"name": …, "arguments": {…}}`. Whether it was a call; if so, the mark is dropped.

    A bare object has no delimiters around it, so it may have no keys but those of a call.
    """
    partial = PartialCall()
    try:
        yield from _read_members(reader, emitter, partial, bare)
    except BrokenJson:
        if not partial.is_started:
            return False
        emitter.emit_text(reader.take_marked())
        return True
    if not partial.is_started:
        if partial.name is None or (partial.arguments is None and bare):
            return False
        emitter.start_call(partial.name)
        emitter.emit_arguments(partial.arguments or "{}")
    reader.drop_mark()
    return True


def _read_members(reader: StreamReader, emitter: EventEmitter, partial: PartialCall, bare: bool) -> Reading[None]:
    if (yield from reader.skip_space()) != "{":
        raise BrokenJson
    reader.take()
    while True:
        yield from reader.skip_space()
        key = yield from read_string(reader)
        if (yield from reader.skip_space()) != ":":
            raise BrokenJson
        reader.take()
        yield from reader.skip_space()
        yield from _read_member(reader, emitter, partial, bare, key)
        char = yield from reader.skip_space()
        if char not in (",", "}"):
            raise BrokenJson
        reader.take()
        if char == "}":
            return


def _read_member(
    reader: StreamReader, emitter: EventEmitter, partial: PartialCall, bare: bool, key: str
) -> Reading[None]:
    if key == "name" and partial.name is None:
        name = yield from read_string(reader)
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise BrokenJson
        partial.name = name
    elif key in _ARGUMENTS_KEYS and partial.arguments is None and not partial.is_started:
        char = yield from reader.peek()
        if partial.name is not None and char == "{":
            partial.is_started = True
            if not (yield from read_arguments(reader, emitter, partial.name)):
                raise BrokenJson
            reader.mark()
        else:
            partial.arguments = yield from _buffered_arguments(reader)
    elif bare and key not in _EXTRA_KEYS:
        raise BrokenJson
    else:
        yield from read_json(reader, _ignore)


def read_arguments(reader: StreamReader, emitter: EventEmitter, name: str) -> Reading[bool]:
    """Starts the call and emits its arguments as they arrive. Whether they are complete. Drops the mark."""
    reader.drop_mark()
    emitter.start_call(name)
    try:
        yield from read_json(reader, emitter.emit_arguments)
    except BrokenJson as broken:
        emit_held(reader, emitter, broken)
        return False
    return True


def emit_held(reader: StreamReader, emitter: EventEmitter, broken: BrokenJson) -> None:
    """Emits what was held when the arguments broke off: at the end of the output as arguments, else as text."""
    if reader.at_end:
        emitter.emit_arguments(broken.held)
    else:
        emitter.emit_text(broken.held)


def read_named_arguments(reader: StreamReader, emitter: EventEmitter, name: str) -> Reading[bool]:
    """Reads the arguments of a call whose name came before. Whether an object was next; if so, the mark is dropped."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or (yield from reader.skip_space()) != "{":
        return False
    yield from read_arguments(reader, emitter, name)
    return True


def read_name(reader: StreamReader) -> Reading[str]:
    """A function name without quotes; empty if none is next."""
    parts: list[str] = []
    while _NAME.match((yield from reader.peek())):
        parts.append(reader.take_match(_NAME))
    return "".join(parts)


def _buffered_arguments(reader: StreamReader) -> Reading[str]:
    """Arguments that came before the name, or as a string that holds JSON, or as null."""
    parts: list[str] = []
    yield from read_json(reader, parts.append)
    text = "".join(parts)
    if text.startswith('"'):
        text = json.loads(text).strip() or "{}"
        if not is_json_object(text):
            raise BrokenJson
    elif text == "null":
        text = "{}"
    elif not text.startswith("{"):
        raise BrokenJson
    return text


def is_json_object(text: str) -> bool:
    reader = StreamReader()
    reader.feed(text)
    reader.end()
    try:
        for _ in read_json(reader, _ignore):
            raise AssertionError("an ended reader never waits")
    except BrokenJson:
        return False
    return text.startswith("{") and reader.at_end


def _ignore(_: str) -> None:
    pass


def reject_constant(constant: str) -> None:
    """For `json.loads`: NaN and Infinity are Python's, not JSON's."""
    raise ValueError(constant)
