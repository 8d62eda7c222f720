"""More hostile grammars, of keywords and operators that `bombs.py` does not use: conditions, dependencies, patterns of
names, definitions inside definitions, long enumerations and constants; lookarounds and named groups; Lark templates,
imports, priorities and ignored terminals."""

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "regex",
           "json-pointer", "idn-email", "iri", "unknown")  # fmt: skip
CLASSES = (
    r"[a-z]",
    r"[^\n]",
    r"\p{Han}",
    r"[\x00-\x{10FFFF}]",
    r"\d",
    "[[:alpha:]]",
    r"[a-z&&[^aeiou]]",
    r"\S",
    "[éü日]",
    ".",
)
LOOKS = ("(?=a)", "(?!b)", "(?<=c)", "(?<!d)", r"\b", r"\B", "^", "$", r"\1", "(?i)", "(?s:.)", "(?>a+)", "(?P<n>a)",
         "(?P=n)", r"\Z", r"\A", "(?#x)", "a*+", "a+?")  # fmt: skip


def keyword_schema_bomb(chance: random.Random) -> str:
    """A schema whose definitions lie in definitions of definitions, and use one another under rare keywords."""
    names = [f"n{number}" for number in range(chance.randrange(2, 7))]
    definitions: Schema = {}
    for place, name in enumerate(names):
        inner = {"$defs": {"deep": {"$defs": {"deeper": _leaf(chance)}, "anyOf": [_leaf(chance)]}}}
        definitions[name] = {**inner, **_node(chance, names, place)}
    root = {
        "$ref": chance.choice((f"#/$defs/{names[0]}", f"#/$defs/{names[0]}/$defs/deep/$defs/deeper", "#", "#/$defs"))
    }
    return json.dumps(
        {**root, "$defs": definitions} if chance.random() < 0.8 else {**definitions[names[0]], "$defs": definitions}
    )


def _node(chance: random.Random, names: list[str], place: int) -> Schema:
    def use() -> Schema:
        kind = chance.random()
        if kind < 0.5:
            return {"$ref": f"#/$defs/{chance.choice(names[place:])}"}
        if kind < 0.7:
            return {"$ref": f"#/$defs/{chance.choice(names)}/$defs/deep/$defs/deeper"}
        return _leaf(chance)

    fan_out = chance.randrange(1, 6)
    makers: list[Callable[[], Schema]] = [
        lambda: {"type": "object", "patternProperties": {_regex(chance, 2): use() for _ in range(fan_out)}},
        lambda: {"type": "object", "properties": {f"p{n}": use() for n in range(fan_out)},
                 "dependentRequired": {f"p{n}": [f"p{m}" for m in range(fan_out)] for n in range(fan_out)}},
        lambda: {"dependentSchemas": {f"p{n}": use() for n in range(fan_out)}},
        lambda: {"if": use(), "then": use(), "else": {"if": use(), "then": use(), "else": use()}},
        lambda: {"type": "array", "prefixItems": [use() for _ in range(fan_out * 4)], "items": use(),
                 "minItems": fan_out * 4},
        lambda: {"type": "array", "contains": use(), "minContains": 3, "maxContains": 10**6, "uniqueItems": True},
        lambda: {"type": "object", "propertyNames": {"pattern": _regex(chance, 3)}, "minProperties": 50,
                 "maxProperties": chance.choice((60, 10**5)), "additionalProperties": use()},
        lambda: {"type": "object", "unevaluatedProperties": False, "allOf": [use(), use()]},
        lambda: {"anyOf": [{"allOf": [use(), {"not": use()}]} for _ in range(fan_out)]},
        lambda: {"type": ["object", "array", "string", "null", "integer"], "properties": {"a": use()}, "items": use(),
                 "required": [f"p{n}" for n in range(chance.choice((3, 300)))]},
        lambda: {"oneOf": [{"properties": {"kind": {"const": n}, "x": use()}, "required": ["kind"]}
                           for n in range(fan_out * 8)]},
        lambda: {"type": "object", "properties": {f"o{n}": use() for n in range(chance.choice((5, 60)))}},
    ]  # fmt: skip
    return chance.choice(makers)()


