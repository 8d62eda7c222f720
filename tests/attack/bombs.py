"""Random hostile grammars: schemas whose parts multiply, regular expressions and Lark grammars that nest and repeat."""

import json
import random
from typing import Any

Schema = dict[str, Any]

LEAVES: list[Schema] = [
    {"type": "string", "pattern": "a.*b"},
    {"type": "string", "pattern": "^(a|aa)+$"},
    {"type": "string", "pattern": "(.*a.{12}){4}"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "uri"},
    {"type": "string", "minLength": 9_000_000, "maxLength": 9_000_001},
    {"type": "integer", "multipleOf": 9973},
    {"type": "number", "minimum": -1e300, "maximum": 1e300, "multipleOf": 0.01},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}},
    {"type": "object", "patternProperties": {"^(x|y)*z$": {"type": "integer"}}, "additionalProperties": True},
    {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
    {"enum": [f"value {n}" for n in range(900)]},
    {"not": {"type": "string"}},
]
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")


def schema_bomb(chance: random.Random) -> str:
    """Definitions that use the next ones several times, by a random keyword each."""
    depth, fan_out = chance.randrange(1, 16), chance.randrange(1, 7)
    definitions: dict[str, Schema] = {f"d{depth}": dict(chance.choice(LEAVES))}
    for level in reversed(range(depth)):
        parts = [_use(chance, level, depth) for _ in range(fan_out)]
        keyword = chance.choice((*_LISTED, "properties", "items"))
        body: Schema = {keyword: parts}
        if keyword == "properties":
            body = {"type": "object", "properties": {f"p{n}": part for n, part in enumerate(parts)}}
        elif keyword == "items":
            body = {"type": "array", "items": parts[0], "maxItems": chance.choice((2, 1_000, 10**9))}
        if chance.random() < 0.3:
            body["$ref"] = f"#/$defs/d{chance.randrange(level, depth + 1)}"
        if chance.random() < 0.3:
            body |= chance.choice(LEAVES)
        definitions[f"d{level}"] = body
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def _use(chance: random.Random, level: int, depth: int) -> Schema:
    """A later definition, at times an earlier one, itself, or a leaf."""
    kind = chance.random()
    if kind < 0.75:
        return {"$ref": f"#/$defs/d{level + 1}"}
    if kind < 0.85:
        return {"$ref": f"#/$defs/d{chance.randrange(depth + 1)}"}
    return dict(chance.choice(LEAVES))


def regex_bomb(chance: random.Random) -> str:
    """Groups that are nested and repeated, up to thousands of times."""
    text = chance.choice(("a", ".", "[^x]", r"\w", r"\p{L}", "(?:ab|a)", "é", r"[\s\S]", "(a|b|ab)*"))
    for _ in range(chance.randrange(1, 9)):
        most = chance.choice((3, 30, 300, 3_000, 30_000))
        repeat = chance.choice(("*", "+", "?", f"{{{most}}}", f"{{0,{most}}}", f"{{{most},}}"))
        other = chance.choice(("", "b", ".*", "a.{20}", "|", "x?" * 50))
        text = f"({text}{other}){repeat}"
    return text


def lark_bomb(chance: random.Random) -> str:
    """Ambiguous rules that refer to one another, and terminals that are intersected or negated."""
    count = chance.randrange(1, 40)
    rules = [f"r{n}: {_rule(chance, count)}" for n in range(count)]
    patterns = " & ".join(f"/{regex_bomb(chance)}/" for _ in range(chance.randrange(1, 9)))
    schema = f"\ns: %json {schema_bomb(chance)}" if chance.random() < 0.3 else '\ns: "s"'
    return "\n".join(["start: r0", *rules, f"T: {patterns}"]) + schema


def _rule(chance: random.Random, count: int) -> str:
    words = [f"r{chance.randrange(count)}", f"r{chance.randrange(count)}", '"a"', '"a"?', "T", "s", "(r0 r0)*", "r0?"]
    alternatives = [" ".join(chance.choices(words, k=chance.randrange(1, 8))) for _ in range(chance.randrange(1, 5))]
    return " | ".join([*alternatives, '"z"'])
