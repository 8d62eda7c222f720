"""Calls as Llama 4 and Olmo 3 models write them, in Python's words: `[f(a=1, b="x"), g()]`.

The list is the beginning of the answer, or follows `<|python_start|>`; Olmo writes a call a line, without brackets,
between `<function_calls>` and its end. Arguments are literals, read by hand and never run. Calls in the tags of
`hermes.py` are read too: that is how such a model writes when it is made to call (`forced.py`).

Reads a Python literal from a tape and writes it down as JSON. Nothing is ever run, and no value is built.

Strings, numbers, True, False, None (and JSON's words for them), lists and dictionaries with strings as keys. Tuples,
sets, prefixed and joined strings are refused. An escape that this file does not know keeps its backslash, as in Python.
"""

import json
import re

from quire.output_parsing.emitter import EventEmitter, close, say_until
from quire.output_parsing.json_calls import (
    MAX_DEPTH,
    MAX_NAME_CHARACTERS,
    MAX_SCALAR_CHARACTERS,
    BrokenJson,
    Write,
    tell_held,
)
from quire.output_parsing.json_dialects import OPEN, read_tagged_call
from quire.output_parsing.reader import Markers, Reading, StreamReader

_PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD_LETTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_NUM_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"{": "}", "[": "]"}


def read_literal(tape: StreamReader, write: Write) -> Reading[None]:
    closers: list[str] = []
    while True:
        letter = yield from tape.skip_space()
        if letter in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise BrokenJson
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


def _after_value(tape: StreamReader, write: Write, closers: list[str]) -> Reading[bool]:
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
            raise BrokenJson
        write(tape.take())
        closers.pop()
    return False


def _key(tape: StreamReader, write: Write, closer: str) -> Reading[None]:
    """In a dictionary, the key and colon before a value; in a list, nothing."""
    if closer == "]":
        return
    if (yield from tape.peek()) not in ("'", '"'):
        raise BrokenJson
    yield from _string(tape, write)
    if (yield from tape.skip_space()) != ":":
        raise BrokenJson
    tape.take()
    write(": ")


def _word(tape: StreamReader, write: Write, letter: str) -> Reading[None]:
    word = ""
    while letter in _WORD_LETTERS and len(word) < MAX_SCALAR_CHARACTERS:
        word += tape.take()
        letter = yield from tape.peek()
    if word in _WORDS:
        write(_WORDS[word])
    elif _NUMBER.fullmatch(word):
        write(word)
    else:
        raise BrokenJson(word)


def _string(tape: StreamReader, write: Write) -> Reading[None]:
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
            raise BrokenJson
        if letter == "\\":
            yield from _escape(tape, write)
        elif letter != quote:
            write(_inside(tape.take_run(_PLAIN[quote])))
        elif (yield from tape.accept(end)):
            write('"')
            return
        else:
            write(_inside(tape.take()))


def _escape(tape: StreamReader, write: Write) -> Reading[None]:
    escape = tape.take()
    letter = yield from tape.peek()
    if letter == "":
        raise BrokenJson(escape)
    escape += tape.take()
    if letter in _ESCAPES:
        write(_inside(_ESCAPES[letter]))
        return
    digits = ""
    for _ in range(_NUM_HEXADECIMAL.get(letter, 0)):
        if (yield from tape.peek()) not in _HEXADECIMAL:
            raise BrokenJson(escape + digits)
        digits += tape.take()
    if not digits:
        write(_inside(escape))
    elif int(digits, 16) <= 0x10FFFF:
        write(json.dumps(chr(int(digits, 16)))[1:-1])
    else:
        raise BrokenJson(escape + digits)


def _inside(text: str) -> str:
    """As it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
FUNCTION_CALLS = "<function_calls>"
_ENDS = {PYTHON_START: PYTHON_END, FUNCTION_CALLS: "</function_calls>"}
_MARKERS = Markers(PYTHON_START, FUNCTION_CALLS, OPEN)
_NAME = re.compile(r"[A-Za-z0-9_.]+")


def read_pythonic(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    tape.record()
    if (yield from tape.skip_space()) == "[":
        yield from _read_calls(tape, voice)
    else:
        voice.say(tape.spill())
    while marker := (yield from say_until(tape, voice, _MARKERS)):
        if marker == OPEN:
            yield from read_tagged_call(tape, voice)
            continue
        tape.record()
        tape.take(len(marker))
        yield from tape.skip_space()
        if (yield from _read_calls(tape, voice)):
            yield from close(tape, voice, _ENDS[marker])


def _read_calls(tape: StreamReader, voice: EventEmitter) -> Reading[bool]:
    """Calls in a list, or without brackets, to the end of the list or as long as they come. Whether there was one.

    The tape keeps a record of what may be the next call, and it ends here.
    """
    in_list = yield from tape.accept("[")
    num_calls = 0
    while (yield from _read_call(tape, voice)):
        num_calls += 1
        tape.record()
        letter = yield from tape.skip_space()
        if letter == ",":
            tape.take()
            letter = yield from tape.skip_space()
        elif in_list and letter != "]":
            break
        if letter == "]" and in_list:
            tape.take()
            tape.forget()
            return True
    voice.say(tape.spill())
    return num_calls > 0


def _read_call(tape: StreamReader, voice: EventEmitter) -> Reading[bool]:
    """Whether it was a call; if so, the tape's record has ended."""
    yield from tape.skip_space()
    name = yield from _read_name(tape)
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not (yield from tape.accept("(")):
        return False
    key = ""
    if (yield from tape.skip_space()) != ")":
        key = yield from _read_key(tape)
        if not key:
            return False
    tape.forget()
    voice.call(name)
    try:
        yield from _read_arguments(tape, voice, key)
    except BrokenJson as broken:
        tell_held(tape, voice, broken)
        voice.say(tape.spill())
    return True


def _read_arguments(tape: StreamReader, voice: EventEmitter, key: str) -> Reading[None]:
    """What follows the first key, or the closing bracket of none."""
    voice.argue("{")
    while key:
        voice.argue(f'"{key}": ')
        yield from read_literal(tape, voice.argue)
        key = yield from _read_next_key(tape)
        voice.argue(", " if key else "")
    if not (yield from tape.accept(")")):
        raise BrokenJson
    voice.argue("}")


def _read_next_key(tape: StreamReader) -> Reading[str]:
    """The key after a comma; empty where the arguments end, with or without a comma."""
    tape.record()
    if (yield from tape.skip_space()) == ",":
        tape.take()
        if (yield from tape.skip_space()) != ")":
            key = yield from _read_key(tape)
            if not key:
                raise BrokenJson
            tape.forget()
            return key
    tape.forget()
    return ""


def _read_key(tape: StreamReader) -> Reading[str]:
    """`key=`; empty if that is not what stands here."""
    key = yield from _read_name(tape)
    yield from tape.skip_space()
    return key if (yield from tape.accept("=")) else ""


def _read_name(tape: StreamReader) -> Reading[str]:
    pieces: list[str] = []
    while _NAME.match((yield from tape.peek())):
        pieces.append(tape.take_run(_NAME))
    return "".join(pieces)
