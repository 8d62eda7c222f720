"""Whatever a client sends ends: compiled, or refused as its mistake, by limits and not by luck."""

import functools
import json

import numpy as np
import pytest

from quire.core.errors import InvalidGrammar
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar import limits
from quire.grammar.compiler import GrammarCompiler
from quire.text.tokenizer import Tokenizer
from tests.grammar.writer import next_tokens

NUM_STEPS = 20


def nested(depth: int) -> str:
    innermost: dict[str, object] = {"type": "string"}
    return json.dumps(functools.reduce(lambda schema, _: {"items": schema}, range(depth), innermost))


def patterns(count: int) -> str:
    return json.dumps({"type": "string", "allOf": [{"pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(5, 5 + count)]})


def chained(num_definitions: int) -> str:
    """Definitions that lead to one another, two levels each."""
    definitions: dict[str, object] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(num_definitions)}
    definitions[f"d{num_definitions}"] = {"type": "null"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def rules(count: int, body: str) -> str:
    """Rules of one another; `NEXT` stands for the next one's name."""
    lines = [f"r{n}: " + body.replace("NEXT", f"r{n + 1}") for n in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "a"'])


def intersected(count: int) -> str:
    return "start: A\nA: " + " & ".join(f"/.*a.{{{n}}}/" for n in range(2, 2 + count))


def properties(count: int, kind: str) -> str:
    named = {f"p{n}": {"type": kind} for n in range(count)}
    return json.dumps({"type": "object", "properties": named, "additionalProperties": False})


IN_BRACKETS = '("b" ' * 20 + "NEXT" + ")?" * 20
NUM_LINKED = (limits.SCHEMA_REACH - 1) // 2

REFUSED = [
    (GrammarKind.JSON_SCHEMA, nested(limits.SCHEMA_DEPTH)),
    (GrammarKind.JSON_SCHEMA, "[" * 30_000),
    (GrammarKind.JSON_SCHEMA, '{"items":' * 6_000),
    (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [[]] * limits.SCHEMA_NODES})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"const": "x" * limits.SCHEMA_BYTES})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"properties": {f"p{n}": {} for n in range(limits.SCHEMA_PROPERTIES + 1)}})),
    (GrammarKind.JSON_SCHEMA, patterns(30)),
    (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 1000003}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "number", "multipleOf": 1e300}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "number", "multipleOf": 0}'),
    (GrammarKind.JSON_SCHEMA, '{"const": 1e999}'),
    (GrammarKind.JSON_SCHEMA, '{"const": NaN}'),
    (GrammarKind.JSON_SCHEMA, '{"maximum": ' + "9" * 10_000 + "}"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    (
        GrammarKind.JSON_SCHEMA,
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    ),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 5, "maxLength": 3}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "const": "\ud800"}'),
    (GrammarKind.REGEX, "(" * 30_000 + ")" * 30_000),
    (GrammarKind.REGEX, "(" * 8_000 + "a" + ")" * 8_000),
    (GrammarKind.REGEX, "a" * (limits.REGEX_BYTES + 1)),
    (GrammarKind.REGEX, "("),
    (GrammarKind.REGEX, "a\\"),
    (GrammarKind.REGEX, "(a)\\1"),
    (GrammarKind.REGEX, "[^\\s\\S]"),
    (GrammarKind.CHOICE, "[]"),
    (GrammarKind.CHOICE, '["a", 3]'),
    (GrammarKind.CHOICE, '[""]'),
    (GrammarKind.CHOICE, "{}"),
    (GrammarKind.CHOICE, json.dumps(["a"] * (limits.NUM_CHOICES + 1))),
    (GrammarKind.CHOICE, json.dumps(["a" * limits.CHOICE_BYTES])),
    (GrammarKind.LARK, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    (GrammarKind.LARK, "start: a"),
    (GrammarKind.LARK, "start: a\na: a"),
    (GrammarKind.LARK, "start: %json {" + " " * 20),
    (GrammarKind.LARK, "start: " + '%json {"type": "null"} ' * (limits.LARK_SCHEMAS + 1)),
    (GrammarKind.LARK, 'start: "' + "a" * limits.LARK_BYTES + '"'),
    (GrammarKind.LARK, 'start: "' + "a" * limits.LARK_OWN_BYTES + '"'),
    (GrammarKind.LARK, "start: " + "a " * limits.LARK_WORDS + '\na: "a" |'),
    (GrammarKind.LARK, rules(3_000, "NEXT?")),  # llguidance overran its stack, here
    (GrammarKind.LARK, rules(300, IN_BRACKETS)),  # and here
    (GrammarKind.JSON_SCHEMA, chained(1_020)),  # and here
    (GrammarKind.JSON_SCHEMA, chained(NUM_LINKED + 1)),
    (GrammarKind.LARK, "start: %json " + chained(NUM_LINKED + 1)),
    (GrammarKind.LARK, intersected(limits.LARK_INTERSECTIONS + 2)),
    (GrammarKind.LARK, "start: A\nA: " + " & ".join(f"/(a{{{n}}})+/" for n in (2, 3, 5, 7, 11, 13, 17, 19, 23))),
]

