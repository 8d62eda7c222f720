"""Calls as Llama 4 and Olmo 3 models write them, in Python's words: `[f(a=1, b="x"), g()]`.

The list is the beginning of the answer, or follows `<|python_start|>`; Olmo writes a call a line, without brackets,
between `<function_calls>` and its end. Arguments are literals, read by hand and never run. Calls in the tags of
`hermes.py` are read too: that is how such a model writes when it is made to call (`forced.py`).
"""

import re

from quire.speech.hermes import OPEN, read_tagged_call
from quire.speech.json_call import MAX_NAME_CHARACTERS, tell_held
from quire.speech.json_text import Broken
from quire.speech.python_text import read_literal
from quire.speech.tape import Markers, Reading, Tape
from quire.speech.voice import Voice, close, say_until

PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
FUNCTION_CALLS = "<function_calls>"
_ENDS = {PYTHON_START: PYTHON_END, FUNCTION_CALLS: "</function_calls>"}
_MARKERS = Markers(PYTHON_START, FUNCTION_CALLS, OPEN)
_NAME = re.compile(r"[A-Za-z0-9_.]+")


def read_pythonic(tape: Tape, voice: Voice) -> Reading[None]:
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


def _read_calls(tape: Tape, voice: Voice) -> Reading[bool]:
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


def _read_call(tape: Tape, voice: Voice) -> Reading[bool]:
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
    except Broken as broken:
        tell_held(tape, voice, broken)
        voice.say(tape.spill())
    return True


def _read_arguments(tape: Tape, voice: Voice, key: str) -> Reading[None]:
    """What follows the first key, or the closing bracket of none."""
    voice.argue("{")
    while key:
        voice.argue(f'"{key}": ')
        yield from read_literal(tape, voice.argue)
        key = yield from _read_next_key(tape)
        voice.argue(", " if key else "")
    if not (yield from tape.accept(")")):
        raise Broken
    voice.argue("}")


def _read_next_key(tape: Tape) -> Reading[str]:
    """The key after a comma; empty where the arguments end, with or without a comma."""
    tape.record()
    if (yield from tape.skip_space()) == ",":
        tape.take()
        if (yield from tape.skip_space()) != ")":
            key = yield from _read_key(tape)
            if not key:
                raise Broken
            tape.forget()
            return key
    tape.forget()
    return ""


def _read_key(tape: Tape) -> Reading[str]:
    """`key=`; empty if that is not what stands here."""
    key = yield from _read_name(tape)
    yield from tape.skip_space()
    return key if (yield from tape.accept("=")) else ""


def _read_name(tape: Tape) -> Reading[str]:
    pieces: list[str] = []
    while _NAME.match((yield from tape.peek())):
        pieces.append(tape.take_run(_NAME))
    return "".join(pieces)
