"""Validates a JSON schema: rejects what would not be enforced or would cost too much. Does not depend on the compiler.

Schemas are read by the latest draft, after `schema_dialects.py` has rewritten what older drafts and OpenAPI write
differently.

The tables list the keywords that llguidance enforces, the annotations, and the keywords that contain schemas. A keyword
in none of them is rejected: llguidance ignores unknown keywords, and an ignored constraint is worse than an error. A
client that does not ask for strictness gets a schema without such keywords (`relaxed_schema.py`), and a warning.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

from quire.core.errors import InvalidGrammar, UnsupportedSchema, shown
from quire.grammar import limits
from quire.grammar.schema_dialects import TYPES, pointer, resolve, rewrite_dialects

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
# keywords are annotations since draft 2019-09; `strict` belongs beside a schema, and some clients put it into one.
NOTES = frozenset(
    {
        *("title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("$defs", "definitions", "$anchor", "$id", "id", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("contentMediaType", "contentEncoding", "contentSchema", "discriminator", "strict", "externalDocs", "xml"),
        *("markdownDescription", "enumNames", "enumDescriptions", "errorMessage", "propertyOrdering"),
    }
)

INSTEAD = {
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

_HEX = "[0-9a-fA-F]"
_UUIDS = {  # pydantic's names
    f"uuid{version}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
    for version in range(1, 9)
}
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", *_UUIDS},
)
_FORMAT_NAMES = ", ".join(sorted(FORMATS))

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
STRICTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$", **_UUIDS}

# The regular expressions that llguidance reads: Rust's, without look-around, back-references and word boundaries.
_ESCAPE = (
    r"\\(?:[dDwWsSnrtfva]|[^a-zA-Z0-9<>\x80-\U0010ffff]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xuU]\{[0-9a-fA-F]+\}"
    r"|[pP](?:\{[^}]*\}|[A-Z]))"
)
_CLASS = rf"\[\^?+(?:(?!&&|--|~~)[^\]\\\[]|{_ESCAPE})++\]"  # two signs would be an operation on classes
_PATTERN = re.compile(
    rf"(?:\\A)?(?:[^\\\[({{]|{_ESCAPE}|{_CLASS}"
    rf"|\((?!\?)|\(\?(?::|P?<[A-Za-z_]\w*>|[imsU-]+[:)])|\{{\d+(?:,\d*)?\}})*+(?:\\z)?",
    re.DOTALL,
)
_LITERAL = re.compile(f"{_ESCAPE}|{_CLASS}")
_FLAGS = re.compile(r"\A\(\?[imsU]+\)")
_INNER_ANCHOR = re.compile(r"[^(|:>^]\^|\$[^)|$]")
_LARGEST_BOUND = 9.2e18  # llguidance writes bounds of numbers with 64 bits
_SMALLEST_BOUND = 1e-37
_SMALLEST_MULTIPLE = 1e-9


class SchemaChildren(NamedTuple):
    """A subschema and its path."""

    schema: object
    where: str


def children(schema: dict[str, object], where: str) -> list[SchemaChildren]:
    """The direct subschemas of a schema."""
    found: list[SchemaChildren] = []
    for keyword, value in schema.items():
        place = pointer(where, keyword)
        if keyword in NAMED and isinstance(value, dict):
            found += [SchemaChildren(part, pointer(place, name)) for name, part in value.items()]
        elif keyword in LISTED and isinstance(value, list):
            found += [SchemaChildren(part, pointer(place, str(number))) for number, part in enumerate(value)]
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
    root = copy_schema(schema)
    parts = list(walk(root))
    for part in parts:
        for found in unsupported_keywords(part):
            raise _unsupported(found.keyword, part.where[:_WHERE_SHOWN], found.instead)
    schemas = [part.schema for part in parts if isinstance(part.schema, dict)]
    check_multiples(schemas)
    check_patterns(schemas)
    _check_reach(root, schemas)
    check_expansion(schemas, lambda reference: _resolved(root, reference), intersects)
    for part_schema in schemas:
        _make_exact(part_schema)
    return root


def copy_schema(schema: object) -> dict[str, object]:
    """A copy in the latest draft, within the limits on size."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"A JSON schema must be an object, not {shown(schema)}.")
    _check_size(schema)
    root = copy.deepcopy(schema)
    rewrite_dialects(root, walk(root))
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
    num_nodes = num_characters = 0
    depth = 0
    while level:
        depth += 1
        num_nodes += len(level)
        if depth > limits.SCHEMA_DEPTH:
            raise InvalidGrammar(f"The JSON schema is nested deeper than {limits.SCHEMA_DEPTH} levels.")
        if num_nodes > limits.SCHEMA_NODES:
            raise InvalidGrammar(f"The JSON schema has more than {limits.SCHEMA_NODES} objects and arrays in it.")
        within = [value for node in level for value in _values(node)]
        texts = chain(within, (name for node in level if isinstance(node, dict) for name in node))
        num_characters += sum(len(text) for text in texts if isinstance(text, str))
        if num_characters > limits.SCHEMA_BYTES:
            raise InvalidGrammar(f"The JSON schema is longer than {limits.SCHEMA_BYTES} bytes, the limit. Shorten it.")
        if any(isinstance(value, float) and not math.isfinite(value) for value in within):
            raise InvalidGrammar("The JSON schema has a number too large for a float.")
        level = [value for value in within if isinstance(value, dict | list)]


