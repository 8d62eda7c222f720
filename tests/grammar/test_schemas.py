"""Whatever random tokens are taken under the mask of a schema, a finished answer is valid."""

import json

import jsonschema
import pytest

from quire.core.sampling import Grammar, GrammarKind
from quire.grammar.compiler import GrammarCompiler
from tests.grammar.schemas import SCHEMAS, Schema
from tests.grammar.writer import write

NUM_ANSWERS = 4


def check_answers(compiler: GrammarCompiler, schema: Schema, num_answers: int) -> None:
    validator = jsonschema.Draft202012Validator(
        {key: value for key, value in schema.items() if key != "$schema"},
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    answers = [write(compiler, grammar, seed) for seed in range(num_answers)]
    finished = [answer for answer in answers if answer is not None]
    assert finished
    for answer in finished:
        errors = [error.message for error in validator.iter_errors(json.loads(answer))]
        assert not errors, (answer, errors)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_are_valid(compiler: GrammarCompiler, schema: Schema) -> None:
    check_answers(compiler, schema, NUM_ANSWERS)


@pytest.mark.parametrize("schema", SCHEMAS[::3], ids=lambda schema: json.dumps(schema)[:60])
def test_answers_through_byte_fallback_are_valid(fallback_compiler: GrammarCompiler, schema: Schema) -> None:
    check_answers(fallback_compiler, schema, 2)


def test_a_json_object_is_an_object(compiler: GrammarCompiler) -> None:
    answers = [write(compiler, Grammar(GrammarKind.JSON_OBJECT, ""), seed) for seed in range(12)]
    finished = [json.loads(answer) for answer in answers if answer is not None]
    assert len(finished) > 3 and all(isinstance(answer, dict) for answer in finished)
