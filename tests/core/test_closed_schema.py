"""Objects that list their properties get no others, where that forbids nothing that the schema needs."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.closed_schema import close_objects

Schema = dict[str, Any]
A: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: Schema = {"type": "object", "properties": {"b": {"type": "integer"}}}

REFERENCE: Schema = {"$ref": "#/$defs/B"}


def allows(schema: object, value: object) -> bool:
    assert isinstance(schema, dict)
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "whole", "more"),
    [
        (A, {"a": 1}, {"a": 1, "b": 2}),
        ({"properties": {"a": A}}, {"a": {"a": 1}}, {"a": {"a": 1, "b": 2}}),
        ({"type": "array", "items": A}, [{"a": 1}], [{"a": 1, "b": 2}]),
        ({"anyOf": [A, {"type": "null"}]}, {"a": 1}, {"a": 1, "b": 2}),
        ({"type": "object", "oneOf": [A, {**B, "required": ["b"]}]}, {"b": 1}, {"b": 1, "c": 2}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"a": 1}, {"a": 1, "b": 2}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "title": "x", "$defs": {"A": A}}, {"a": 1}, {"a": 1, "b": 2}),
        ({"properties": {"properties": A}}, {"properties": {"a": 1}}, {"properties": {"a": 1, "b": 2}}),
    ],
)
def test_other_names_are_forbidden(schema: Schema, whole: object, more: object) -> None:
    closed = close_objects(schema)
    assert allows(schema, whole) and allows(schema, more)
    assert allows(closed, whole) and not allows(closed, more)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"x": 1}),
        ({**A, "additionalProperties": True}, {"a": 1, "x": 1}),
        ({**A, "additionalProperties": {"type": "null"}}, {"a": 1, "x": None}),
        ({**A, "patternProperties": {"^x": {}}}, {"a": 1, "x": 1}),
        ({**A, "unevaluatedProperties": True}, {"a": 1, "x": 1}),
        ({**A, "required": ["a", "x"]}, {"a": 1, "x": 1}),
        ({**A, "minProperties": 2}, {"a": 1, "x": 1}),
        ({**A, "dependentRequired": {"a": ["x"]}}, {"a": 1, "x": 1}),
        ({"properties": {"a": {}}, "const": {"a": 1, "x": 1}}, {"a": 1, "x": 1}),
        ({"allOf": [A, B]}, {"a": 1, "b": 1}),
        ({**A, "allOf": [B]}, {"a": 1, "b": 1}),
        ({**A, "anyOf": [B, {"required": ["x"]}]}, {"a": 1, "b": 1}),
        ({**A, "$ref": "#/$defs/B", "$defs": {"B": B}}, {"a": 1, "b": 1}),
        ({"allOf": [{"properties": {"p": A}}, {"properties": {"p": B}}]}, {"p": {"a": 1, "b": 1}}),
        (
            {"anyOf": [{"$ref": "#/$defs/B"}, {"allOf": [A, {"$ref": "#/$defs/B"}]}], "$defs": {"B": B}},
            {"a": 1, "b": 1},
        ),
        ({**A, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["x"]}}, {"a": 1, "x": 1}),
        ({"not": {**A, "properties": {"a": {"const": 2}}}}, {"a": 1}),
        ({"allOf": [{"$ref": "#b"}, A], "$defs": {"B": {**B, "$anchor": "b"}}}, {"a": 1, "b": 1}),
        ({"default": A, "enum": [{"properties": {}, "x": 1}]}, {"properties": {}, "x": 1}),
    ],
)
def test_what_a_schema_needs_stays_allowed(schema: Schema, value: object) -> None:
    assert allows(schema, value) and allows(close_objects(schema), value)


def schemas() -> st.SearchStrategy[Schema]:
    names = st.sampled_from(["a", "b"])
    leaves = st.sampled_from([{}, {"type": "integer"}, {"type": "object"}, {"$ref": "#/$defs/d"}])

    def objects(parts: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
        keywords = {
            "properties": st.dictionaries(names, parts, max_size=2),
            "required": st.lists(names, max_size=2, unique=True),
            "additionalProperties": parts | st.booleans(),
            "allOf": st.lists(parts, min_size=1, max_size=2),
            "anyOf": st.lists(parts, min_size=1, max_size=2),
            "not": parts,
            "unevaluatedProperties": st.booleans(),
            "items": parts,
        }
        return st.fixed_dictionaries({}, optional=keywords)

    return st.recursive(leaves, objects, max_leaves=6)


VALUES = st.recursive(
    st.sampled_from([1, "x", None]),
    lambda parts: st.dictionaries(st.sampled_from("abc"), parts, max_size=3) | st.lists(parts, max_size=2),
    max_leaves=5,
)


@given(schemas(), schemas(), VALUES)
def test_closing_allows_nothing_new_and_changes_no_argument(schema: Schema, definition: Schema, value: object) -> None:
    whole = {**schema, "$defs": {"d": {"type": "object", "properties": {"d": definition}}}}
    before = repr(whole)
    closed = close_objects(whole)
    assert allows(whole, value) or not allows(closed, value)
    assert repr(whole) == before and close_objects(closed) == closed
