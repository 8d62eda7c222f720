"""Reads calls that are JSON: an object with a name and arguments, or a name and then an object.

Knows nothing of the marks around them. A call begins when its function is certain; until then the tape keeps a record,
which the caller starts, and says as text if there was no call.
"""

import json
import re

from quire.speech.json_text import Broken, read_json, read_string
from quire.speech.tape import Reading, Tape
from quire.speech.voice import Voice

MAX_NAME_CHARACTERS = 256
_NAME = re.compile(r"[\w.:-]+")

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id")  # what a bare object may say beside its name and arguments; any other key makes it an answer


class Draft:
    """What is known of a call while its object is read."""

    __slots__ = ("arguments", "is_begun", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.is_begun = False


def read_call(tape: Tape, voice: Voice, *, bare: bool = False) -> Reading[bool]:
    """`{"name": …, "arguments": {…}}`. Whether it was a call; if so, the tape's record has ended.

    A bare object has no marks around it, so it must look like a call and like nothing else.
    """
    draft = Draft()
    try:
        yield from _read_members(tape, voice, draft, bare)
    except Broken:
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


def _read_members(tape: Tape, voice: Voice, draft: Draft, bare: bool) -> Reading[None]:
    if (yield from tape.skip_space()) != "{":
        raise Broken
    tape.take()
    while True:
        yield from tape.skip_space()
        key = yield from read_string(tape)
        if (yield from tape.skip_space()) != ":":
            raise Broken
        tape.take()
        yield from tape.skip_space()
        yield from _read_member(tape, voice, draft, bare, key)
        letter = yield from tape.skip_space()
        if letter not in (",", "}"):
            raise Broken
        tape.take()
        if letter == "}":
            return


def _read_member(tape: Tape, voice: Voice, draft: Draft, bare: bool, key: str) -> Reading[None]:
    if key == "name" and draft.name is None:
        name = yield from read_string(tape)
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise Broken
        draft.name = name
    elif key in _ARGUMENTS and draft.arguments is None and not draft.is_begun:
        letter = yield from tape.peek()
        if draft.name is not None and letter == "{":
            draft.is_begun = True
            if not (yield from read_arguments(tape, voice, draft.name)):
                raise Broken
            tape.record()
        else:
            draft.arguments = yield from _kept_arguments(tape)
    elif bare and key not in _BESIDE:
        raise Broken
    else:
        yield from read_json(tape, _ignore)


def read_arguments(tape: Tape, voice: Voice, name: str) -> Reading[bool]:
    """The call begins, and its object is told as it comes. Whether it is whole. Ends the tape's record."""
    tape.forget()
    voice.call(name)
    try:
        yield from read_json(tape, voice.argue)
    except Broken as broken:
        tell_held(tape, voice, broken)
        return False
    return True


def tell_held(tape: Tape, voice: Voice, broken: Broken) -> None:
    """What was held when the arguments broke off: if the text was cut there it may be a beginning, else it is text."""
    if tape.is_dry:
        voice.argue(broken.held)
    else:
        voice.say(broken.held)


def read_named_arguments(tape: Tape, voice: Voice, name: str) -> Reading[bool]:
    """An object that must come next is the call's arguments. Whether it came; if so, the tape's record has ended."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or (yield from tape.skip_space()) != "{":
        return False
    yield from read_arguments(tape, voice, name)
    return True


def read_name(tape: Tape) -> Reading[str]:
    """A function's name without quotes; empty if none stands here."""
    pieces: list[str] = []
    while _NAME.match((yield from tape.peek())):
        pieces.append(tape.take_run(_NAME))
    return "".join(pieces)


def _kept_arguments(tape: Tape) -> Reading[str]:
    """Arguments that came before the name, or as a string that holds JSON, or as null."""
    pieces: list[str] = []
    yield from read_json(tape, pieces.append)
    text = "".join(pieces)
    if text.startswith('"'):
        text = json.loads(text).strip() or "{}"
        if not is_json_object(text):
            raise Broken
    elif text == "null":
        text = "{}"
    elif not text.startswith("{"):
        raise Broken
    return text


def is_json_object(text: str) -> bool:
    tape = Tape()
    tape.feed(text)
    tape.end()
    try:
        for _ in read_json(tape, _ignore):
            raise AssertionError("an ended tape keeps nobody waiting")
    except Broken:
        return False
    return text.startswith("{") and tape.is_dry


def _ignore(_: str) -> None:
    pass
