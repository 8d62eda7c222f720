"""The surface described for machines: made from the routes and the structs that the server itself uses."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.desk import Desk
from quire.version import __version__


@dataclass(frozen=True, slots=True)
class Door:
    """One endpoint: where it is, what answers, what it takes."""

    method: str
    path: str
    endpoint: Callable[[Desk, Request], Awaitable[Response]]
    summary: str
    body: type[msgspec.Struct] | None = None
    in_schema: bool = True
    generates: bool = False  # passes the turnstile
    admin: bool = False  # needs the admin key


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
_TGI_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    "required": ["error", "error_type"],
}
ERRORS = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "TgiError": _TGI_ERROR}


def error_of(door: Door) -> str:
    """In whose words a door refuses: the name of one of `ERRORS`."""
    if door.path.startswith("/v1/messages"):
        return "AnthropicError"
    return "TgiError" if door.path in ("/", "/generate", "/generate_stream") else "Error"


def openapi(doors: Sequence[Door]) -> dict[str, object]:
    """An OpenAPI 3.1 document."""
    told = [door for door in doors if door.in_schema]
    bodies = [door.body for door in told if door.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    reference = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for door in told:
        schema = None if door.body is None else reference[door.body]
        paths.setdefault(door.path.replace(":path}", "}"), {})[door.method.lower()] = _operation(door, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__, "description": "An LLM behind OpenAI's HTTP interface."},
        "paths": paths,
        "components": {"schemas": {**components, **ERRORS}},
    }


def _operation(door: Door, schema: dict[str, object] | None) -> dict[str, object]:
    refused = {
        "description": "Refused; the body says why.",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_of(door)}"}}},
    }
    operation: dict[str, object] = {
        "summary": door.summary,
        "responses": {"200": {"description": "Answered."}, "default": refused},
    }
    names = re.findall(r"\{(\w+)", door.path)
    if names:
        schema_of_name = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema_of_name} for name in names
        ]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