def _leaf(chance: random.Random) -> Schema:
    kind = chance.randrange(9)
    if kind == 0:
        return {"enum": [f"{'common prefix ' * 4}{n}" for n in range(chance.choice((10, 10, 100, 10_000)))]}
    if kind == 1:
        value: object = "x"
        for _ in range(chance.choice((3, 25))):
            value = {"a": value, "b": [value] * 1}
            value = value if len(str(value)) < 20_000 else "cut"
        return {"const": value}
    if kind == 2:
        return {"type": "string", "format": chance.choice(FORMATS), "pattern": _regex(chance, 2)}
    if kind == 3:
        return {"type": "string", "pattern": _regex(chance, 4), "minLength": chance.choice((0, 40, 4_000)),
                "maxLength": chance.choice((50, 5_000, 10**7))}  # fmt: skip
    if kind == 4:
        return {
            "type": "number",
            "exclusiveMinimum": chance.choice((-1e-300, 0.1, 10**30)),
            "multipleOf": chance.choice((1e-9, 7, 0.3)),
        }
    if kind == 5:
        return {
            "type": "integer",
            "minimum": -(10 ** chance.randrange(1, 18)),
            "maximum": 10 ** chance.randrange(1, 18),
        }
    if kind == 6:
        return {"enum": [{"k": [n, str(n), None, {"z": n}]} for n in range(chance.choice((5, 5, 500)))]}
    if kind == 7:
        return {"type": "string", "format": chance.choice(FORMATS)}
    return {}


def _regex(chance: random.Random, parts: int) -> str:
    return "".join(_part(chance) for _ in range(parts))


def _part(chance: random.Random) -> str:
    low = chance.choice((0, 1, 7, 50, 900))
    repeat = chance.choice((f"{{{low},{low + chance.choice((1, 90, 2_000))}}}", "*", "+", "?", f"{{{low}}}", ""))
    body = chance.choice(CLASSES)
    if chance.random() < 0.2:
        body = (
            f"({body}{chance.choice(CLASSES)}|{chance.choice(LOOKS) if chance.random() < 0.2 else ''}{body}b){repeat}"
        )
    return body + repeat + (chance.choice(LOOKS) if chance.random() < 0.02 else "")


def keyword_regex_bomb(chance: random.Random) -> str:
    """Classes that are repeated between bounds, alternations of long texts, lookarounds."""
    kind = chance.randrange(3)
    if kind == 0:
        return _regex(chance, chance.choice((1, 5, 40)))
    if kind == 1:  # suffixes of all lengths: the states of a text that may begin anywhere
        return (
            "(.*(" + "|".join("".join(chance.choices("abc", k=12)) for _ in range(chance.choice((20, 1_000)))) + "))+"
        )
    return ".*" + "".join(f"(?:{_part(chance)})?" for _ in range(chance.choice((10, 200)))) + "x" * chance.randrange(30)


def keyword_lark_bomb(chance: random.Random) -> str:
    """Templates, imports, ignored terminals, priorities and rules that derive themselves in many ways."""
    count = chance.randrange(2, 20)
    extras = [
        f"%ignore /{_plain(chance, 2)}/",
        '%ignore " "',
        "%declare X Y",
        "%override r0: r0 r0",
        "_sep{x, y}: x (y x)*",
        f"s: %json {keyword_schema_bomb(chance)}",
        'stop[stop="x", max_tokens=5]: /.*/',
        "lazy[lazy]: /(.*)(a|b)/",
        f"m: T~{chance.choice((5, 5_000, 10**7))}",
    ]
    priority = ".7" if chance.random() < 0.1 else ""
    lines = ["%import common.INT", "start: r0", *(f"r{number}: {_rule(chance, count)}" for number in range(count))]
    lines += [f"T{priority}: /{_plain(chance, 3)}/", f'U: T~1..{chance.choice((3, 300))} | "u"']
    return "\n".join([*lines, *(each for each in extras if chance.random() < 0.15)])


def _rule(chance: random.Random, count: int) -> str:
    words = [f"r{number}" for number in range(count)]
    words += ["T", "U", "INT", '"a"', '("a"|"b")~2..40', "[T]", "(r0|r1)+", '"é"i']
    alternatives = [" ".join(chance.choices(words, k=chance.randrange(1, 7))) for _ in range(chance.randrange(1, 6))]
    return " | ".join([*alternatives, '"z"'])


def _plain(chance: random.Random, parts: int) -> str:
    return _regex(chance, parts).replace("/", "")
