"""Which JSON-schema keywords llguidance enforces, which are notes, and where schemas stand in schemas. Only tables.

A keyword in none of them is refused: llguidance passes over what it does not know, and a constraint that is
silently dropped is worse than an error.
"""

from typing import NamedTuple

ENFORCED = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    }
)

# They say nothing about which values are valid. `discriminator` only helps to find the branch of a oneOf; the
# content keywords are notes since draft 2019-09.
NOTES = frozenset(
    {
        *("title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("$defs", "definitions", "$anchor", "$id", "id", "discriminator"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
    }
)

INSTEAD = {
    "nullable": 'write "type": [..., "null"] instead',
    "not": "list what is allowed instead (enum, anyOf)",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "unevaluatedProperties": "use additionalProperties: false in each branch",
    "unevaluatedItems": "use items: false",
    "x-guidance": "leave it out: how JSON is written is the server's choice",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}

# What stands under a keyword: one schema, a list of schemas, or schemas by name.
ONE = frozenset({"items", "additionalItems", "additionalProperties"})
LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)

_MONTH_DAYS = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = r"(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:(?:[1-9][0-9]|0[1-9]){_FOURTH}|00{_FOURTH}|{_FOURTH}00)"
_DATE = rf"(?:{_YEAR}-{_MONTH_DAYS}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

# llguidance's own patterns for these let 2023-02-29, the year 0 and the second 60 pass.
STRICTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


class Places(NamedTuple):
    """A schema within a schema, and where it stands."""

    schema: object
    where: str


def children(schema: dict[str, object], where: str) -> list[Places]:
    """The schemas directly within a schema."""
    found: list[Places] = []
    for keyword, value in schema.items():
        place = f"{where}/{keyword}"
        if keyword in NAMED and isinstance(value, dict):
            found += [Places(part, f"{place}/{name}") for name, part in value.items()]
        elif keyword in LISTED and isinstance(value, list):
            found += [Places(part, f"{place}/{number}") for number, part in enumerate(value)]
        elif keyword in ONE:
            found.append(Places(value, place))
    return found
