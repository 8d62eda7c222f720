"""Reads one JSON value from a tape and writes down its text as it comes. Builds no value, so nothing can overflow.

What is written is JSON at every cut: a number or a word is written when it is complete and right. Line breaks inside
strings, which models write and JSON forbids, are escaped.
"""

import json
import re
from collections.abc import Callable

from quire.speech.tape import SPACE, Reading, Tape

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


class Broken(Exception):
    """The text is no JSON from here on, or it ends; `held` was taken from the tape and not written."""

    def __init__(self, held: str = "") -> None:
        super().__init__(held)
        self.held = held


def read_json(tape: Tape, write: Write) -> Reading[None]:
    """One value, from the tape's place on."""
    closers: list[str] = []
    while True:
        letter = yield from _space(tape, write)
        if letter in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise Broken
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


def _after_value(tape: Tape, write: Write, closers: list[str]) -> Reading[bool]:
    """Closes what ends here. Whether another value follows."""
    while closers:
        letter = yield from _space(tape, write)
        if letter == ",":
            write(tape.take())
            yield from _key(tape, write, closers[-1])
            return True
        if letter != closers[-1]:
            raise Broken
        write(tape.take())
        closers.pop()
    return False


def _key(tape: Tape, write: Write, closer: str) -> Reading[None]:
    """In an object, the key and colon before a value; in a list, nothing. Simple values before it are read with it."""
    yield from _space(tape, write)
    write(tape.take_run(_STRETCHES[closer]))
    if closer == "]":
        return
    if (yield from _space(tape, write)) != '"':
        raise Broken
    yield from _string(tape, write)
    if (yield from _space(tape, write)) != ":":
        raise Broken
    write(tape.take())


def _simple(tape: Tape, write: Write, letter: str) -> Reading[None]:
    if letter == '"':
        yield from _string(tape, write)
        return
    word = ""
    while letter in _SCALAR_LETTERS and len(word) < MAX_SCALAR_CHARACTERS:
        word += tape.take()
        letter = yield from tape.peek()
    if _SCALAR.fullmatch(word) is None:
        raise Broken(word)
    write(word)


def _string(tape: Tape, write: Write) -> Reading[None]:
    write(tape.take())
    while True:
        letter = tape.ahead or (yield from tape.peek())
        if letter == "":
            raise Broken
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


def _escape(tape: Tape, write: Write) -> Reading[None]:
    escape = tape.take()
    letter = yield from tape.peek()
    if letter == "" or letter not in '"\\/bfnrtu':
        raise Broken(escape)
    escape += tape.take()
    for _ in range(4 if letter == "u" else 0):
        if (yield from tape.peek()) not in _HEXADECIMAL:
            raise Broken(escape)
        escape += tape.take()
    write(escape)


def _space(tape: Tape, write: Write) -> Reading[str]:
    while True:
        letter = tape.ahead or (yield from tape.peek())
        if letter not in (" ", "\n", "\t", "\r"):
            return letter
        write(tape.take_run(SPACE))


def read_string(tape: Tape) -> Reading[str]:
    """A string's value, for keys and names."""
    if (yield from tape.peek()) != '"':
        raise Broken
    pieces: list[str] = []
    yield from _string(tape, pieces.append)
    value = json.loads("".join(pieces))
    assert isinstance(value, str)
    return value
