"""No constraint is silently dropped: a keyword is enforced, or a note, or refused by name and place.

What clients that are not strict get instead is tested in test_client_schemas.py.
"""

import json

import pytest
from llguidance import LLMatcher

from quire.core.errors import InvalidGrammar, UnsupportedSchema
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.json_schema import ENFORCED, NOTES, check_schema, read_schema

REFUSED: dict[str, object] = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "then": {},
    "else": {},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "uniqueItems": True,
    "contains": {"type": "string"},
    "minContains": 1,
    "maxContains": 1,
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "propertyNames": {"pattern": "a"},
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "maxLenght": 3,
    "x-guidance": {"lenient": True},
}

# For each enforced keyword: a schema, a value it allows, a value it does not.
ENFORCING: dict[str, tuple[object, str, str]] = {
    "type": ({"type": "null"}, "null", "1"),
    "enum": ({"enum": [1, 2]}, "2", "3"),
    "const": ({"const": "a"}, '"a"', '"b"'),
    "anyOf": ({"anyOf": [{"const": 1}, {"const": 2}]}, "2", "3"),
    "oneOf": ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, "true", "1"),
    "allOf": ({"allOf": [{"type": "integer"}, {"maximum": 3}]}, "3", "4"),
    "$ref": ({"$defs": {"a": {"const": 1}}, "$ref": "#/$defs/a"}, "1", "2"),
    "minLength": ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    "maxLength": ({"type": "string", "maxLength": 2}, '"😀é"', '"abc"'),
    "pattern": ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),
    "format": ({"type": "string", "format": "ipv4"}, '"127.0.0.1"', '"256.0.0.1"'),
    "minimum": ({"type": "integer", "minimum": 3}, "3", "2"),
    "maximum": ({"type": "number", "maximum": 3}, "3.0", "3.1"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, "2", "3"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "9", "10"),
    "items": ({"type": "array", "items": {"const": 1}}, "[1,1]", "[1,2]"),
    "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}]}, "[1,2]", "[2]"),
    "additionalItems": ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, "[1]", "[1,2]"),
    "minItems": ({"type": "array", "minItems": 1}, "[1]", "[]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1,2]"),
    "properties": ({"type": "object", "properties": {"a": {"const": 1}}}, '{"a":1}', '{"a":2}'),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": {"const": 1}}}, '{"ab":1}', '{"ab":2}'),
    "additionalProperties": ({"type": "object", "additionalProperties": {"const": 1}}, '{"a":1}', '{"a":2}'),
    "required": ({"type": "object", "required": ["a"]}, '{"a":2}', '{"b":2}'),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a":2}', "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":2}', '{"a":2,"b":2}'),
}


def test_every_enforced_keyword_is_tried() -> None:
    assert ENFORCING.keys() == ENFORCED


@pytest.mark.parametrize("keyword", sorted(ENFORCING))
def test_an_enforced_keyword_is_enforced(compiler: GrammarCompiler, keyword: str) -> None:
    schema, right, wrong = ENFORCING[keyword]
    compiled = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for text, fine in ((right, True), (wrong, False)):
        matcher = compiled.matcher()
        taken = all(matcher.advance(token) for token in compiler.vocabulary.tokens.tokenize_str(text))
        assert (taken and matcher.may_end) == fine, text


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_what_would_be_dropped_is_refused_by_name_and_place(compiler: GrammarCompiler, keyword: str) -> None:
    schema = {"type": "object", "properties": {"deep": {"anyOf": [{"type": "null"}, {keyword: REFUSED[keyword]}]}}}
    with pytest.raises(UnsupportedSchema) as caught:
        compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert f"'{keyword}' at #/properties/deep/anyOf/1 " in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "unsupported_schema")


def test_keywords_are_sought_where_schemas_stand_and_only_there() -> None:
    check_schema({"properties": {"not": {"const": {"not": 1}}, "if": {"enum": [{"if": 1}], "default": {"else": 1}}}})
    for keyword in ("$defs", "definitions", "properties", "patternProperties"):
        with pytest.raises(UnsupportedSchema):
            check_schema({keyword: {"a": {"not": {}}}})
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        with pytest.raises(UnsupportedSchema):
            check_schema({keyword: [{"not": {}}]})
    for keyword in ("items", "additionalProperties"):
        with pytest.raises(UnsupportedSchema):
            check_schema({keyword: {"not": {}}})


def test_notes_change_nothing(compiler: GrammarCompiler) -> None:
    notes: dict[str, object] = dict.fromkeys(NOTES - {"$defs", "definitions", "$id", "id", "$anchor"}, "a note")
    schema = {"type": "null", "x-order": 3, "$defs": {}, "definitions": {}, **notes}
    assert compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.com/other.json"},
        {"type": "string", "format": "phone"},
        {"type": "string", "format": ["date"]},
        {"type": ["string", ["x"], None, 5]},
        {"format": "regex"},
        {"type": "array", "prefixItems": [{}], "additionalItems": False},
        {"type": "object", "minProperties": 2},
        {"type": "string", "pattern": "^(?=a)"},
        {"type": "number", "maximum": 1e40},
        {"type": "integer", "multipleOf": 1000003},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    ],
)
def test_what_only_seems_enforced_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(UnsupportedSchema):
        check_schema(schema)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"a"', '{"type": "foo"}', '{"type": "string", "type": "null"}'])
def test_what_is_no_schema_is_refused(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(InvalidGrammar):
        compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, text))


def test_the_newest_draft_is_read_whatever_the_schema_says() -> None:
    assert read_schema('{"$schema": "http://json-schema.org/draft-04/schema#", "type": "null"}') == {"type": "null"}


def test_llguidance_itself_passes_over_unknown_keywords() -> None:
    """The reason for our own table. If this turns red, read what llguidance refuses now."""
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema('{"maxLenght": 3, "nullable": true}')) == ""
