"""Structured output: `response_format` and `structured_outputs` of a request as one `Grammar`. Compiles nothing.

The objects of a JSON schema are closed. One that is not `strict` is relaxed to what can be enforced; the response names
the rest in a header.
"""

from typing import NamedTuple

import msgspec

from quire.core.closed_schema import close_objects
from quire.core.errors import InvalidGrammar, InvalidParameter, QuireError, shown
from quire.core.sampling import MAX_CHOICES, Grammar, GrammarKind
from quire.grammar import limits
from quire.grammar.relaxed_schema import relax_schema
from quire.server.request.decode import MAX_DEPTH, nests_deeper
from quire.server.request.schema import Json, ResponseFormat, SamplingBody, StructuredOutputs

_TEXT_CHARACTERS = 4 * limits.SCHEMA_BYTES  # of a schema that is sent as a text: it may be indented
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NOT_SERVED = {
    "structural_tag": "use tools",
    "whitespace_pattern": "the server chooses which white space JSON may have",
    "disable_any_whitespace": "the server chooses which white space JSON may have",
    "disable_additional_properties": "objects that list their properties have no others; omit it",
}


class RequestedGrammar(NamedTuple):
    """A grammar, and the keywords of the client's schema that it does not enforce."""

    grammar: Grammar | None
    is_strict: bool = False
    not_enforced: tuple[str, ...] = ()


def grammar_of(body: SamplingBody) -> RequestedGrammar:
    """The grammar of a body; None if the output is unconstrained."""
    formatted = None if body.response_format is None else _response_format_grammar(body.response_format)
    structured = None if body.structured_outputs is None else _structured_grammar(body.structured_outputs)
    if formatted is not None and structured is not None:
        raise InvalidParameter(
            "response_format and structured_outputs both constrain the output; use one of them.",
            param="structured_outputs",
        )
    named = None if body.response_format is None else body.response_format.json_schema
    return RequestedGrammar(formatted or structured, is_strict=named is not None and named.strict is True)


def relaxed(requested: RequestedGrammar, param: str) -> RequestedGrammar:
    """A schema that is not strict, without what cannot be enforced. Slow for a large schema: call it on a thread."""
    grammar = requested.grammar
    if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA or requested.is_strict:
        return requested
    try:
        schema, dropped = relax_schema(msgspec.json.decode(grammar.text))
    except InvalidGrammar as error:
        error.param = param
        raise
    text = msgspec.json.encode(schema).decode()
    return requested._replace(
        grammar=Grammar(grammar.kind, text), not_enforced=tuple(f"schema{where}" for where in dropped)
    )


def _response_format_grammar(response_format: ResponseFormat) -> Grammar | None:
    if response_format.schema is not None:  # llama.cpp's field
        raise InvalidParameter(
            'response_format.schema is not served here; use {"type": "json_schema", "json_schema": {"schema": …}}.',
            param="response_format.schema",
        )
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "json_schema":
            schema = None if response_format.json_schema is None else response_format.json_schema.schema
            return Grammar(GrammarKind.JSON_SCHEMA, _schema_text(schema, "response_format.json_schema.schema"))
    raise InvalidParameter(
        f"response_format.type is {shown(response_format.type)}; it may be 'text', 'json_object' or 'json_schema'. "
        f"Other constraints go into structured_outputs.",
        param="response_format.type",
    )


def _structured_grammar(options: StructuredOutputs) -> Grammar:
    for name, instead in _NOT_SERVED.items():
        if getattr(options, name) not in (None, False):
            raise _refused(name, f"it is not served here; {instead}")
    given = [name for name in _KINDS if getattr(options, name) is not None]
    if options.json_object is False:
        given.remove("json_object")
    if len(given) != 1:
        raise InvalidParameter(
            f"structured_outputs has {' and '.join(given) or 'no constraint'}; use exactly one of {', '.join(_KINDS)}.",
            param="structured_outputs",
        )
    match given[0]:
        case "json":
            return Grammar(GrammarKind.JSON_SCHEMA, _schema_text(options.json, "structured_outputs.json"))
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "regex":
            return Grammar(GrammarKind.REGEX, _text(options.regex, "regex"))
        case "choice":
            return Grammar(GrammarKind.CHOICE, _choices(options.choice or []))
    return Grammar(GrammarKind.LARK, _text(options.grammar, "grammar"))


def _schema_text(schema: Json, where: str) -> str:
    """The schema as compact JSON, its objects closed. vLLM's clients may send it as a text of JSON.

    Both are bounded here, on the event loop: a text is decoded beside the limits of a body.
    """
    if isinstance(schema, str):
        if len(schema) > _TEXT_CHARACTERS:
            raise _too_large(f"{where} is {len(schema)} characters long", f"{_TEXT_CHARACTERS} characters", where)
        if nests_deeper(schema.encode(), MAX_DEPTH):
            raise InvalidParameter(f"{where} is nested more than {MAX_DEPTH} levels deep.", param=where)
        try:
            schema = msgspec.json.decode(schema)
        except ValueError as error:
            raise InvalidParameter(f"{where} is a text that is not JSON: {error}.", param=where) from error
    if schema is False:
        raise InvalidParameter(f"{where} is false, a schema that nothing matches.", param=where)
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(f"{where} must be a JSON schema: an object, not {shown(schema)}.", param=where)
    text = msgspec.json.encode(schema)
    if len(text) > limits.SCHEMA_BYTES:
        raise _too_large(f"{where} takes {len(text)} bytes as JSON", f"{limits.SCHEMA_BYTES} bytes", where)
    closed = msgspec.json.encode(close_objects(schema))
    return (closed if len(closed) <= limits.SCHEMA_BYTES else text).decode()


def _too_large(what: str, limit: str, where: str) -> InvalidGrammar:
    return InvalidGrammar(f"{what}; the limit of a schema is {limit}. Shorten it.", param=where.partition(".")[0])


def _choices(choices: list[str]) -> str:
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise _refused("choice", f"it must hold 1 to {MAX_CHOICES} texts that are not empty, not {len(choices)}")
    return msgspec.json.encode(choices).decode()


def _text(text: str | None, name: str) -> str:
    if not text:
        raise _refused(name, "it is empty")
    return text


def _refused(name: str, reason: str) -> QuireError:
    param = f"structured_outputs.{name}"
    return InvalidParameter(f"{param}: {reason}.", param=param)