def _values(node: object) -> list[object]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def walk(root: dict[str, object]) -> Iterator[SchemaChildren]:
    waiting = [SchemaChildren(root, "#")]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part.schema, dict):
            waiting += children(part.schema, part.where)


class UnsupportedKeyword(NamedTuple):
    """A keyword that would not be enforced, and what to write instead."""

    keyword: str
    instead: str


def unsupported_keywords(part: SchemaChildren) -> Iterator[UnsupportedKeyword]:
    """The keywords of one schema that would not be enforced. Raises if it is not a schema, or too large."""
    schema, where = part.schema, part.where[:_WHERE_SHOWN]
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"At {where} the JSON schema has {shown(schema)}, which is not a schema.")
    properties = schema.get("properties")
    if isinstance(properties, dict) and len(properties) > limits.SCHEMA_PROPERTIES:
        raise InvalidGrammar(
            f"The object at {where} of the JSON schema has {len(properties)} properties; "
            f"the limit is {limits.SCHEMA_PROPERTIES}."
        )
    for keyword in schema:
        annotation = keyword in NOTES or (keyword.startswith("x-") and keyword != "x-guidance")
        if keyword not in ENFORCED and not annotation:
            yield UnsupportedKeyword(keyword, INSTEAD.get(keyword, "omit it, or use $comment for a note"))
    if not _has_known_type(schema):
        names = ", ".join(sorted(TYPES))
        yield UnsupportedKeyword("type", f"{shown(schema['type'])} is not among {names}; omit it to allow any")
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        yield UnsupportedKeyword("$ref", f"{shown(reference)} is outside this schema; put it under $defs")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        yield UnsupportedKeyword("additionalItems", "it means nothing here; use items beside prefixItems")
    if "required" in schema and not isinstance(schema["required"], list):
        yield UnsupportedKeyword("required", "it is a list of names, beside properties")
    yield from _unsupported_strings(schema)
    yield from _unsupported_numbers(schema)


def _has_known_type(schema: dict[str, object]) -> bool:
    kinds = schema.get("type", "object")
    names = kinds if isinstance(kinds, list) else [kinds]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _unsupported_strings(schema: dict[str, object]) -> Iterator[UnsupportedKeyword]:
    """Formats apply to strings only: with another type they have no effect."""
    name, types = schema.get("format"), schema.get("type", "string")
    of_strings = types == "string" or (isinstance(types, list) and "string" in types) or not _has_known_type(schema)
    if name is not None and of_strings and not (isinstance(name, str) and name in FORMATS):
        yield UnsupportedKeyword("format", f"{shown(name)} is not enforced ({_FORMAT_NAMES} are); use pattern")
    named = schema.get("patternProperties")
    patterns = {"pattern": [schema.get("pattern")], "patternProperties": list(named) if isinstance(named, dict) else []}
    for keyword, texts in patterns.items():
        for text in texts:
            if isinstance(text, str) and not _is_enforced(text):
                yield UnsupportedKeyword(
                    keyword, f"{shown(text)} may use look-around, back-references or other syntax that is not supported"
                )


def _is_enforced(pattern: str) -> bool:
    """Whether llguidance reads a regular expression. Anchors are allowed where an alternative begins or ends."""
    return bool(_PATTERN.fullmatch(pattern)) and not _INNER_ANCHOR.search(_LITERAL.sub("a", _FLAGS.sub("", pattern)))


