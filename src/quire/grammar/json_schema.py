"""Validates a JSON schema: rejects what would not be enforced or would cost too much. Does not depend on the compiler.

Schemas are read by the latest draft; `$schema` is ignored, as an older draft would disable keywords that the schema
uses.

The tables list the keywords that llguidance enforces, the annotations, and the keywords that contain schemas. A keyword
in none of them is rejected: llguidance ignores unknown keywords, and an ignored constraint is worse than an error.
"""

import copy
import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple
from urllib.parse import unquote

from quire.core.errors import InvalidGrammar, UnsupportedSchema, shown
from quire.grammar import limits
from quire.grammar.expansion import check_expansion

ENFORCED = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    }
)

# Annotations: they do not affect validity. `discriminator` only helps to find the branch of a oneOf; the content
# keywords are annotations since draft 2019-09.
NOTES = frozenset(
    {
        *("title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("$defs", "definitions", "$anchor", "$id", "id", "discriminator"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
    }
)

INSTEAD = {
    "nullable": 'write "type": [..., "null"] instead',
    "not": "list what is allowed instead (enum, anyOf)",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "unevaluatedProperties": "use additionalProperties: false in each branch",
    "unevaluatedItems": "use items: false",
    "x-guidance": "omit it: the server sets how JSON is written",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}

# Keywords whose value is one schema, a list of schemas, or a mapping of names to schemas.
ONE = frozenset({"items", "additionalItems", "additionalProperties"})
LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)

_MONTH_DAYS = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = r"(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:(?:[1-9][0-9]|0[1-9]){_FOURTH}|00{_FOURTH}|{_FOURTH}00)"
_DATE = rf"(?:{_YEAR}-{_MONTH_DAYS}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

# llguidance's own patterns for these accept 2023-02-29, the year 0 and the second 60.
STRICTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


class SchemaChildren(NamedTuple):
    """A subschema and its path."""

    schema: object
    where: str


def children(schema: dict[str, object], where: str) -> list[SchemaChildren]:
    """The direct subschemas of a schema."""
    found: list[SchemaChildren] = []
    for keyword, value in schema.items():
        place = f"{where}/{keyword}"
        if keyword in NAMED and isinstance(value, dict):
            found += [SchemaChildren(part, f"{place}/{name}") for name, part in value.items()]
        elif keyword in LISTED and isinstance(value, list):
            found += [SchemaChildren(part, f"{place}/{number}") for number, part in enumerate(value)]
        elif keyword in ONE:
            found.append(SchemaChildren(value, place))
    return found


_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_WHERE_SHOWN = 120  # characters of a path that an error quotes


def read_schema(text: str) -> dict[str, object]:
    """Parse and validate a schema; the result is ready to compile."""
    if len(text.encode("utf-8", "surrogatepass")) > limits.SCHEMA_BYTES:
        raise InvalidGrammar(
            f"The JSON schema is {len(text)} characters long; the limit is {limits.SCHEMA_BYTES} bytes. Shorten it."
        )
    return check_schema(_parse(text))


