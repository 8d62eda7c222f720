"""Schemas as clients send them: all are accepted where nothing is strict, and what is kept of them is enforced."""

import contextlib
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.core.errors import InvalidGrammar, UnsupportedSchema
from quire.core.sampling import Grammar, GrammarKind
from quire.engine.model_format import ModelFormat, ToolChoice
from quire.grammar import limits
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.json_schema import check_schema
from quire.grammar.relaxed_schema import relax_schema
from tests.grammar.client_models import Schema, model_schemas
from tests.grammar.writer import write
from tests.tiers import examples, long_only

DATA = json.loads((Path(__file__).parent / "client_schemas.json").read_text(encoding="utf-8"))
CORPUS: dict[str, tuple[Schema, object]] = {
    **model_schemas(),
    **{f"{entry['client']}: {entry['name']}": (entry["schema"], entry["answer"]) for entry in DATA},
}
NUM_ANSWERS = examples(1, 2)
DRAFT = jsonschema.Draft202012Validator


def as_grammar(schema: Schema) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    matcher = compiler.compile(grammar).matcher()
    taken = all(matcher.advance(token) for token in compiler.vocabulary.tokens.tokenize_str(text))
    return taken and matcher.may_end


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 58


@pytest.mark.parametrize("name", CORPUS)
def test_a_clients_schema_is_accepted_and_what_is_kept_is_enforced(compiler: GrammarCompiler, name: str) -> None:
    schema, answer = CORPUS[name]
    relaxed = relax_schema(schema)
    assert relax_schema(relaxed.schema).not_enforced == []
    grammar = as_grammar(relaxed.schema)
    assert accepts(compiler, grammar, json.dumps(answer, ensure_ascii=False)), "never tighter than the schema"
    validator = DRAFT(relaxed.schema, format_checker=DRAFT.FORMAT_CHECKER)
    assert validator.is_valid(answer)
    answers = [write(compiler, grammar, seed, 200) for seed in range(NUM_ANSWERS)]
    for written in (text for text in answers if text is not None):
        errors = [error.message for error in validator.iter_errors(json.loads(written))]
        assert not errors, (written, errors)


@pytest.mark.parametrize("name", [name for name, (_, answer) in CORPUS.items() if isinstance(answer, dict)])
def test_a_forced_call_takes_a_clients_schema(compiler: GrammarCompiler, name: str) -> None:
    schema, answer = CORPUS[name]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar, _ = ModelFormat().call_grammar(tools, ToolChoice("required"), parallel=False, prompt="")
    assert grammar is not None
    call = '<tool_call>\n{"name": "f", "arguments": ' + json.dumps(answer, ensure_ascii=False) + "}\n</tool_call>"
    assert accepts(compiler, grammar, call)


