"""Closes the objects of a JSON schema: one that lists its properties and says nothing of others gets no others.

This is how vLLM, SGLang, llama.cpp and Ollama constrain an answer to a schema. By the standard such an object may have
any further properties, and a small model then writes names of its own until the answer is cut. pydantic and most
clients write `additionalProperties` only where it is set. Does not validate: what is not a schema stays as it is.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar
from urllib.parse import unquote

_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Beside a combining keyword these make a value satisfy several schemas that name properties.
_OF_OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties", "required", "minProperties"})
_CONDITIONS = frozenset({"not", "if", "then", "else", "dependentSchemas", "$dynamicRef", "$recursiveRef"})
# With one of these an object may have properties that `properties` does not list.
_NAMING_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "dependentRequired", "dependencies"}
    | {"const", "enum", "minProperties"}
    | _COMBINING
    | _CONDITIONS
)

Schema = dict[str, object]


SchemaType = TypeVar("SchemaType")  # a dict stays one


def close_objects(schema: SchemaType) -> SchemaType:
    """The schema with its objects closed; the given one is not changed.

    Objects stay open where a value must satisfy several schemas at once (allOf, or keywords beside anyOf or $ref): each
    would forbid the properties of the others. They say so afterwards, in case a keyword is left out of them.
    """
    if not isinstance(schema, dict):
        return schema
    schemas = _copies(schema)
    root = schemas[0]
    combined = _combined(root, schemas)
    if combined is None:
        return schema
    says_more = any("unevaluatedProperties" in each for each in schemas)  # it depends on what names a property
    for each in schemas:
        if id(each) not in combined and _lists_all_properties(each):
            each["additionalProperties"] = False
        elif "properties" in each and not says_more:
            each.setdefault("additionalProperties", True)
    return root  # type: ignore[return-value]


def _copies(schema: Schema) -> list[Schema]:
    """A copy of the schema, then those of all schemas in it. Without recursion: it may be nested arbitrarily deep."""
    root = dict(schema)
    found = [root]
    for each in found:  # grows
        for holder, key, part in _parts(each):
            copy = dict(part)
            holder[key] = copy  # type: ignore[index]
            found.append(copy)
    return found


def _parts(schema: Schema) -> Iterator[tuple[Schema | list[object], str | int, Schema]]:
    """The schemas directly within one, each with what holds it, which is copied first."""
    for keyword in _NAMED:
        if isinstance(named := schema.get(keyword), dict):
            held: Schema = dict(named)
            schema[keyword] = held
            yield from ((held, name, part) for name, part in named.items() if isinstance(part, dict))
    for keyword in _LISTED:
        if isinstance(listed := schema.get(keyword), list):
            items = list(listed)
            schema[keyword] = items
            yield from ((items, place, part) for place, part in enumerate(listed) if isinstance(part, dict))
    for keyword in _SINGLE:
        if isinstance(part := schema.get(keyword), dict):
            yield schema, keyword, part


def _combined(root: Schema, schemas: list[Schema]) -> set[int] | None:
    """The ids of the schemas that a value must satisfy beside others; None if a reference to one is not understood."""
    combined: set[int] = set()
    waiting = [schema for schema in schemas if _combines(schema)]
    while waiting:
        schema = waiting.pop()
        if id(schema) in combined:
            continue
        combined.add(id(schema))
        body = {name: value for name, value in schema.items() if name not in _DEFINITIONS}
        waiting += [part for _, _, part in _parts(body)]
        if isinstance(reference := schema.get("$ref"), str):
            found = _resolve(root, reference)
            if not isinstance(found, dict):
                return None
            waiting.append(found)
    return combined


def _combines(schema: Schema) -> bool:
    parts = schema.get("allOf")
    combining = _COMBINING & schema.keys()
    several = len(combining) > 1 or (isinstance(parts, list) and len(parts) > 1)
    return several or bool(_CONDITIONS & schema.keys()) or bool(combining and _OF_OBJECTS & schema.keys())


def _lists_all_properties(schema: Schema) -> bool:
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or _NAMING_OTHERS & schema.keys():
        return False
    return all(name in named for name in required if isinstance(name, str))


def _resolve(root: Mapping[str, object], reference: str) -> object:
    """What a JSON pointer names; None for a name or an address."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: object = root
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found
