"""Relaxes a JSON schema to what can be enforced, for clients that do not ask for strictness.

Keywords that cannot be enforced are dropped and listed. Each of them only restricts further, so the result allows
everything that the schema allows: `oneOf` becomes `anyOf`, and without `patternProperties` all names are allowed.
"""

from typing import NamedTuple

from quire.core.errors import UnsupportedSchema
from quire.grammar.json_schema import (
    ENFORCED,
    SchemaChildren,
    check_multiples,
    check_patterns,
    children,
    copy_schema,
    unsupported_keywords,
)
from quire.grammar.schema_dialects import pointer, resolve, use_any_of


class RelaxedSchema(NamedTuple):
    """A schema that can be enforced, and the JSON pointers of the keywords that were dropped."""

    schema: dict[str, object]
    not_enforced: list[str]


def relax_schema(schema: object) -> RelaxedSchema:
    """Drop what cannot be enforced. Raises InvalidGrammar if it is not a schema, or too large."""
    root = copy_schema(schema)
    dropped: list[str] = []
    kept: list[SchemaChildren] = []
    waiting = [SchemaChildren(root, "#")]
    while waiting:
        part = waiting.pop()
        unsupported = dict.fromkeys(found.keyword for found in unsupported_keywords(part))
        if not isinstance(part.schema, dict):
            continue
        kept.append(part)
        for keyword in unsupported:
            dropped += _drop(part, keyword)
        if "oneOf" in part.schema:
            use_any_of(part.schema)
            dropped.append(pointer(part.where, "oneOf"))
        waiting += reversed(children(part.schema, part.where))
    for part in kept:
        dropped += _drop_at_reference(root, part)
    return RelaxedSchema(root, dropped + _drop_costly(kept))


def _drop_at_reference(root: dict[str, object], part: SchemaChildren) -> list[str]:
    """Drop a reference to nothing, and the keywords beside one to a schema around it, which would never end."""
    assert isinstance(part.schema, dict)
    reference = part.schema.get("$ref")
    if not isinstance(reference, str):
        return []
    if resolve(root, reference) is None:
        return _drop(part, "$ref")
    if not f"{part.where}/".startswith(f"{reference}/"):
        return []
    beside = [keyword for keyword in part.schema if keyword in ENFORCED and keyword != "$ref"]
    return [where for keyword in beside for where in _drop(part, keyword)]


def _drop(part: SchemaChildren, keyword: str) -> list[str]:
    assert isinstance(part.schema, dict)
    if keyword not in part.schema:
        return []
    del part.schema[keyword]
    if keyword == "patternProperties":
        part.schema["additionalProperties"] = True
    return [pointer(part.where, keyword)]


def _drop_costly(parts: list[SchemaChildren]) -> list[str]:
    """Drop all numbers of multipleOf, or all patterns and formats, if they cost too much together."""
    schemas = [part.schema for part in parts if isinstance(part.schema, dict)]
    dropped: list[str] = []
    for check, keywords in ((check_multiples, ("multipleOf",)), (check_patterns, ("pattern", "format"))):
        try:
            check(schemas)
        except UnsupportedSchema:
            dropped += [where for part in parts for keyword in keywords for where in _drop(part, keyword)]
    return dropped
