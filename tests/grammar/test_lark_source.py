"""Regular expressions, choices, Lark grammars and white space: what is written is what was asked for."""

import json
import re

import pytest

from quire.core.errors import InvalidGrammar, UnsupportedSchema
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar.compiler import GrammarCompiler
from tests.grammar.writer import write

REGEXES = [
    "[ab]{2,5}",
    "(a+)+b",
    "a/b|c",
    r"\d{3}-\d{4}",
    "^yes|no$",
    "[^x]{3}",
    "é(日|本)😀",
    r"(\w{1,4} ){2}\.",
    "a\nb",
]


def accepts(compiler: GrammarCompiler, kind: GrammarKind, text: str, answer: str) -> bool:
    """Whether an answer may be written, and end there."""
    matcher = compiler.compile(Grammar(kind, text)).matcher()
    return all(matcher.advance(token) for token in compiler.vocabulary.tokens.tokenize_str(answer)) and matcher.may_end


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_matches_the_whole_answer(
    compiler: GrammarCompiler, fallback_compiler: GrammarCompiler, regex: str
) -> None:
    for one in (compiler, fallback_compiler):
        answers = [write(one, Grammar(GrammarKind.REGEX, regex), seed) for seed in range(8)]
        finished = [answer for answer in answers if answer is not None]
        assert finished and all(re.fullmatch(regex, answer, re.ASCII) for answer in finished)


def test_a_choice_is_one_of_the_choices(compiler: GrammarCompiler) -> None:
    choices = ["yes", "no", "yes, but", 'a "quoted"\nline', "back\\slash", "日本 😀"]
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(choices))
    assert {write(compiler, grammar, seed) for seed in range(60)} <= set(choices)
    for choice in choices:
        assert accepts(compiler, GrammarKind.CHOICE, grammar.text, choice)


def test_a_longer_choice_stays_open_after_a_shorter_one(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.CHOICE, '["yes", "yes, but"]')).matcher()
    for token in compiler.vocabulary.tokens.tokenize_str("yes"):
        assert matcher.advance(token)
    assert matcher.may_end and not matcher.stopped


def test_lark_with_a_schema_inside(compiler: GrammarCompiler) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    lark = f'start: "<call>" %json {schema} "</call>"'
    assert accepts(compiler, GrammarKind.LARK, lark, '<call>{"a": 1}</call>')
    assert accepts(compiler, GrammarKind.LARK, "%llguidance {}\n" + lark, '<call>{"a": 1}</call>')
    assert not accepts(compiler, GrammarKind.LARK, lark, '<call>{"a": "x"}</call>')


def test_a_grammar_in_gbnf_is_told_what_it_is(compiler: GrammarCompiler) -> None:
    for text in ('root ::= "yes" | "no"', "x ::= [a-z]\n root  ::= x+"):
        with pytest.raises(InvalidGrammar, match="in GBNF or EBNF"):
            compiler.compile(Grammar(GrammarKind.LARK, text))
    compiler.compile(Grammar(GrammarKind.LARK, 'start: "a ::= b"'))  # in a text it may stand


def test_a_schema_inside_lark_is_held_to_the_same_rules(compiler: GrammarCompiler) -> None:
    lenient = '{"x-guidance": {"lenient": true}, "not": {}}'
    for text in (f"start: %json {lenient}", f'start: "a" b\nb: %json\n {lenient}'):
        with pytest.raises(UnsupportedSchema):
            compiler.compile(Grammar(GrammarKind.LARK, text))
    for text in ('{"grammars": [{"json_schema": {}}]}', '%llguidance {"no_forcing": false}\nstart: "a"'):
        with pytest.raises(InvalidGrammar):
            compiler.compile(Grammar(GrammarKind.LARK, text))


@pytest.mark.parametrize(
    ("answer", "fine"),
    [
        ('{"a": 1}', True),
        ('{"a":1,"b":[1, 2]}', True),
        ('{\n  "a": [\n    1,\n    2\n  ],\n  "b": {}\n}', True),
        ("{}", True),
        ("[]", False),
        (" {}", False),
        ("{}\n", False),
        ('{   "a": 1}', False),
        ('{\n\n"a": 1}', False),
        ("{\n" + " " * 33 + '"a": 1}', False),
    ],
)
def test_json_has_the_usual_white_space_and_no_more(compiler: GrammarCompiler, answer: str, fine: bool) -> None:
    assert accepts(compiler, GrammarKind.JSON_OBJECT, "", answer) == fine


def test_a_property_cannot_be_spelled_a_second_time(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "\n": {"type": "integer"}}})
    assert accepts(compiler, GrammarKind.JSON_SCHEMA, schema, '{"a": 1, "b": "x"}')
    for answer in ('{"\\u0061": "x"}', '{"a": 1, "a": "x"}', '{"\\u000a": "x"}', '{"b": 1, "a": "x"}'):
        assert not accepts(compiler, GrammarKind.JSON_SCHEMA, schema, answer)


@pytest.mark.parametrize("answer", ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-13-01"])
def test_a_date_that_is_none_cannot_be_written(compiler: GrammarCompiler, answer: str) -> None:
    schema = '{"type": "string", "format": "date"}'
    assert not accepts(compiler, GrammarKind.JSON_SCHEMA, schema, f'"{answer}"')
    assert accepts(compiler, GrammarKind.JSON_SCHEMA, schema, '"2024-02-29"')
    assert accepts(compiler, GrammarKind.JSON_SCHEMA, schema, '"2000-02-29"')
