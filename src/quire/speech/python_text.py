"""Reads a Python literal from a tape and writes it down as JSON. Nothing is ever run, and no value is built.

Strings, numbers, True, False, None (and JSON's words for them), lists and dictionaries with strings as keys. Tuples,
sets, prefixed and joined strings are refused. An escape that this file does not know keeps its backslash, as in Python.
"""

import json
import re

from quire.speech.json_text import MAX_DEPTH, MAX_SCALAR_CHARACTERS, Broken, Write
from quire.speech.tape import Reading, Tape

_PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD_LETTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_NUM_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"{": "}", "[": "]"}


def read_literal(tape: Tape, write: Write) -> Reading[None]:
    closers: list[str] = []
    while True:
        letter = yield from tape.skip_space()
        if letter in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise Broken
            closers.append(_CLOSERS[letter])
            write(tape.take())
            following = yield from tape.skip_space()
            if following != closers[-1]:
                yield from _key(tape, write, closers[-1])
                continue
        elif letter in ("'", '"'):
            yield from _string(tape, write)
        else:
            yield from _word(tape, write, letter)
        if not (yield from _after_value(tape, write, closers)):
            return


def _after_value(tape: Tape, write: Write, closers: list[str]) -> Reading[bool]:
    """Closes what ends here. Whether another value follows. A comma before the end is Python, but not JSON."""
    while closers:
        letter = yield from tape.skip_space()
        if letter == ",":
            tape.take()
            letter = yield from tape.skip_space()
            if letter != closers[-1]:
                write(", ")
                yield from _key(tape, write, closers[-1])
                return True
        if letter != closers[-1]:
            raise Broken
        write(tape.take())
        closers.pop()
    return False


def _key(tape: Tape, write: Write, closer: str) -> Reading[None]:
    """In a dictionary, the key and colon before a value; in a list, nothing."""
    if closer == "]":
        return
    if (yield from tape.peek()) not in ("'", '"'):
        raise Broken
    yield from _string(tape, write)
    if (yield from tape.skip_space()) != ":":
        raise Broken
    tape.take()
    write(": ")


def _word(tape: Tape, write: Write, letter: str) -> Reading[None]:
    word = ""
    while letter in _WORD_LETTERS and len(word) < MAX_SCALAR_CHARACTERS:
        word += tape.take()
        letter = yield from tape.peek()
    if word in _WORDS:
        write(_WORDS[word])
    elif _NUMBER.fullmatch(word):
        write(word)
    else:
        raise Broken(word)


def _string(tape: Tape, write: Write) -> Reading[None]:
    quote = tape.take()
    write('"')
    if (yield from tape.accept(quote * 2)):
        end = quote * 3
    elif (yield from tape.accept(quote)):
        write('"')
        return
    else:
        end = quote
    while True:
        letter = yield from tape.peek()
        if letter == "":
            raise Broken
        if letter == "\\":
            yield from _escape(tape, write)
        elif letter != quote:
            write(_inside(tape.take_run(_PLAIN[quote])))
        elif (yield from tape.accept(end)):
            write('"')
            return
        else:
            write(_inside(tape.take()))


def _escape(tape: Tape, write: Write) -> Reading[None]:
    escape = tape.take()
    letter = yield from tape.peek()
    if letter == "":
        raise Broken(escape)
    escape += tape.take()
    if letter in _ESCAPES:
        write(_inside(_ESCAPES[letter]))
        return
    digits = ""
    for _ in range(_NUM_HEXADECIMAL.get(letter, 0)):
        if (yield from tape.peek()) not in _HEXADECIMAL:
            raise Broken(escape + digits)
        digits += tape.take()
    if not digits:
        write(_inside(escape))
    elif int(digits, 16) <= 0x10FFFF:
        write(json.dumps(chr(int(digits, 16)))[1:-1])
    else:
        raise Broken(escape + digits)


def _inside(text: str) -> str:
    """As it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
