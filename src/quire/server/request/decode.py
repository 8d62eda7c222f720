"""Bytes to a typed body: the one place where clients' JSON is parsed. Whatever they send, a refusal is a 4xx.

Measures the nesting of a JSON text before it is parsed: in linear time, with no stack and little memory.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request

from quire.core.errors import InvalidParameter, InvalidPrompt, QuireError, shown
from quire.server.http.request_context import context_of, has_context
from quire.server.http.sse import run_inline_if_short
from quire.server.request.schema import Legacy, StructuredOutputs, refuse_legacy

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

_PROMPTS = ("prompt", "messages", "input", "tokens")
_EXAMPLES = {"messages": '[{"role": "user", "content": "hi"}]'}  # of what is sent most, and misread most
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_INTEGER = re.compile(r"-?[0-9]+")
_MAX_WORDS = 300  # characters of msgspec's words, which may hold a name that a client chose

Kind = TypeVar("Kind", bound=msgspec.Struct)


def decode(body: bytes, kind: type[Kind]) -> Kind:
    """A body of this kind, or an error that names the field."""
    if len(body) > MAX_OBJECTS or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_size(size_of(body, JsonSize(MAX_DEPTH, MAX_OBJECTS, MAX_STRINGS, MAX_COMMAS)))
    try:
        decoded = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidPrompt(f"The body is not JSON: {str(error)[:_MAX_WORDS]}.") from error
    if isinstance(decoded, Legacy):
        refuse_legacy(decoded)
    return decoded


def _check_size(size: JsonSize) -> None:
    if size.depth > MAX_DEPTH:
        raise InvalidPrompt(f"The body is nested more than {MAX_DEPTH} levels deep.")
    if size.num_objects > MAX_OBJECTS or size.num_strings > MAX_STRINGS:
        raise InvalidPrompt(
            f"The body has at least {size.num_objects} lists and objects and {size.num_strings} strings; a request may "
            f"bring {MAX_OBJECTS} and {MAX_STRINGS}."
        )
    if size.num_commas > MAX_COMMAS:
        raise InvalidPrompt(
            f"The body has at least {size.num_commas} values in its lists and objects; a request may bring "
            f"{MAX_COMMAS}. Send fewer prompts at once."
        )


async def read(request: Request, kind: type[Kind]) -> Kind:
    """The body of a request."""
    body = await request.body()  # the middleware bounds its length
    if has_context(request.scope):
        context_of(request.scope).num_body_bytes = len(body)
    return await run_inline_if_short(request, decode, body, kind)


def _misfit(words: str, body: bytes) -> QuireError:
    """msgspec says what it expected, and where: `$.stop[0]`. It does not say which key of a mapping."""
    found = _PLACE.match(words)
    assert found is not None, words
    what, path = found["what"][:_MAX_WORDS], (found["path"] or "")[:_MAX_WORDS]
    missing = _MISSING.search(what)
    if missing is not None:
        path = f"{path}.{missing['name']}".lstrip(".")
        what = "it is missing"
    unknown = _UNKNOWN.search(what)
    if unknown is not None:  # constraints alone forbid them: an answer would be freer than it was asked to be
        path = f"{path}.{unknown['name']}"
        what = f"there is no such field; it may have {', '.join(StructuredOutputs.__struct_fields__)}"
    if not path:
        return InvalidPrompt(f"The body must be a JSON object: {what}.")
    if path.startswith("logit_bias") and (entry := _wrong_bias(body)):
        return InvalidParameter(f"logit_bias has {entry}; it maps token ids to numbers.", param="logit_bias")
    if path in _EXAMPLES:
        what = f"{what}; send for example {_EXAMPLES[path]}"
    error = InvalidPrompt if re.split(r"[.\[]", path)[0] in _PROMPTS else InvalidParameter
    return error(f"{path} cannot be read: {what}.", param=path)


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
