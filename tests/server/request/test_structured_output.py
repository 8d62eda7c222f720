"""Structured output: from the fields of a request to the engine's grammar."""

import json

import pytest

from quire.core.errors import InvalidGrammar, InvalidParameter
from quire.core.sampling import Grammar, GrammarKind
from quire.server.request.decode import decode
from quire.server.request.schema import CompletionBody
from quire.server.request.structured_output import MAX_CHOICES, RequestedGrammar, grammar_of, relaxed

SCHEMA = {"type": "object", "properties": {"ä": {"type": "string"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}


def grammar_of_chat(**fields: object) -> Grammar | None:
    return requested(**fields).grammar


def requested(**fields: object) -> RequestedGrammar:
    found = grammar_of(decode(json.dumps({"prompt": "hi", **fields}).encode(), CompletionBody))
    return relaxed(found, next(iter(fields), ""))


def named(schema: object, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


def test_what_cannot_be_enforced_is_dropped_unless_the_schema_is_strict() -> None:
    schema = {"type": "array", "uniqueItems": True}
    for fields in ({"response_format": named(schema)}, {"response_format": named(schema, strict=False)},
                   {"structured_outputs": {"json": schema}}):  # fmt: skip
        grammar, _, not_enforced = requested(**fields)
        assert grammar is not None and json.loads(grammar.text) == {"type": "array"}
        assert not_enforced == ("schema#/uniqueItems",)
    grammar, _, not_enforced = requested(response_format=named(schema, strict=True))
    assert grammar is not None and json.loads(grammar.text) == schema and not_enforced == ()


@pytest.mark.parametrize("name", ["response_format", "structured_outputs"])
def test_a_schema_that_is_too_large_is_named(name: str) -> None:
    schema = {"enum": ["x" * 70_000]}
    with pytest.raises(InvalidGrammar, match="65536 bytes") as refused:
        requested(**{name: named(schema) if name == "response_format" else {"json": schema}})
    assert refused.value.param == name


def test_a_text_of_a_schema_is_bounded_before_it_is_decoded() -> None:
    indented = json.dumps({"enum": ["x" * 60_000]}, indent=2) + " " * 190_000
    assert requested(structured_outputs={"json": indented}).grammar is not None
    with pytest.raises(InvalidGrammar, match=r"json is 300000 characters long; .* 262144 characters") as refused:
        requested(structured_outputs={"json": "{" * 300_000})
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            GrammarKind.JSON_SCHEMA,
            CLOSED,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA, CLOSED),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+", "json_object": False, "choice": None}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarKind.CHOICE, ["yes", "no"]),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, GrammarKind.LARK, 'start: "x"'),
    ],
)
def test_a_constraint_becomes_a_grammar(fields: dict[str, object], kind: GrammarKind, text: object) -> None:
    grammar = grammar_of_chat(**fields)
    assert grammar is not None and grammar.kind is kind
    assert grammar.text == text if isinstance(text, str) else json.loads(grammar.text) == text


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": None}]
)
def test_output_is_unconstrained_by_default(fields: dict[str, object]) -> None:
    assert grammar_of_chat(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 0}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "false"}}, "structured_outputs.json"),
        ({"structured_outputs": {"lark": 'start: "x"'}}, "structured_outputs.lark"),
        ({"structured_outputs": {"regex": "a", "jsonschema": {}}}, "structured_outputs.jsonschema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ],
)  # fmt: skip
def test_a_constraint_that_cannot_be_kept_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        grammar_of_chat(**fields)
    assert caught.value.param == param


def test_an_unknown_constraint_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidParameter, match="is not a field; the fields are json, json_object, regex, choice, grammar,"
    ):
        grammar_of_chat(structured_outputs={"lark": 'start: "x"'})
