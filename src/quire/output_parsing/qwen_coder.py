"""Calls as Qwen3-Coder writes them, in tags: `<function=name><parameter=key>value</parameter></function>`.

Values are bare text: whether `12` is a number or a string is known from the function's schema, and from the text
itself where the schema does not say. Objects inside the tags are read as `hermes.py` does.
"""

import json
from collections.abc import Mapping

from quire.output_parsing.emitter import EventEmitter, close, say_until
from quire.output_parsing.json_calls import read_call, read_name
from quire.output_parsing.json_dialects import CLOSE, OPEN
from quire.output_parsing.reader import Markers, Reading, StreamReader

FUNCTION = "<function="
_PARAMETER = "<parameter="
_PARAMETER_END = Markers("</parameter>")
_FUNCTION_END = "</function>"
_MARKERS = Markers(OPEN, FUNCTION)
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which the model writes now and then
_KINDS: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    str: frozenset(),  # a string in quotes, where a string may be: the quotes are part of it
    type(None): frozenset({"null"}),
}


def read_qwen_coder(tape: StreamReader, voice: EventEmitter) -> Reading[None]:
    while marker := (yield from say_until(tape, voice, _MARKERS)):
        tape.record()
        if marker == OPEN:
            tape.take(len(OPEN))
        if (yield from tape.skip_space()) == "{":
            is_call = yield from read_call(tape, voice)
        else:
            is_call = yield from _read_function(tape, voice)
        if is_call:
            yield from close(tape, voice, CLOSE)
        else:
            voice.say(tape.spill())


def _read_function(tape: StreamReader, voice: EventEmitter) -> Reading[bool]:
    """Whether it was a call; if so, the tape's record has ended."""
    if not (yield from tape.accept(FUNCTION)):
        return False
    name = yield from read_name(tape)
    if not name or not (yield from tape.accept(">")):
        return False
    tape.forget()
    voice.call(name)
    voice.argue("{")
    comma = ""
    while True:
        tape.record()
        yield from tape.skip_space()
        parameter = yield from _read_parameter(tape)
        if parameter is None:
            break
        tape.forget()
        key, value = parameter
        voice.argue(f"{comma}{json.dumps(key, ensure_ascii=False)}: {_as_json(value, _types(voice, name, key))}")
        comma = ", "
    voice.say(tape.spill())
    if not tape.is_dry:  # else it was cut, perhaps inside a value
        voice.argue("}")
    yield from close(tape, voice, _FUNCTION_END)
    return True


def _read_parameter(tape: StreamReader) -> Reading[tuple[str, str] | None]:
    """A key and the text of its value; None if none stands here."""
    if not (yield from tape.accept(_PARAMETER)):
        return None
    key = yield from read_name(tape)
    if not key or not (yield from tape.accept(">")):
        return None
    pieces: list[str] = []
    while not (end := tape.which(_PARAMETER_END)):
        if (yield from tape.peek()) == "":
            return None
        pieces.append(tape.take_before(_PARAMETER_END))
        if not pieces[-1]:
            yield  # what is there may be the beginning of the end
    if not (yield from tape.accept(end)):
        return None
    return key, "".join(pieces).removeprefix("\n").removesuffix("\n")


def _types(voice: EventEmitter, name: str, key: str) -> frozenset[str]:
    """What the schema lets a parameter be; nothing if it does not say."""
    properties = voice.schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    types = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(types, str):
        return frozenset((types,))
    return frozenset(str(each) for each in types) if isinstance(types, list | tuple) else frozenset()


def _as_json(text: str, types: frozenset[str]) -> str:
    """The text is a string if the schema lets it be one and nothing else that it could be."""
    bare = _WORDS.get(text.strip(), text.strip())
    try:
        kinds = _KINDS[type(json.loads(bare, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if "string" in types and not types & kinds else bare


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are Python's, not JSON's
