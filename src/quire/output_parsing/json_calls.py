"""Reads calls that are JSON: an object with a name and arguments, or a name and then an object.

Knows nothing of the marks around them. A call begins when its function is certain; until then the tape keeps a record,
which the caller starts, and says as text if there was no call.

Reads one JSON value from a tape and writes down its text as it comes. Builds no value, so nothing can overflow.

What is written is JSON at every cut: a number or a word is written when it is complete and right. Line breaks inside
strings, which models write and JSON forbids, are escaped.
"""

import json
import re
from collections.abc import Callable

from quire.output_parsing.emitter import EventEmitter
from quire.output_parsing.reader import SPACE, Reading, StreamReader

MAX_DEPTH = 128  # of lists and objects inside each other; a schema may have half of it
MAX_SCALAR_CHARACTERS = 400  # the longest double has 309 digits before the point

Write = Callable[[str], None]

# Whole stretches at once, where they are there and simple; never gone back into, so one look at each character.
_INSIDE = r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
_NUMBER = r"-?(?:0|[1-9][0-9]{0,17}+)(?:\.[0-9]{1,18}+)?(?:[eE][+-]?[0-9]{1,3}+)?"
_ITEM = rf'(?:"{_INSIDE}*+"|{_NUMBER}|true|false|null)[ \t\r\n]*+,[ \t\r\n]*+'
_MEMBER = rf'"{_INSIDE}*+"[ \t\r\n]*+:[ \t\r\n]*+{_ITEM}'
_STRING_STRETCH = re.compile(f"{_INSIDE}++")
_STRETCHES = {"]": re.compile(f"(?:{_ITEM})++"), "}": re.compile(f"(?:{_MEMBER})++")}
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_LETTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}


class BrokenJson(Exception):
    """The text is no JSON from here on, or it ends; `held` was taken from the tape and not written."""

    def __init__(self, held: str = "") -> None:
        super().__init__(held)
        self.held = held


def read_json(tape: StreamReader, write: Write) -> Reading[None]:
    """One value, from the tape's place on."""
    closers: list[str] = []
    while True:
        letter = yield from _space(tape, write)
        if letter in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise BrokenJson
            closers.append(_CLOSERS[letter])
            write(tape.take())
            following = yield from _space(tape, write)
            if following != closers[-1]:
                yield from _key(tape, write, closers[-1])
                continue
        else:
            yield from _simple(tape, write, letter)
        if not (yield from _after_value(tape, write, closers)):
            return


def _after_value(tape: StreamReader, write: Write, closers: list[str]) -> Reading[bool]:
    """Closes what ends here. Whether another value follows."""
    while closers:
        letter = yield from _space(tape, write)
        if letter == ",":
            write(tape.take())
            yield from _key(tape, write, closers[-1])
            return True
        if letter != closers[-1]:
            raise BrokenJson
        write(tape.take())
        closers.pop()
    return False


def _key(tape: StreamReader, write: Write, closer: str) -> Reading[None]:
    """In an object, the key and colon before a value; in a list, nothing. Simple values before it are read with it."""
    yield from _space(tape, write)
    write(tape.take_run(_STRETCHES[closer]))
    if closer == "]":
        return
    if (yield from _space(tape, write)) != '"':
        raise BrokenJson
    yield from _string(tape, write)
    if (yield from _space(tape, write)) != ":":
        raise BrokenJson
    write(tape.take())


def _simple(tape: StreamReader, write: Write, letter: str) -> Reading[None]:
    if letter == '"':
        yield from _string(tape, write)
        return
    word = ""
    while letter in _SCALAR_LETTERS and len(word) < MAX_SCALAR_CHARACTERS:
        word += tape.take()
        letter = yield from tape.peek()
    if _SCALAR.fullmatch(word) is None:
        raise BrokenJson(word)
    write(word)


def _string(tape: StreamReader, write: Write) -> Reading[None]:
    write(tape.take())
    while True:
        letter = tape.ahead or (yield from tape.peek())
        if letter == "":
            raise BrokenJson
        stretch = tape.take_run(_STRING_STRETCH)
        if stretch:
            write(stretch)
        elif letter == "\\":
            yield from _escape(tape, write)
        elif letter < " ":
            write(json.dumps(tape.take())[1:-1])
        else:
            write(tape.take())
            return


def _escape(tape: StreamReader, write: Write) -> Reading[None]:
    escape = tape.take()
    letter = yield from tape.peek()
    if letter == "" or letter not in '"\\/bfnrtu':
        raise BrokenJson(escape)
    escape += tape.take()
    for _ in range(4 if letter == "u" else 0):
        if (yield from tape.peek()) not in _HEXADECIMAL:
            raise BrokenJson(escape)
        escape += tape.take()
    write(escape)