STRING, OBJECT = {"type": "string"}, {"type": "object"}
DROPPED: list[tuple[Schema, list[str], str]] = [  # a schema, what is dropped, a value that the schema allows
    ({"not": {"type": "null"}}, ["#/not"], "1"),
    ({"if": {}, "then": {"type": "null"}, "else": False}, ["#/if", "#/then", "#/else"], "null"),
    ({"type": "array", "uniqueItems": True, "contains": {"const": 1}, "minContains": 1},
     ["#/uniqueItems", "#/contains", "#/minContains"], "[1]"),
    ({"type": "object", "properties": {"ä/~ b": {"format": "zip", **STRING}}},
     ["#/properties/%C3%A4~1~0%20b/format"], '{"ä/~ b": "x"}'),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "not": {"const": 1}}]}, ["#/oneOf", "#/anyOf/1/not"], "2.5"),
    ({"type": "object", "patternProperties": {"^(?!a)": STRING}, "additionalProperties": False},
     ["#/patternProperties"], '{"b": "x"}'),
    ({"$ref": "https://example.com/other.json"}, ["#/$ref"], "[]"),
    ({"$ref": "#/$defs/gone"}, ["#/$ref"], "[]"),
    ({"items": {"$ref": "#/not/gone"}, "not": {"gone": {}}}, ["#/not", "#/items/$ref"], "[1]"),
    ({"type": "object", "minProperties": 3}, ["#/minProperties"], '{"a": 1, "b": 2, "c": 3}'),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, ["#/minProperties"], '{"b": 1}'),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "maxProperties": 2},
     ["#/maxProperties"], '{"a": 1, "b": 1}'),
    ({"$defs": {"o": {"type": "object", "properties": {"a": {}}}}, "$ref": "#/$defs/o", "maxProperties": 1},
     ["#/maxProperties"], '{"a": 1}'),
    ({"type": "object", "properties": {"next": {"type": "object", "$ref": "#"}}}, ["#/properties/next/type"],
     '{"next": {"next": {}}}'),
    ({"type": "number", "multipleOf": 1e-12}, ["#/multipleOf"], "0.5"),
    ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, ["#/allOf/0/multipleOf", "#/allOf/1/multipleOf"], "988027"),
    ({"allOf": [{"pattern": f"a.{{{place}}}b"} for place in range(9)]},
     [f"#/allOf/{place}/pattern" for place in range(9)], '"ab"'),
    ({"type": "string", "pattern": "(a)\\1"}, ["#/pattern"], '"aa"'),
    ({"type": "integer", "minimum": -(2**63)}, ["#/minimum"], "-5"),
    ({"x-guidance": {"lenient": True}, "type": "null"}, ["#/x-guidance"], "null"),
    ({"type": "object", "properties": {"a": {"type": "any"}}}, ["#/properties/a/type"], '{"a": [1]}'),
    ({"type": ["string", "Date"], "format": "zip"}, ["#/type", "#/format"], "1"),
    ({"type": 3}, ["#/type"], "3"),
    ({"type": []}, ["#/type"], "3"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b", **OBJECT}}},
                                     "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a", **OBJECT}}}}},
     ["#/$defs/b/properties/a/type"], '{"b": {"a": {"b": {"a": {}}}}}'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {**OBJECT, "properties": {"x": {"allOf": [{"required": ["x"]},
                                                                                   {"$ref": "#/$defs/a"}]}}}}},
     ["#/$defs/a/properties/x/allOf/0"], '{"x": {"x": {}}}'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {**OBJECT, "properties": {"b": {"$ref": "#/$defs/b", **OBJECT}}},
                                     "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
     ["#/$defs/a/properties/b/type"], '{"b": {"b": null}}'),
    ({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
      "$defs": {name: {**OBJECT, "properties": {"x": {"$ref": f"#/$defs/{name}"}}} for name in "ab"}},
     ["#/allOf/1"], '{"x": {}}'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ["#/$defs/a/$ref"], "1"),
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ["#/anyOf/0/$ref"], "1"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "dropped", "value"), DROPPED, ids=lambda value: str(value)[:40])
def test_what_is_dropped_is_listed_and_nothing_more_is_forbidden(
    compiler: GrammarCompiler, schema: Schema, dropped: list[str], value: str
) -> None:
    relaxed = relax_schema(schema)
    assert relaxed.not_enforced == dropped
    assert accepts(compiler, as_grammar(relaxed.schema), value)


def random_definitions(rng: random.Random) -> Schema:
    """Definitions that refer to each other, alone and combined with others."""
    names = "abcd"[: rng.randint(1, 4)]

    def draw(depth: int) -> Schema:
        named, null = {"$ref": f"#/$defs/{rng.choice(names)}"}, {"type": "null"}
        forms: list[Schema] = [
            named, named, {**named, "required": ["p0"]}, {**named, **OBJECT}, {"allOf": [named, OBJECT]},
            {"anyOf": [named, null]}, {"anyOf": [named, null], "type": ["object", "null"]},
        ]  # fmt: skip
        inner: Schema = STRING
        if depth < 3:
            inner = {**OBJECT, "properties": {f"p{place}": draw(depth + 1) for place in range(rng.randint(0, 3))}}
        return rng.choice([*forms, inner, inner, inner])

    return {"$defs": {name: draw(0) for name in names}, **draw(0)}


@pytest.mark.parametrize("seed", range(40))
def test_definitions_that_refer_to_each_other_are_accepted(compiler: GrammarCompiler, seed: int) -> None:
    relaxed = relax_schema(random_definitions(random.Random(seed)))
    compiler.compile(as_grammar(relaxed.schema))
    assert relax_schema(relaxed.schema).not_enforced == []