def check_schema(schema: object) -> dict[str, object]:
    """Validate a parsed schema; the result is a copy, ready to compile."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"A JSON schema must be an object, not {shown(schema)}.")
    _check_size(schema)
    root = copy.deepcopy({keyword: value for keyword, value in schema.items() if keyword != "$schema"})
    parts = list(_walk(root))
    for part in parts:
        _check_keywords(part)
    schemas = [part.schema for part in parts if isinstance(part.schema, dict)]
    _check_cost(schemas)
    _check_reach(root, schemas)
    check_expansion(schemas, lambda reference: _resolved(root, reference), _intersects)
    for part_schema in schemas:
        _make_exact(part_schema)
    return root


def _parse(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except RecursionError as error:
        raise InvalidGrammar(f"The JSON schema is nested deeper than {limits.SCHEMA_DEPTH} levels.") from error
    except ValueError as error:
        raise InvalidGrammar(f"The JSON schema is not valid JSON: {str(error)[: limits.REASON_CHARACTERS]}.") from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"duplicate key {shown(name)} in an object")
        found[name] = value
    return found


def _check_size(schema: dict[str, object]) -> None:
    """Counts level by level, without recursion: a schema may be nested arbitrarily deep."""
    level: list[object] = [schema]
    num_nodes = 0
    depth = 0
    while level:
        depth += 1
        num_nodes += len(level)
        if depth > limits.SCHEMA_DEPTH:
            raise InvalidGrammar(f"The JSON schema is nested deeper than {limits.SCHEMA_DEPTH} levels.")
        if num_nodes > limits.SCHEMA_NODES:
            raise InvalidGrammar(f"The JSON schema has more than {limits.SCHEMA_NODES} objects and arrays in it.")
        within = [value for node in level for value in _values(node)]
        if any(isinstance(value, float) and not math.isfinite(value) for value in within):
            raise InvalidGrammar("The JSON schema has a number too large for a float.")
        level = [value for value in within if isinstance(value, dict | list)]


def _values(node: object) -> list[object]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _walk(root: dict[str, object]) -> Iterator[SchemaChildren]:
    waiting = [SchemaChildren(root, "#")]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part.schema, dict):
            waiting += children(part.schema, part.where)


def _check_keywords(part: SchemaChildren) -> None:
    schema, where = part.schema, part.where[:_WHERE_SHOWN]
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"At {where} the JSON schema has {shown(schema)}, which is not a schema.")
    for keyword in schema:
        annotation = keyword in NOTES or (keyword.startswith("x-") and keyword != "x-guidance")
        if keyword not in ENFORCED and not annotation:
            raise _unsupported(keyword, where, INSTEAD.get(keyword, "omit it, or use $comment for a note"))
    _check_format(schema, where)
    _check_object(schema, where)
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise _unsupported("$ref", where, f"{shown(reference)} is outside this schema; put it under $defs")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise _unsupported("additionalItems", where, "it means nothing here; use items beside prefixItems")


def _check_format(schema: dict[str, object], where: str) -> None:
    """Formats apply to strings only: with another type they have no effect."""
    name = schema.get("format")
    types = schema.get("type", "string")
    of_strings = types == "string" or (isinstance(types, list) and "string" in types)
    if name is not None and of_strings and name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise _unsupported("format", where, f"{shown(name)} is not enforced ({known} are); use pattern")


def _check_object(schema: dict[str, object], where: str) -> None:
    """Names outside `properties` may repeat in the text, so minProperties beyond the required ones is not enforced."""
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and len(properties) > limits.SCHEMA_PROPERTIES:
        raise InvalidGrammar(
            f"The object at {where} of the JSON schema has {len(properties)} properties; "
            f"the limit is {limits.SCHEMA_PROPERTIES}."
        )
    least = schema.get("minProperties")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, num_required):
        raise _unsupported("minProperties", where, f"{least} is more than are required; list them under required")


def _check_cost(schemas: list[dict[str, object]]) -> None:
    multiples = [_numerator(schema["multipleOf"]) for schema in schemas if "multipleOf" in schema]
    combined = any(_intersects(schema) for schema in schemas)
    if sum(multiples) > limits.MULTIPLES or (combined and math.lcm(*multiples) > limits.MULTIPLES):
        raise _unsupported(
            "multipleOf", "#", f"together they may need {limits.MULTIPLES} remainders; use rounder numbers"
        )
    patterns = {str(schema[keyword]) for schema in schemas for keyword in ("pattern", "format") if keyword in schema}
    if combined and len(patterns) > limits.PATTERNS_IN_INTERSECTION:
        raise InvalidGrammar(
            f"The JSON schema has {len(patterns)} patterns and formats, and combines schemas with allOf or beside "
            f"$ref, anyOf or oneOf; the limit then is {limits.PATTERNS_IN_INTERSECTION}. Combine the patterns into one."
        )


def _check_reach(root: dict[str, object], schemas: list[dict[str, object]]) -> None:
    """Bounds the length of a chain of references: llguidance follows them by recursion."""
    referred = [_resolved(root, str(schema["$ref"])) for schema in schemas if "$ref" in schema]
    definitions = {id(definition): definition for definition in [root, *referred]}
    num_levels = sum(_levels_to_reference(definition) for definition in definitions.values())
    if num_levels > limits.SCHEMA_REACH:
        raise InvalidGrammar(
            f"The JSON schema has {len(definitions) - 1} definitions that $ref names, which lead to one another "
            f"through up to {num_levels} levels; the limit is {limits.SCHEMA_REACH}. Use fewer, or nest them less."
        )


def _resolved(root: dict[str, object], reference: str) -> dict[str, object]:
    """The schema that a reference names; the root, which is never smaller, if the name is unknown."""
    found: object = root
    for name in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else root


def _levels_to_reference(schema: dict[str, object]) -> int:
    """Levels from this schema down to the deepest reference in it; definitions count where they are referenced."""
    level, depth, deepest = [schema], 0, 0
    while level:
        depth += 1
        if any("$ref" in one for one in level):
            deepest = depth
        bodies = [{name: value for name, value in one.items() if name not in _DEFINITIONS} for one in level]
        level = [part.schema for body in bodies for part in children(body, "") if isinstance(part.schema, dict)]
    return deepest


def _intersects(schema: dict[str, object]) -> bool:
    """Whether a value must satisfy several schemas at once here."""
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return True
    combining = _COMBINING & schema.keys()
    return len(combining) > 1 or (bool(combining) and bool((ENFORCED - _COMBINING) & schema.keys()))


def _numerator(value: object) -> int:
    """How many remainders a division by this number has, with its decimal digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InvalidGrammar(f"multipleOf must be a number above 0, not {shown(value)}.")
    return Fraction(str(value)).numerator


def _make_exact(schema: dict[str, object]) -> None:
    """Replace date and time formats by patterns that accept only valid ones."""
    name = schema.get("format")
    if not isinstance(name, str) or name not in STRICTER:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = STRICTER[name]
        return
    parts = schema.setdefault("allOf", [])
    if isinstance(parts, list):
        parts.append({"pattern": STRICTER[name]})


def _unsupported(keyword: str, where: str, instead: str) -> UnsupportedSchema:
    return UnsupportedSchema(f"The JSON-schema keyword {shown(keyword)} at {where} is not supported: {instead}.")