def _space(tape: StreamReader, write: Write) -> Reading[str]:
    while True:
        letter = tape.ahead or (yield from tape.peek())
        if letter not in (" ", "\n", "\t", "\r"):
            return letter
        write(tape.take_run(SPACE))


def read_string(tape: StreamReader) -> Reading[str]:
    """A string's value, for keys and names."""
    if (yield from tape.peek()) != '"':
        raise BrokenJson
    pieces: list[str] = []
    yield from _string(tape, pieces.append)
    value = json.loads("".join(pieces))
    assert isinstance(value, str)
    return value


MAX_NAME_CHARACTERS = 256
_NAME = re.compile(r"[\w.:-]+")

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id")  # what a bare object may say beside its name and arguments; any other key makes it an answer


class PartialCall:
    """What is known of a call while its object is read."""

    __slots__ = ("arguments", "is_begun", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.is_begun = False


def read_call(tape: StreamReader, voice: EventEmitter, *, bare: bool = False) -> Reading[bool]:
    """`{"name": …, "arguments": {…}}`. Whether it was a call; if so, the tape's record has ended.

    A bare object has no marks around it, so it must look like a call and like nothing else.
    """
    draft = PartialCall()
    try:
        yield from _read_members(tape, voice, draft, bare)
    except BrokenJson:
        if not draft.is_begun:
            return False
        voice.say(tape.spill())
        return True
    if not draft.is_begun:
        if draft.name is None or (draft.arguments is None and bare):
            return False
        voice.call(draft.name)
        voice.argue(draft.arguments or "{}")
    tape.forget()
    return True


def _read_members(tape: StreamReader, voice: EventEmitter, draft: PartialCall, bare: bool) -> Reading[None]:
    if (yield from tape.skip_space()) != "{":
        raise BrokenJson
    tape.take()
    while True:
        yield from tape.skip_space()
        key = yield from read_string(tape)
        if (yield from tape.skip_space()) != ":":
            raise BrokenJson
        tape.take()
        yield from tape.skip_space()
        yield from _read_member(tape, voice, draft, bare, key)
        letter = yield from tape.skip_space()
        if letter not in (",", "}"):
            raise BrokenJson
        tape.take()
        if letter == "}":
            return


def _read_member(tape: StreamReader, voice: EventEmitter, draft: PartialCall, bare: bool, key: str) -> Reading[None]:
    if key == "name" and draft.name is None:
        name = yield from read_string(tape)
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise BrokenJson
        draft.name = name
    elif key in _ARGUMENTS and draft.arguments is None and not draft.is_begun:
        letter = yield from tape.peek()
        if draft.name is not None and letter == "{":
            draft.is_begun = True
            if not (yield from read_arguments(tape, voice, draft.name)):
                raise BrokenJson
            tape.record()
        else:
            draft.arguments = yield from _kept_arguments(tape)
    elif bare and key not in _BESIDE:
        raise BrokenJson
    else:
        yield from read_json(tape, _ignore)


def read_arguments(tape: StreamReader, voice: EventEmitter, name: str) -> Reading[bool]:
    """The call begins, and its object is told as it comes. Whether it is whole. Ends the tape's record."""
    tape.forget()
    voice.call(name)
    try:
        yield from read_json(tape, voice.argue)
    except BrokenJson as broken:
        tell_held(tape, voice, broken)
        return False
    return True


def tell_held(tape: StreamReader, voice: EventEmitter, broken: BrokenJson) -> None:
    """What was held when the arguments broke off: if the text was cut there it may be a beginning, else it is text."""
    if tape.is_dry:
        voice.argue(broken.held)
    else:
        voice.say(broken.held)


def read_named_arguments(tape: StreamReader, voice: EventEmitter, name: str) -> Reading[bool]:
    """An object that must come next is the call's arguments. Whether it came; if so, the tape's record has ended."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or (yield from tape.skip_space()) != "{":
        return False
    yield from read_arguments(tape, voice, name)
    return True


def read_name(tape: StreamReader) -> Reading[str]:
    """A function's name without quotes; empty if none stands here."""
    pieces: list[str] = []
    while _NAME.match((yield from tape.peek())):
        pieces.append(tape.take_run(_NAME))
    return "".join(pieces)


def _kept_arguments(tape: StreamReader) -> Reading[str]:
    """Arguments that came before the name, or as a string that holds JSON, or as null."""
    pieces: list[str] = []
    yield from read_json(tape, pieces.append)
    text = "".join(pieces)
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
    tape = StreamReader()
    tape.feed(text)
    tape.end()
    try:
        for _ in read_json(tape, _ignore):
            raise AssertionError("an ended tape keeps nobody waiting")
    except BrokenJson:
        return False
    return text.startswith("{") and tape.is_dry


def _ignore(_: str) -> None:
    pass
