"""Bounds how far a JSON schema expands when its parts are combined. Does not depend on the compiler.

A `$ref` alone is compiled once, however often it is used. Where a value must satisfy several schemas at once (allOf, or
keywords beside $ref, anyOf or oneOf), llguidance intersects them: it copies the definition behind each reference, and
combines each alternative of one part with each of the others. A few definitions that refer to the next one four times
each are a million schemas by then, from a text of one kilobyte.
"""

from collections.abc import Callable
from typing import NamedTuple

from quire.core.errors import InvalidGrammar
from quire.grammar import limits

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
    """Raise InvalidGrammar if a schema that intersects others expands too far. `resolve` finds what a $ref names."""
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
