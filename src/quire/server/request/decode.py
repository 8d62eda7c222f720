"""Bytes to a typed body: the one place where clients' JSON is parsed. Whatever they send, a refusal is a 4xx.

Measures the nesting of a JSON text before it is parsed: in linear time, with no stack and little memory. A field of a
wrong type is refused in plain words: msgspec names the place and its own types (``Expected `float | null`, got `str` -
at `$.temperature` ``), and the types of the body say what the field must be.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import inspect
from starlette.requests import Request

from quire.core.errors import InvalidParameter, InvalidPrompt, QuireError, shown
from quire.server.http.request_context import context_of, has_context
from quire.server.http.sse import run_inline_if_short
from quire.server.request.schema import Legacy, refuse_legacy

_OTHERS = bytes(byte for byte in range(256) if byte not in b'[]{}",')
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_BLOCK_BYTES = 1 << 18
# Of one body. Decoded, a short object takes ten times its bytes, and decoding holds up all other threads: these take
# some 40 MB and 0.1 s. A chat of 10,000 messages has 30,000 lists and objects and 60,000 strings; 200 prompts of 8,000
# token ids have 1,600,000 commas.
MAX_OBJECTS = 100_000
MAX_STRINGS = 500_000
MAX_COMMAS = 2_000_000


class JsonSize(NamedTuple):
    """Of a JSON text: how many lists and objects are open at once, and how many there are, and strings, and commas
    between values. At least, where it is not JSON."""

    depth: int
    num_objects: int
    num_strings: int
    num_commas: int


def size_of(body: bytes, most: JsonSize | None = None) -> JsonSize:
    """In linear time, with little memory, and block by block: other threads run in between. Beyond `most` nothing is
    counted any more."""
    num_quotes = depth = deepest = num_objects = num_commas = 0
    for marks in _marks(body):
        block = np.frombuffer(marks, np.uint8)
        quotes = num_quotes + np.cumsum(block == ord('"'))
        outside = quotes % 2 == 0
        steps = np.where(outside, _STEPS[block], 0)
        depths = depth + np.cumsum(steps)
        num_objects += int(np.count_nonzero(steps > 0))
        num_commas += int(np.count_nonzero((block == ord(",")) & outside))
        num_quotes, depth, deepest = int(quotes[-1]), int(depths[-1]), max(deepest, int(depths.max()))
        size = JsonSize(deepest, num_objects, num_quotes // 2, num_commas)
        if most is not None and any(count > limit for count, limit in zip(size, most, strict=True)):
            break
    return JsonSize(deepest, num_objects, num_quotes // 2, num_commas)


def _marks(body: bytes) -> Iterator[bytes]:
    """Brackets, quotes and commas, without escaped ones; no block ends between a backslash and what it escapes."""
    start = 0
    while start < len(body):
        block = body[start : start + _BLOCK_BYTES]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            block = body[start : start + len(block) + 1]
        start += len(block)
        if marks := block.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS):
            yield marks


def nests_deeper(body: bytes, max_depth: int) -> bool:
    """Whether more than `max_depth` lists and objects are open at once."""
    return size_of(body).depth > max_depth


MAX_DEPTH = 64  # of nested lists and objects
_MOST = JsonSize(MAX_DEPTH, MAX_OBJECTS, MAX_STRINGS, MAX_COMMAS)
_SHORT_CHARACTERS = 1024  # of a text: to count exactly takes some 20 µs more


Kind = TypeVar("Kind", bound=msgspec.Struct)


def decode(body: bytes, kind: type[Kind]) -> Kind:
    """A body of this kind, or an error that names the field."""
    if len(body) > MAX_OBJECTS or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_size(size_of(body, _MOST))
    try:
        decoded = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise body_error(str(error), body, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidPrompt(f"The body is not JSON: {str(error)[:_MAX_WORDS]}.") from error
    if isinstance(decoded, Legacy):
        refuse_legacy(decoded)
    return decoded


def _check_size(size: JsonSize, what: str = "The body has") -> None:
    if size.depth > MAX_DEPTH:
        raise InvalidPrompt(f"The body is nested more than {MAX_DEPTH} levels deep.")
    if size.num_objects > MAX_OBJECTS or size.num_strings > MAX_STRINGS:
        raise InvalidPrompt(
            f"{what} at least {size.num_objects} lists and objects and {size.num_strings} strings; a request may "
            f"bring {MAX_OBJECTS} and {MAX_STRINGS}."
        )
    if size.num_commas > MAX_COMMAS:
        raise InvalidPrompt(
            f"{what} at least {size.num_commas} values in lists and objects; a request may bring {MAX_COMMAS}. Send "
            f"fewer prompts at once."
        )


def check_json_texts(texts: Sequence[str], what: str) -> None:
    """Refuse texts of JSON in a body that exceed its limits together: they are decoded, too."""
    if sum(map(len, texts)) > MAX_OBJECTS:
        _, *counts = zip(*map(_size_of_text, texts), strict=True)
        _check_size(JsonSize(0, *map(sum, counts)), what)  # what is nested too deep is no JSON to its parser


def _size_of_text(text: str) -> JsonSize:
    """Of a short text at most: brackets and commas in its strings count, too."""
    if len(text) > _SHORT_CHARACTERS:
        return size_of(text.encode("utf-8", "replace"), _MOST._replace(depth=len(text)))
    return JsonSize(0, text.count("[") + text.count("{"), text.count('"') // 2, text.count(","))


async def read(request: Request, kind: type[Kind]) -> Kind:
    """The body of a request."""
    body = await request.body()  # the middleware bounds its length
    if has_context(request.scope):
        context_of(request.scope).num_body_bytes = len(body)
    return await run_inline_if_short(request, decode, body, kind)


_PROMPTS = ("prompt", "messages", "input", "tokens")
_EXAMPLES = {"messages": '[{"role": "user", "content": "hi"}]'}  # of what is sent most, and misread most
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_WRONG_TYPE = re.compile(r"Expected `[^`]*`, got `(?P<given>[^`]*)`")
_BOUND = re.compile(r"Expected `[^`]*` (?P<comparison>[<>]=?) (?P<limit>\S+)")
_STEP = re.compile(r"\[(?P<index>[0-9]+|\.\.\.)\]|(?P<name>[^.\[\]]+)")
_INTEGER = re.compile(r"-?[0-9]+")
_MAX_WORDS = 300  # characters of msgspec's words, which may hold a name that a client chose
_MAX_SHOWN = 80  # characters of a wrong value
_MAX_SEARCHED_BYTES = 1 << 20  # in a longer body the wrong value is not looked up

_BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
_ONE = {inspect.IntType: "a whole number", inspect.FloatType: "a number", inspect.StrType: "text"}
_MANY = {inspect.IntType: "whole numbers", inspect.FloatType: "numbers", inspect.StrType: "texts"}
_GIVEN = {  # by msgspec's names
    "str": "text", "int": "a whole number", "float": "a number that is not whole", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip
_FIRST_BYTES = {b'"': "str", b"t": "bool", b"f": "bool", b"n": "null", b"[": "array", b"{": "object"}


def body_error(words: str, body: bytes, kind: type[msgspec.Struct], name: str = "The body") -> QuireError:
    """The error for what msgspec said of a body of this kind. It does not say which key of a mapping."""
    found = _PLACE.match(words)
    assert found is not None, words
    what, path = found["what"][:_MAX_WORDS], (found["path"] or "")[:_MAX_WORDS]
    if (missing := _MISSING.search(what)) is not None:
        path = f"{path}.{missing['name']}".lstrip(".")
        expected = _described(_type_at(kind, path))
        sentence = f"{path} is missing" + (f"; it must be {expected}" if expected else "")
    elif (unknown := _UNKNOWN.search(what)) is not None:  # only constraints forbid unknown fields
        fields = ", ".join(_field_names(_type_at(kind, path)))
        path = f"{path}.{unknown['name']}"
        sentence = f"{path} is not a field; the fields are {fields}"
    elif not path:
        return InvalidPrompt(f"{name} must be a JSON object, not {_given(what, body, path)}.")
    elif path.startswith("logit_bias") and (entry := _wrong_bias(body)):
        return InvalidParameter(f"logit_bias has {entry}; it maps token ids to numbers.", param="logit_bias")
    elif _WRONG_TYPE.search(what) is not None:
        sentence = f"{path} must be {_described(_type_at(kind, path))}, not {_given(what, body, path)}"
    elif (bound := _BOUND.search(what)) is not None:
        sentence = f"{path} must be {_BOUNDS[bound['comparison']]} {bound['limit']}, not {_given(what, body, path)}"
    else:
        sentence = f"{path} cannot be read: {what}; {_given(what, body, path)} was given"
    if path in _EXAMPLES:
        sentence = f"{sentence}; send for example {_EXAMPLES[path]}"
    error = InvalidPrompt if re.split(r"[.\[]", path)[0] in _PROMPTS else InvalidParameter
    return error(f"{sentence}.", param=path)


@cache
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _type_at(kind: type[msgspec.Struct], path: str) -> inspect.Type:
    """The type of a place such as `stop[0]`; that of any value where the types do not say."""
    found = _type_of(kind)
    for step in _STEP.finditer(path):
        found = next((inner for each in _alternatives(found) for inner in _inside(each, step)), inspect.AnyType())
    return found


def _inside(outer: inspect.Type, step: re.Match[str]) -> Iterator[inspect.Type]:
    match outer:
        case inspect.StructType():
            yield from (field.type for field in outer.fields if field.encode_name == step["name"])
        case inspect.ListType() if step["index"]:
            yield outer.item_type
        case inspect.DictType() if step["index"]:
            yield outer.value_type


def _alternatives(kind: inspect.Type) -> Sequence[inspect.Type]:
    bare = kind.type if isinstance(kind, inspect.Metadata) else kind
    if not isinstance(bare, inspect.UnionType):
        return (bare,)
    return tuple(inner for each in bare.types for inner in _alternatives(each))


def _field_names(kind: inspect.Type) -> list[str]:
    structs = (each for each in _alternatives(kind) if isinstance(each, inspect.StructType))
    return [field.encode_name for struct in structs for field in struct.fields]


def _described(kind: inspect.Type) -> str:
    """`a number or left out`; empty for any value."""
    parts = [part for each in _alternatives(kind) for part in _singular(each)]
    if any(isinstance(each, inspect.NoneType) for each in _alternatives(kind)):
        parts.append("left out")
    return _joined(parts) if parts else ""


def _singular(kind: inspect.Type) -> list[str]:
    match kind:
        case inspect.BoolType():
            return ["true", "false"]
        case inspect.ListType():
            return [f"a list of {_plural(kind.item_type)}"]
        case inspect.StructType() | inspect.DictType():
            return ["an object"]
        case _:
            return [_ONE[type(kind)]] if type(kind) in _ONE else []


def _plural(kind: inspect.Type) -> str:
    words = []
    for each in _alternatives(kind):
        match each:
            case inspect.ListType():
                words.append(f"lists of {_plural(each.item_type)}")
            case inspect.StructType() | inspect.DictType():
                words.append("objects")
            case _:
                words.append(_MANY.get(type(each), "values"))
    return _joined(words)


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _given(what: str, body: bytes, path: str) -> str:
    """The wrong value as it was written, shortened; its type, where it cannot be found or is another one."""
    said = _WRONG_TYPE.search(what)
    name = said["given"] if said is not None else None
    raw = _value_at(body, path)
    if raw is None or (name is not None and name not in _names_of(raw)):
        return "this" if name is None else _GIVEN.get(name, f"a value of type {name}")
    text = " ".join(raw[: 4 * _MAX_SHOWN + 1].decode("utf-8", "ignore").split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _names_of(raw: bytes) -> tuple[str, ...]:
    first = _FIRST_BYTES.get(raw[:1])
    return ("int", "float") if first is None else (first,)


def _value_at(body: bytes, path: str) -> bytes | None:
    if len(body) > _MAX_SEARCHED_BYTES:
        return None
    try:
        raw = bytes(msgspec.json.decode(body, type=msgspec.Raw))
        for step in _STEP.finditer(path):
            if step["name"]:
                raw = bytes(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[step["name"]])
            else:
                raw = bytes(msgspec.json.decode(raw, type=list[msgspec.Raw])[int(step["index"])])
    except (ValueError, LookupError, RecursionError):  # what follows the wrong value may not be JSON
        return None
    return raw.strip()


def _wrong_bias(body: bytes) -> str | None:
    """The first entry of `logit_bias` that is not a token id and a number. What follows it may not be JSON."""
    try:
        biases = msgspec.json.decode(body)["logit_bias"]
    except (ValueError, RecursionError):
        return None
    for key, value in biases.items() if isinstance(biases, dict) else ():
        if not _INTEGER.fullmatch(key) or isinstance(value, bool) or not isinstance(value, int | float):
            return f"{shown(key)}: {shown(value)}"
    return None
