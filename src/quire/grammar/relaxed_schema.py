"""Relaxes a JSON schema to what can be enforced, for clients that do not ask for strictness.

Keywords that cannot be enforced are dropped and listed. Each of them only restricts further, so the result allows
everything that the schema allows: `oneOf` becomes `anyOf`, and without `patternProperties` all names are allowed.
"""

from contextlib import suppress
from typing import NamedTuple

from quire.core.errors import UnsupportedSchema
from quire.grammar.json_schema import (
    ENFORCED,
    SchemaChildren,
    check_multiples,
    check_patterns,
    children,
    copy_schema,
    intersects,
    unsupported_keywords,
)
from quire.grammar.schema_dialects import pointer, resolve, use_any_of

_COMBINING = ("allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_MAX_SEARCHED = 50_000  # of schemas in all searches together: a fraction of a second


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
    circular = _CircularIntersections(root)
    for part in kept:
        if circular.contain(part.schema):
            dropped += _stop_intersecting(part)
    for part in kept:
        dropped += _drop_endless_reference(root, part, _MAX_SEARCHED // len(kept))
    return RelaxedSchema(root, dropped + _drop_costly(kept))


def _drop_at_reference(root: dict[str, object], part: SchemaChildren) -> list[str]:
    """Drop a reference to nothing."""
    assert isinstance(part.schema, dict)
    reference = part.schema.get("$ref")
    if not isinstance(reference, str) or resolve(root, reference) is not None:
        return []
    return _drop(part, "$ref")


class _CircularIntersections:
    """The schemas that cannot be intersected with what they name, found in the order in which llguidance compiles.

    It compiles what a reference names when it first meets it, and intersects it with what is beside the reference when
    it is compiled. If the reference is inside what it names, that would never be. And two definitions that contain
    themselves have an intersection without end.
    """

    def __init__(self, root: dict[str, object]) -> None:
        self._root = root
        self._found: set[int] = set()  # ids, of schemas here and below
        self._begun: set[int] = set()
        self._compiling: list[int] = []
        self._recursive: set[int] = set()
        self._num_together: dict[int, int] = {}
        self._num_searched = 0
        with suppress(RecursionError):  # the limit on chains of references will refuse it
            self._compile(root)

    def contain(self, schema: object) -> bool:
        if not isinstance(schema, dict) or not intersects(schema):
            return False
        try:
            return id(schema) in self._found or self._num_recursive(schema) > 1
        except RecursionError:
            return True

    def _compile(self, definition: object) -> None:
        """A definition, when it is met."""
        if id(definition) in self._compiling:
            self._recursive.update(self._compiling[self._compiling.index(id(definition)) :])
        if id(definition) in self._begun:
            return
        self._begun.add(id(definition))
        self._compiling.append(id(definition))
        self._walk(definition)
        self._compiling.pop()

    def _walk(self, schema: object) -> None:
        if not isinstance(schema, dict):
            return
        for keyword, value in schema.items():
            if keyword == "$ref" and isinstance(value, str):
                self._compile(resolve(self._root, value))
            elif keyword not in _DEFINITIONS:
                for part in children({keyword: value}, ""):
                    self._walk(part.schema)
        if intersects(schema) and self._names_outer(schema, set()):
            self._found.add(id(schema))

    def _names_outer(self, schema: object, seen: set[int]) -> bool:
        """Whether a schema that is intersected, or one of its branches, names what is being compiled."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return False
        seen.add(id(schema))
        self._num_searched += 1
        if self._num_searched > _MAX_SEARCHED:
            return True
        parts = [part for keyword in _COMBINING for part in _listed(schema, keyword)]
        if isinstance(reference := schema.get("$ref"), str):
            definition = resolve(self._root, reference)
            if id(definition) in self._compiling:
                return True
            parts.append(definition)
        return any(self._names_outer(part, seen) for part in parts)

    def _num_recursive(self, schema: object) -> int:
        """Definitions that contain themselves and must hold together, at most 2."""
        if not isinstance(schema, dict):
            return 0
        known = self._num_together.setdefault(id(schema), -1)
        if known >= 0:
            return known
        self._num_together[id(schema)] = 0  # while it is computed
        total = sum(self._num_recursive(part) for part in _listed(schema, "allOf"))
        for keyword in ("anyOf", "oneOf"):
            total += max((self._num_recursive(part) for part in _listed(schema, keyword)), default=0)
        if isinstance(reference := schema.get("$ref"), str):
            definition = resolve(self._root, reference)
            total += 1 if id(definition) in self._recursive else self._num_recursive(definition)
        self._num_together[id(schema)] = min(total, 2)
        return self._num_together[id(schema)]


def _listed(schema: dict[str, object], keyword: str) -> list[object]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []


def _stop_intersecting(part: SchemaChildren) -> list[str]:
    """Keep one of the schemas that are combined here, a reference if there is one; drop what is beside it."""
    schema = part.schema
    assert isinstance(schema, dict)
    kept = next(keyword for keyword in ("$ref", *_COMBINING) if keyword in schema)
    beside = [keyword for keyword in schema if keyword in ENFORCED and keyword != kept]
    dropped = [where for keyword in beside for where in _drop(part, keyword)]
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        first = next((at for at, each in enumerate(parts) if isinstance(each, dict) and "$ref" in each), 0)
        schema["allOf"] = [parts[first]]
        dropped += [pointer(part.where, "allOf", str(at)) for at in range(len(parts)) if at != first]
    return dropped


def _drop_endless_reference(root: dict[str, object], part: SchemaChildren, most: int) -> list[str]:
    """Drop a reference that leads to itself without anything in between: it says nothing about a value. Looks
    at `most` schemas."""
    schema = part.schema
    assert isinstance(schema, dict)
    seen: set[int] = set()
    waiting = [resolve(root, reference)] if isinstance(reference := schema.get("$ref"), str) else []
    while waiting and len(seen) < most:
        found = waiting.pop()
        if found is schema:
            return _drop(part, "$ref")
        if isinstance(found, dict) and id(found) not in seen:
            seen.add(id(found))
            waiting += [branch for keyword in _COMBINING for branch in _listed(found, keyword)]
            if isinstance(reference := found.get("$ref"), str):
                waiting.append(resolve(root, reference))
    return []


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