def test_a_search_for_circles_has_a_bound() -> None:
    """It looks at a number of schemas in all; the rest is dropped unseen."""
    parts = {f"p{place}": {"$ref": "#/$defs/b", "required": ["q"]} for place in range(400)}
    definitions = {
        "a": {**OBJECT, "properties": parts},
        "b": {"anyOf": [{"$ref": "#/$defs/c"}, *({**OBJECT} for _ in range(400))]},
        "c": {},
    }
    dropped = relax_schema({"$ref": "#/$defs/a", "$defs": definitions}).not_enforced
    assert 0 < len(dropped) < 400


KEPT: list[tuple[Schema, str, str]] = [  # a schema of another dialect, a value it allows, one that it does not
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
    ({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, "3", "4"),
    ({"type": "string", "nullable": True, "maxLength": 1}, "null", '"ab"'),
    ({"type": "string", "nullable": False}, '"a"', "null"),
    ({"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}}, '{"a": null}', '{"a": 1}'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {**OBJECT, "properties": {"b": {"$ref": "#/$defs/b", "required": ["a"]}}},
                                     "b": {**OBJECT, "properties": {"a": {"$ref": "#/$defs/a"}}}}},
     '{"b": {"a": {}}}', '{"b": {}}'),
    ({"type": "string", "enum": ["a"], "nullable": True}, "null", '"b"'),
    ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "nullable": True}, "null", '"a"'),
    ({"const": 3, "type": "integer", "nullable": True}, "null", "4"),
    ({"type": "string", "maxLength": 1, "pattern": None, "enum": None, "default": None}, '"a"', '"ab"'),
    ({"$id": "T", "type": "array", "items": {"$ref": "T"}}, "[[]]", "[1]"),
    ({"$defs": {"a": {"$anchor": "b", "type": "null"}}, "$ref": "#b"}, "null", "1"),
    ({"$id": "https://x/y#", "$defs": {"a": {"type": "null"}}, "$ref": "https://x/y#/$defs/a"}, "null", "1"),
    ({"$defs": {"List[int]": {"type": "null"}}, "$ref": "#/$defs/List[int]"}, "null", "1"),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 1}, "1", "2"),
    ({"items": {"$schema": "http://json-schema.org/draft-04/schema#", "const": 1}}, "[1]", "[2]"),
    ({"type": "string", "format": "uuid4"}, '"0f0e6a4e-8f0c-4b1e-9d3c-2f7a1b5c6d7e"',
     '"0f0e6a4e-8f0c-1b1e-9d3c-2f7a1b5c6d7e"'),
    ({"type": "string", "format": "password"}, '"x"', "1"),
    ({"type": "string", "pattern": "^\\p{L}+$"}, '"ä"', '"1"'),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}}, "[1, 2]", "[1, 1]"),
    ({"type": "array", "items": [{"const": 1}, {"$ref": "#/items/0"}], "additionalItems": False}, "[1, 1]", "[1, 2]"),
    ({"$defs": {"a": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                "b": {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]}},
      "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}]}, '{"k": "c"}', '{"k": "d"}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), KEPT, ids=lambda value: str(value)[:40])
def test_other_dialects_are_enforced_as_they_mean_it(
    compiler: GrammarCompiler, schema: Schema, right: str, wrong: str
) -> None:
    assert relax_schema(schema).not_enforced == []
    for grammar in (as_grammar(schema), as_grammar(relax_schema(schema).schema)):
        assert accepts(compiler, grammar, right) and not accepts(compiler, grammar, wrong)


ENFORCED_PATTERNS = (
    r"^[a-z]{2,4}-\d{3}$", r"^https?:\/\/[\w.-]+$", r"^(a|b)*$", r"^a$|^b$", r"\A\d+\z", r"^(?:x|y)+?$", r"(?i)^abc$",
    r"^(?<year>\d{4})-(?P<month>\d\d)$", r"^[\u4e00-\u9fa5]+$", r"^\p{Lu}[^\s,;]{1,9}$", r"^\$\{[^}]+\}$",
    r"[.^$|()*+?{}]", "", r"^\+?[1-9]\d{1,14}$", r"^#(?:[0-9a-fA-F]{3}){1,2}$", "^é$",
)  # fmt: skip
OTHER_PATTERNS = (
    r"^(?!-)a$", r"(?<=a)b", r"(?<!a)b", r"(a)\1", r"(?<n>a)\k<n>", r"\bword\b", r"\Bx", r"a\Z", r"\cJ",
    r"[^]", r"[[a-z]", r"{a}", r"a{,3}", r"(?>a)", r"(?#note)a", r"a^b", r"a$b", r"\<", r"\é", r"[a&&b]", r"[a-z--b]",
    r"[\b]", r"a\Ab", r"\h+", r"(?x) a",
)  # fmt: skip


@pytest.mark.parametrize("pattern", ENFORCED_PATTERNS)
def test_a_pattern_that_compiles_is_enforced(compiler: GrammarCompiler, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert relax_schema(schema) == (schema, [])
    assert compiler.compile(as_grammar(schema))


@pytest.mark.parametrize("pattern", OTHER_PATTERNS)
def test_other_patterns_are_dropped_unless_the_schema_is_strict(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert relax_schema(schema) == ({"type": "string"}, ["#/pattern"])
    with pytest.raises(UnsupportedSchema, match="'pattern' at # "):
        check_schema(schema)


@pytest.mark.parametrize(
    ("keyword", "nothing", "something"),
    [
        ("propertyNames", {"type": "string"}, {"type": "string", "maxLength": 3}),  # zod's records
        ("propertyNames", True, False),
        ("uniqueItems", False, True),
        ("minProperties", 0, 1),
        ("unevaluatedProperties", {}, False),
        ("unevaluatedItems", True, {"type": "string"}),
        ("dependentRequired", {}, {"a": ["b"]}),
        ("dependentSchemas", {}, {"a": {}}),
        ("dependencies", {}, {"a": ["b"]}),
    ],
)
def test_a_keyword_that_every_value_satisfies_is_ignored(keyword: str, nothing: object, something: object) -> None:
    """In a strict schema, too; one that says something is refused there, and listed elsewhere."""
    schema = {"type": "object", "properties": {"a": STRING}}
    assert check_schema({**schema, keyword: nothing}) == schema
    assert relax_schema({**schema, keyword: nothing}) == (schema, [])
    assert relax_schema({**schema, keyword: something}) == (schema, [f"#/{keyword}"])
    with pytest.raises(UnsupportedSchema, match=keyword):
        check_schema({**schema, keyword: something})


OVERLAPPING: list[list[Any]] = [
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1}, {"enum": [1.0, 2]}],
    [{"required": ["a"]}, {"required": ["b"]}],
    [{"type": "object", "properties": {"k": {"const": "a"}}}, {"type": "object", "properties": {"k": {"const": "b"}}}],
    [{"type": "object", "properties": {"k": STRING}, "required": ["k"]},
     {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}],
    [{"$ref": "#"}, {"type": "null"}],
    [True, {"type": "null"}],
]  # fmt: skip


@pytest.mark.parametrize("branches", OVERLAPPING, ids=str)
def test_branches_that_may_overlap_are_told(branches: list[Any]) -> None:
    assert relax_schema({"oneOf": branches}).not_enforced[0] == "#/oneOf"


@pytest.mark.parametrize(
    "schema",
    [
        7,
        {"anyOf": [7]},
        {"properties": {f"p{place}": {} for place in range(limits.SCHEMA_PROPERTIES + 1)}},
        {"enum": [[]] * limits.SCHEMA_NODES},
        {"const": "x" * limits.SCHEMA_BYTES},
        {"properties": {"x" * limits.SCHEMA_BYTES: {}}},
        {"multipleOf": 0},
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_what_is_no_schema_or_too_large_is_refused_where_nothing_is_strict(schema: object) -> None:
    with pytest.raises(InvalidGrammar):
        relax_schema(schema)


def nested_under_long_names(innermost: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", **innermost}
    for depth in range(28):
        schema = {"properties": {chr(0x1F600 + depth) * 128: schema}}
    return schema


@pytest.mark.parametrize("keyword", ["properties", "anyOf", "unknown keywords"])
def test_paths_of_many_parts_under_long_names_take_little_memory(keyword: str) -> None:
    """Each path had 40,000 characters: half a gigabyte, from a schema of 60."""
    names = [f"{number:x}" for number in range(12_000)]
    parts: dict[str, Any] = {"properties": dict.fromkeys(names, True), "anyOf": [True] * 12_000}
    innermost = {keyword: parts[keyword]} if keyword in parts else dict.fromkeys(names, 1)
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidGrammar):
            relax_schema(nested_under_long_names(innermost))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 64 << 20


def test_a_path_that_is_too_long_is_cut_and_names_nothing() -> None:
    """A reference by the name of a schema under it is one to nothing."""
    schema = nested_under_long_names({"$id": "deep", "not": {}})
    schema["properties"]["b"] = {"$ref": "deep"}
    relaxed = relax_schema(schema)
    assert relaxed.schema["properties"]["b"] == {}  # type: ignore[index]
    reference, longest = sorted(relaxed.not_enforced, key=len)
    assert reference == "#/properties/b/$ref"
    assert len(longest) < 1010 and longest.endswith("/~")


def test_a_schema_is_not_changed() -> None:
    schema = {"type": "string", "nullable": True, "not": {}, "oneOf": [{}], "$id": "x", "minLength": None}
    before = json.dumps(schema)
    relax_schema(schema)
    with pytest.raises(InvalidGrammar):
        check_schema(schema)
    assert json.dumps(schema) == before


VALUES: list[Any] = [
    *(None, True, 0, 1, -3, 2.5, "", "a", "ab", [], [1], [1, 1], ["a", "b"], [1, "a", None]),
    *({}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"b": "z"}, {"k": "a"}, {"a": {"a": 1}}, {"c": 1}),
]
LEAVES: list[Any] = [
    *(
        True,
        {},
        {"const": 1},
        {"enum": ["a", "b", 1, None]},
        {"$ref": "#/$defs/d"},
        {"type": "string", "format": "zip"},
    ),
    *({"type": name} for name in ("string", "integer", "number", "object", "array", "null")),
    *(
        {"uniqueItems": True},
        {"minItems": 1},
        {"minLength": 1},
        {"pattern": "^a"},
        {"pattern": "^(?=a)"},
        {"minimum": 1},
    ),
    *({"required": ["a"]}, {"minProperties": 1}, {"maxProperties": 1}, {"propertyNames": {"enum": ["a", "k"]}}),
    *({"dependentRequired": {"a": ["b"]}}, {"unevaluatedProperties": False}, {"multipleOf": 2}),
]


def random_schema(chance: random.Random, depth: int = 0) -> Any:
    if depth > 2 or chance.random() < 0.2:
        return chance.choice(LEAVES)
    schema: Schema = {}
    for keyword in chance.sample(("one", "list", "named", "leaf", "if"), chance.randint(1, 3)):
        parts = [random_schema(chance, depth + 1) for _ in range(chance.randint(1, 3))]
        if keyword == "one":
            schema[chance.choice(("items", "additionalProperties", "not", "contains"))] = parts[0]
        elif keyword == "list":
            schema[chance.choice(("anyOf", "oneOf", "allOf", "prefixItems"))] = parts
        elif keyword == "named":
            schema["properties"] = dict(zip("abk", parts, strict=False))
            schema |= {"patternProperties": {"^(?!a)": parts[0]}} if chance.random() < 0.2 else {}
        elif keyword == "if":
            schema |= {"if": parts[0], "then": parts[-1], "dependentSchemas": {"a": parts[0]}}
        elif isinstance(leaf := chance.choice(LEAVES), dict):
            schema |= leaf
    return schema


@pytest.mark.parametrize("seed", [0, 1, *long_only([2, 3])])
def test_no_relaxed_schema_forbids_what_the_schema_allows(fallback_compiler: GrammarCompiler, seed: int) -> None:
    """Properties come in the schema's order, so both orders of two are tried."""
    chance = random.Random(seed)
    num_accepted = 0
    for _ in range(60):
        schema = {"allOf": [random_schema(chance)], "$defs": {"d": chance.choice(LEAVES[5:])}}
        allowed = [value for value in VALUES if DRAFT(schema).is_valid(value)]
        if not allowed:
            continue
        try:
            grammar = as_grammar(relax_schema(schema).schema)
            fallback_compiler.compile(grammar)
        except InvalidGrammar:
            continue  # llguidance cannot combine its parts
        for value in allowed:
            orders = [value, dict(reversed(value.items()))] if isinstance(value, dict) else [value]
            assert any(accepts(fallback_compiler, grammar, json.dumps(each)) for each in orders), (schema, value)
            num_accepted += 1
    assert num_accepted > 200
