"""Rewrites a JSON schema of an older draft, or of OpenAPI, into the latest draft. What it allows stays the same.

What the latest draft writes differently: boolean `exclusiveMinimum` and `exclusiveMaximum` (draft 4), lists of `items`
(before 2020-12), `nullable` (OpenAPI 3.0), types in capitals (Gemini), references by `$id` and `$anchor`, which become
JSON pointers. Keywords whose value is null, or says nothing, are dropped. A `oneOf` becomes `anyOf` if no value can
satisfy two of its branches, which llguidance cannot tell through references.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote, unquote

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
ANY_TEXT = frozenset({"password", "path", "binary"})  # formats that every string has
_IDS = ("$id", "id", "$anchor", "$dynamicAnchor")
_OF_DRAFTS = ("$schema", "$vocabulary", "$recursiveAnchor")  # the latest draft is read, whatever they say
_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
_ALWAYS_TRUE: Mapping[str, tuple[object, ...]] = {  # with these values a keyword forbids nothing
    "propertyNames": (True, {}, {"type": "string"}), "uniqueItems": (False,), "minProperties": (0,),
    "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}), "dependentRequired": ({},),
    "dependentSchemas": ({},), "dependencies": ({},),
}  # fmt: skip
_STAYING = frozenset({"$defs", "definitions", "title", "description", "default", "example", "examples"})
_BESIDE_TYPE = frozenset({"const", "$ref", "allOf", "anyOf", "oneOf"})  # a type alone does not allow null then
_RENAMED = re.compile(r"/oneOf/|/items/\d|/additionalItems")
_MAX_STEPS = 8  # from a reference to a reference
_MAX_BRANCHES = 128  # of a oneOf that are compared
_MAX_TAGS = 16  # required properties that are tried
Values = frozenset[tuple[str, object]]  # each with its type
_TYPES: Mapping[type, str] = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
_NAME_CHARACTERS = 128  # every part within has the name in its pointer
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9_$-]{{1,{_NAME_CHARACTERS}}}")  # nearly all
_SAFE = "~$!'()*+,;=:@"  # in a fragment of a URI, besides letters and digits
_POINTER_CHARACTERS = 1000  # each of 20,000 parts has one, and what contains it is part of it
_CUT = "/~"  # the end of a pointer that was cut: no other one ends so, as a tilde in a name is written ~0


def pointer(where: str, *names: str) -> str:
    """A JSON pointer as a fragment of a URI: all of it is ASCII. A name that is very long is cut, and so is the end of
    a pointer that is: it is good for a message and names nothing (`is_cut`)."""
    if is_cut(where):
        return where
    whole = "/".join((where, *(name if _PLAIN_NAME.fullmatch(name) else _escaped(name) for name in names)))
    return whole if len(whole) <= _POINTER_CHARACTERS else whole[:_POINTER_CHARACTERS] + _CUT


def is_cut(where: str) -> bool:
    return where.endswith(_CUT)


def _escaped(name: str) -> str:
    short = name[:_NAME_CHARACTERS].replace("~", "~0").replace("/", "~1")
    return quote(short, safe=_SAFE, errors="replace")


def resolve(root: Mapping[str, object], reference: str) -> object:
    """What a JSON pointer names; None if there is nothing."""
    found: object = root
    for name in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def rewrite_dialects(root: dict[str, object], parts: Iterable[tuple[object, str]]) -> None:
    """Rewrite a schema in place. `parts` are all schemas in it, each with its JSON pointer."""
    schemas = [(schema, where) for schema, where in parts if isinstance(schema, dict)]
    places = {"": "#"}
    for schema, where in schemas:
        for keyword in _IDS:
            if isinstance(name := schema.get(keyword), str):
                del schema[keyword]
                if not is_cut(where):
                    places.setdefault("#" + name if "nchor" in keyword else name.rstrip("#"), where)
    for schema, _ in schemas:
        unset = [keyword for keyword, value in schema.items() if _says_nothing(keyword, value)]
        for keyword in (*unset, *_OF_DRAFTS):
            schema.pop(keyword, None)
        if isinstance(name := schema.get("format"), str) and name in ANY_TEXT:
            del schema["format"]
        if isinstance(reference := schema.get("$ref"), str):
            schema["$ref"] = _as_pointer(reference, places)
        _rewrite_bounds(schema)
        if isinstance(kind := schema.get("type"), str) and kind.isupper() and kind.lower() in TYPES:
            schema["type"] = kind.lower()
        _allow_null(schema)
    if any(_RENAMED.search(str(schema.get("$ref"))) for schema, _ in schemas):
        return  # it would name nothing
    for schema, _ in schemas:
        _rewrite_tuple(schema)
        branches = schema.get("oneOf")
        if isinstance(branches, list) and _are_disjoint(root, branches):
            use_any_of(schema)


def _says_nothing(keyword: str, value: object) -> bool:
    return (value is None and keyword != "const") or value in _ALWAYS_TRUE.get(keyword, ())


def _rewrite_tuple(schema: dict[str, object]) -> None:
    if isinstance(schema.get("items"), list) and "prefixItems" not in schema:
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")


def use_any_of(schema: dict[str, object]) -> None:
    """Replace `oneOf` by `anyOf`."""
    branches = schema.pop("oneOf")
    if "anyOf" not in schema:
        schema["anyOf"] = branches
        return
    parts = schema.get("allOf")
    schema["allOf"] = [*(parts if isinstance(parts, list) else ()), {"anyOf": branches}]


def _as_pointer(reference: str, places: Mapping[str, str]) -> str:
    """A reference within the schema as a JSON pointer; any other one as it is."""
    if reference in places:
        return places[reference]
    base, _, fragment = reference.partition("#")
    if base not in places or not (fragment == "" or fragment.startswith("/")):
        return reference
    return places[base] + quote(unquote(fragment), safe="/" + _SAFE, errors="replace")


def _rewrite_bounds(schema: dict[str, object]) -> None:
    for bound, exclusive in _BOUNDS:
        if isinstance(is_exclusive := schema.get(exclusive), bool):
            del schema[exclusive]
            if is_exclusive and bound in schema:
                schema[exclusive] = schema.pop(bound)


def _allow_null(schema: dict[str, object]) -> None:
    if schema.pop("nullable", False) is not True:
        return
    kind, values = schema.get("type"), schema.get("enum")
    if not isinstance(kind, str) or _BESIDE_TYPE & schema.keys():
        moved = {keyword: schema.pop(keyword) for keyword in list(schema) if keyword not in _STAYING}
        schema["anyOf"] = [moved, {"type": "null"}]
        return
    schema["type"] = [kind, "null"] if kind != "null" else kind
    if isinstance(values, list) and None not in values:
        schema["enum"] = [*values, None]


def _are_disjoint(root: Mapping[str, object], branches: Sequence[object]) -> bool:
    """Whether no value can satisfy two branches: by their types, their values, or a property that tells them apart."""
    if len(branches) > _MAX_BRANCHES:
        return False
    by_type: dict[str, list[Mapping[str, object]]] = {}
    for branch in branches:
        schema = _followed(root, branch)
        types = _types(schema)
        if schema is None or not types:
            return False
        for kind in types:
            by_type.setdefault(kind, []).append(schema)
    return all(len(group) == 1 or _told_apart(root, kind, group) for kind, group in by_type.items())


def _told_apart(root: Mapping[str, object], kind: str, schemas: Sequence[Mapping[str, object]]) -> bool:
    if kind != "object":
        return _share_nothing([_values(schema) for schema in schemas])
    required = schemas[0].get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return any(
        _share_nothing([_required_values(root, schema, name) for schema in schemas]) for name in names[:_MAX_TAGS]
    )


def _required_values(root: Mapping[str, object], schema: Mapping[str, object], name: str) -> Values | None:
    """The values that a required property may have."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list) or name not in required:
        return None
    return _values(_followed(root, properties.get(name)))


def _share_nothing(values: Sequence[Values | None]) -> bool:
    known = [each for each in values if each is not None]
    return len(known) == len(values) and len(frozenset().union(*known)) == sum(map(len, known))


def _followed(root: Mapping[str, object], schema: object) -> Mapping[str, object] | None:
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = resolve(root, reference)
    return None


def _types(schema: Mapping[str, object] | None) -> frozenset[str]:
    """The types that values of a schema may have, integers as numbers; none if it does not say."""
    if schema is None:
        return frozenset()
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        names = [kinds] if isinstance(kinds, str) else kinds
        return frozenset("number" if name == "integer" else str(name) for name in names)
    values = _values(schema)
    return frozenset() if values is None else frozenset(kind for kind, _ in values)


def _values(schema: Mapping[str, object] | None) -> Values | None:
    """The values that a schema lists, each with its type; None if it lists none, or lists and objects."""
    if schema is None or not ("const" in schema or isinstance(schema.get("enum"), list)):
        return None
    listed = [schema["const"]] if "const" in schema else schema["enum"]
    assert isinstance(listed, list)
    if any(type(value) not in _TYPES for value in listed):
        return None
    return frozenset((_TYPES[type(value)], value) for value in listed)