COMPILED = [
    (GrammarKind.JSON_SCHEMA, nested(limits.SCHEMA_DEPTH - 1)),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "maxLength": 1000000}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "array", "minItems": 1000000, "items": {"const": "abc"}}'),
    (GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["x" * 30_000, "y" * 30_000]})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"properties": {f"p{n}": {} for n in range(limits.SCHEMA_PROPERTIES)}})),
    (GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"$ref": "#"}}'),
    (GrammarKind.JSON_SCHEMA, properties(limits.SCHEMA_PROPERTIES, "integer")),
    (GrammarKind.JSON_SCHEMA, properties(limits.SCHEMA_PROPERTIES, "boolean")),
    (GrammarKind.LARK, "start: %json " + properties(limits.SCHEMA_PROPERTIES, "integer")),
    (GrammarKind.JSON_SCHEMA, chained(NUM_LINKED)),
    (GrammarKind.JSON_SCHEMA, '{"$defs": {"a/b": {"items": {"$ref": "#/$defs/a~1b"}}}, "$ref": "#/$defs/a~1b"}'),
    (GrammarKind.LARK, rules(limits.LARK_PARTS // 2 - 2, "NEXT?")),
    (GrammarKind.LARK, rules(24, IN_BRACKETS)),
    (GrammarKind.LARK, "start: /[ab]{0,300}/"),
    (GrammarKind.REGEX, "(a+)+b"),
    (GrammarKind.REGEX, "a{1,100000}"),
    (GrammarKind.REGEX, "a{1000000}"),
    (GrammarKind.REGEX, "(a|b)*a(a|b){20}"),
    (GrammarKind.REGEX, "(.*a.{30}){5}"),
    (GrammarKind.CHOICE, json.dumps([f"choice {n}" for n in range(limits.NUM_CHOICES)])),
    (GrammarKind.LARK, 'start: start start | "a"'),
    (GrammarKind.LARK, "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"'),
]

OPTIONAL = '("a"|"b")?'
TOO_LARGE_AT_ONCE = [
    "start: " + " ".join([OPTIONAL] * 300),
    "start: " + "a " * 1_200 + '\na: ("a"|"b"|"c")?',
]
TOO_LARGE_TO_FOLLOW = ["((a{1,100}){1,100}){1,100}", "(.{0,500}a){0,20}b.*c"]


@pytest.mark.parametrize(("kind", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_it_is_refused_as_the_clients_mistake(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        compiler.compile(Grammar(kind, text))
    assert caught.value.status == 400
    assert len(caught.value.message) < limits.REASON_CHARACTERS + 200
    assert "<state>" not in caught.value.message


@pytest.mark.parametrize(("kind", "text"), COMPILED, ids=lambda value: str(value)[:40])
def test_it_compiles_and_can_be_followed(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    matcher = compiler.compile(Grammar(kind, text)).matcher()
    chance = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        tokens = [token for token in next_tokens(matcher, compiler) if token not in compiler.vocabulary.end_ids]
        if not tokens:
            break
        assert matcher.advance(int(chance.choice(tokens)))


@pytest.mark.parametrize("text", TOO_LARGE_AT_ONCE, ids=lambda text: text[:40])
def test_too_large_and_empty_grammars_get_different_errors(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(InvalidGrammar, match=r"too large: .*Too many items.*Use fewer optional"):
        compiler.compile(Grammar(GrammarKind.LARK, text))


def test_a_grammar_that_allows_no_text_is_refused(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    """A token that the model does not have."""
    with pytest.raises(InvalidGrammar, match="allows no text that"):
        compiler.compile(Grammar(GrammarKind.LARK, f"start: <[{byte_level.vocab_size + 3}]>"))


@pytest.mark.parametrize(("tries", "allowed"), [([1], True), ([2, 3, 1], True), ([3, 3, 2], False)])
def test_a_first_mask_that_takes_too_long_every_time_is_refused_by_the_work_of_its_thread(
    compiler: GrammarCompiler, tries: list[int], allowed: bool
) -> None:
    times = iter([time_s for limit in tries for time_s in (0.0, limits.FIRST_MASK_CPU_S * limit)])
    timed = GrammarCompiler(compiler.vocabulary, cpu_time=lambda: next(times))
    grammar = Grammar(GrammarKind.REGEX, "a+")
    if allowed:
        timed.compile(grammar)
    else:
        with pytest.raises(InvalidGrammar, match="first token took 200 ms to prepare; the limit is 100 ms"):
            timed.compile(grammar)
    assert timed.knows(grammar) == allowed
    assert next(times, None) is None, "each try is timed"


@pytest.mark.parametrize("regex", TOO_LARGE_TO_FOLLOW)
def test_what_grows_too_large_ends_with_nothing_allowed(compiler: GrammarCompiler, regex: str) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, regex)).matcher()
    chance = np.random.default_rng(0)
    row = np.zeros(compiler.vocabulary.num_words, np.int32)
    for _ in range(600):
        if not matcher.fill_mask(row):
            break
        row &= ~compiler.vocabulary.ends
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        matcher.advance(int(chance.choice(allowed)))
    assert matcher.failed and not matcher.may_end and not row.any()