def _unsupported_numbers(schema: dict[str, object]) -> Iterator[UnsupportedKeyword]:
    """Names outside `properties` may repeat in the text, so minProperties beyond the required ones is not enforced.

    llguidance counts properties only if it knows all that may be there, or those that it knows are required.
    """
    least, required = schema.get("minProperties"), schema.get("required")
    needed: list[object] = required if isinstance(required, list) else []
    named = schema.get("properties")
    optional = _COMBINING & schema.keys() or (isinstance(named, dict) and any(name not in needed for name in named))
    for keyword in ("minProperties", "maxProperties"):
        if keyword in schema and optional:
            yield UnsupportedKeyword(keyword, "it needs all properties under required, and no schemas combined with it")
    if isinstance(least, int) and least > max(1, len(needed)) and not optional:
        yield UnsupportedKeyword("minProperties", f"{least} is more than are required; list them under required")
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bound = schema.get(keyword)
        if isinstance(bound, int | float) and bound:
            counted = schema.get("type") == "integer" and bound > 0
            if abs(bound) < _SMALLEST_BOUND or (abs(bound) > _LARGEST_BOUND and not counted):
                yield UnsupportedKeyword(keyword, f"{shown(bound)} is beyond the numbers that can be compared; omit it")
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and 0 < multiple < _SMALLEST_MULTIPLE:
        yield UnsupportedKeyword("multipleOf", f"{shown(multiple)} has too many digits; use a rounder number")


def check_multiples(schemas: list[dict[str, object]]) -> None:
    """Raise UnsupportedSchema if the numbers of multipleOf cost too much together."""
    multiples = [_numerator(schema["multipleOf"]) for schema in schemas if "multipleOf" in schema]
    combined = any(intersects(schema) for schema in schemas)
    if sum(multiples) > limits.MULTIPLES or (combined and math.lcm(*multiples) > limits.MULTIPLES):
        raise _unsupported(
            "multipleOf", "#", f"together they may need {limits.MULTIPLES} remainders; use rounder numbers"
        )


def check_patterns(schemas: list[dict[str, object]]) -> None:
    """Raise UnsupportedSchema if patterns and formats cost too much together."""
    patterns = {str(schema[keyword]) for schema in schemas for keyword in ("pattern", "format") if keyword in schema}
    if len(patterns) > limits.PATTERNS_IN_INTERSECTION and any(intersects(schema) for schema in schemas):
        raise UnsupportedSchema(
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
    found = resolve(root, reference)
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


def intersects(schema: dict[str, object]) -> bool:
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


Resolve = Callable[[str], dict[str, object]]
_CEILING = 1 << 40  # numbers stay small: only their comparison with the limit counts


class Expansion(NamedTuple):
    """What a schema becomes when it is intersected with another."""

    num_alternatives: int
    num_schemas: int  # in one alternative, at most

    @property
    def total(self) -> int:
        return self.num_alternatives * self.num_schemas


_ONE = Expansion(1, 1)


def check_expansion(
    schemas: list[dict[str, object]], resolve: Resolve, intersects: Callable[[dict[str, object]], bool]
) -> None:
    """Raise InvalidGrammar if a schema that intersects others expands too far. `resolve` finds what a $ref names.

    A `$ref` alone is compiled once, however often it is used. Where a value must satisfy several schemas at once
    (allOf, or keywords beside $ref, anyOf or oneOf), llguidance intersects them: it copies the definition behind each
    reference, and combines each alternative of one part with each of the others. A few definitions that refer to the
    next one four times each are a million schemas by then, from a text of one kilobyte.
    """
    known: dict[int, Expansion] = {}
    for schema in schemas:
        if not intersects(schema):
            continue
        try:
            total = _expansion(schema, resolve, known).total
        except RecursionError:
            total = _CEILING
        if total > limits.EXPANDED_SCHEMAS:
            raise InvalidGrammar(
                f"The JSON schema combines schemas (allOf, or keywords beside $ref, anyOf or oneOf) that expand to "
                f"{'more than a million' if total > 1_000_000 else total} parts; the limit is "
                f"{limits.EXPANDED_SCHEMAS}. Repeat fewer references in them, or write the combined schema out."
            )


def _expansion(schema: object, resolve: Resolve, known: dict[int, Expansion]) -> Expansion:
    if not isinstance(schema, dict):
        return _ONE
    found = known.get(id(schema))
    if found is not None:
        return found
    known[id(schema)] = _ONE  # while it is computed: a schema that refers to itself counts once
    together = [_expansion(part, resolve, known) for part in _listed(schema, "allOf")]
    if isinstance(reference := schema.get("$ref"), str):
        together.append(_expansion(resolve(reference), resolve, known))
    for keyword in ("anyOf", "oneOf"):
        branches = [_expansion(part, resolve, known) for part in _listed(schema, keyword)]
        if branches:
            num_alternatives = sum(branch.num_alternatives for branch in branches)
            together.append(Expansion(num_alternatives, max(branch.num_schemas for branch in branches)))
    num_alternatives, num_schemas = 1, 1
    for part in together:
        num_alternatives = min(num_alternatives * part.num_alternatives, _CEILING)
        num_schemas = min(num_schemas + part.num_schemas, _CEILING)
    known[id(schema)] = Expansion(num_alternatives, num_schemas)
    return known[id(schema)]


def _listed(schema: dict[str, object], keyword: str) -> list[object]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []
