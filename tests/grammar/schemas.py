"""Schemas as clients send them: one at least for each keyword that is enforced, and the ways they combine."""

Schema = dict[str, object]
_TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20, "title": "Name"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _closed(**properties: Schema) -> Schema:
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: list[Schema] = [
    {},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string"},
    {"type": "object"},
    {"type": "array"},
    {"type": ["integer", "null"]},
    {"type": ["string", "boolean"], "maxLength": 3},
    {"enum": ["red", "green", 3, None, True, 2.5]},
    {"enum": ["é", "日本", "😀", 'q"uote', "back\\slash", "a/b"]},
    {"type": "string", "enum": ["one", "two"]},
    {"const": "fixed"},
    {"const": {"a": [1, {"b": None}]}},
    {"type": "string", "maxLength": 0},
    {"type": "string", "maxLength": 200},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "minLength": 40},
    {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{3}$"},
    {"type": "string", "pattern": "b+c"},
    {"type": "string", "pattern": "^(red|blue)$", "maxLength": 3},
    {"type": "string", "pattern": "^\\d{3}\\s\\w+$", "maxLength": 12},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 102},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 1000},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    {"minimum": 3, "maxLength": 2, "maxItems": 1, "type": ["integer", "string", "array"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 4},
    {"type": "array", "maxItems": 0},
    _PERSON,
    _TREE,
    {**_PERSON, "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/person"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"n_1": {"type": "integer"}}, "patternProperties": {"^n_": {"maximum": 5}}},
    {"type": "object", "additionalProperties": False},
    {"anyOf": [{"type": "integer", "minimum": 100}, {"type": "string", "maxLength": 1}]},
    {"anyOf": [{"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    {
        "$defs": {
            "cat": _closed(kind={"const": "cat"}),
            "dog": _closed(kind={"const": "dog"}, age={"type": "integer"}),
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    {"definitions": {"short": {"type": "string", "maxLength": 4}}, "$ref": "#/definitions/short"},
    {"$defs": {"text": {"type": "string"}}, "$ref": "#/$defs/text", "maxLength": 2},
    {"$defs": {"name": {"$anchor": "name", "type": "string", "maxLength": 3}}, "$ref": "#name"},
    _closed(inner=_closed(items={"type": "array", "items": _closed(id={"type": "integer"}), "maxItems": 2})),
    _closed(**{"with space": {"type": "null"}, 'quo"te': {"type": "null"}, "ünï": {"type": "null"}, "not": {}}),
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "date", "pattern": "^2"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "hostname", "maxLength": 40},
    {"type": "string", "format": "uri"},
    {"type": "string", "format": "duration"},
    {"type": ["string", "null"], "format": "date", "description": "when", "default": None, "examples": ["2024-01-01"]},
]
