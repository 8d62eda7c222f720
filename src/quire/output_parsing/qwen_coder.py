"""Tool calls of Qwen3-Coder, in tags: `<function=name><parameter=key>value</parameter></function>`.

Values are bare text. Whether `12` is a number or a string follows from the function's schema, and from the text itself
where the schema has no type. JSON objects inside `<tool_call>` are read as Hermes calls.
"""

import json
from collections.abc import Mapping

from quire.output_parsing.events import EventEmitter, emit_text_until, skip_call_end
from quire.output_parsing.json_calls import read_call, read_name, reject_constant
from quire.output_parsing.json_dialects import CLOSE, OPEN
from quire.output_parsing.reader import Markers, Reading, StreamReader

FUNCTION = "<function="
_PARAMETER = "<parameter="
_PARAMETER_END = Markers("</parameter>")
_FUNCTION_END = "</function>"
_MARKERS = Markers(OPEN, FUNCTION)
_KEYWORDS = {"True": "true", "False": "false", "None": "null"}  # Python literals, which the model sometimes writes
_SCHEMA_TYPES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    str: frozenset(),  # a quoted string where a string is allowed: the quotes are part of it
    type(None): frozenset({"null"}),
}


def read_qwen_coder(reader: StreamReader, emitter: EventEmitter) -> Reading[None]:
    while marker := (yield from emit_text_until(reader, emitter, _MARKERS)):
        reader.mark()
        if marker == OPEN:
            reader.take(len(OPEN))
        if (yield from reader.skip_space()) == "{":
            is_call = yield from read_call(reader, emitter)
        else:
            is_call = yield from _read_function(reader, emitter)
        if is_call:
            yield from skip_call_end(reader, emitter, CLOSE)
        else:
            emitter.emit_text(reader.take_marked())


def _read_function(reader: StreamReader, emitter: EventEmitter) -> Reading[bool]:
    """Reads one call. Whether it was one; if so, the mark is dropped."""
    if not (yield from reader.accept(FUNCTION)):
        return False
    name = yield from read_name(reader)
    if not name or not (yield from reader.accept(">")):
        return False
    reader.drop_mark()
    emitter.start_call(name)
    emitter.emit_arguments("{")
    comma = ""
    while True:
        reader.mark()
        yield from reader.skip_space()
        parameter = yield from _read_parameter(reader)
        if parameter is None:
            break
        reader.drop_mark()
        key, value = parameter
        emitter.emit_arguments(
            f"{comma}{json.dumps(key, ensure_ascii=False)}: {_as_json(value, _types(emitter, name, key))}"
        )
        comma = ", "
    emitter.emit_text(reader.take_marked())
    if not reader.at_end:  # else the output is truncated, perhaps inside a value
        emitter.emit_arguments("}")
    yield from skip_call_end(reader, emitter, _FUNCTION_END)
    return True


def _read_parameter(reader: StreamReader) -> Reading[tuple[str, str] | None]:
    """A key and the text of its value; None if no parameter is next."""
    if not (yield from reader.accept(_PARAMETER)):
        return None
    key = yield from read_name(reader)
    if not key or not (yield from reader.accept(">")):
        return None
    parts: list[str] = []
    while not (end := reader.marker_here(_PARAMETER_END)):
        if (yield from reader.peek()) == "":
            return None
        parts.append(reader.take_before(_PARAMETER_END))
        if not parts[-1]:
            yield  # the arrived text may be a prefix of the end tag
    if not (yield from reader.accept(end)):
        return None
    return key, "".join(parts).removeprefix("\n").removesuffix("\n")


def _types(emitter: EventEmitter, name: str, key: str) -> frozenset[str]:
    """The types that the schema allows a parameter; empty if it has none."""
    properties = emitter.schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    types = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(types, str):
        return frozenset((types,))
    return frozenset(str(each) for each in types) if isinstance(types, list | tuple) else frozenset()


def _as_json(text: str, types: frozenset[str]) -> str:
    """The value as JSON. A string if it is not valid JSON, or if the schema allows a string and no type that it has."""
    bare = _KEYWORDS.get(text.strip(), text.strip())
    try:
        value_types = _SCHEMA_TYPES[type(json.loads(bare, parse_constant=reject_constant))]
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if "string" in types and not types & value_types else bare
