"""The application: which endpoint answers where. A plain Starlette app; keys, limits and logs stand around it.

The surface described for machines: made from the routes and the structs that the server itself uses.

Pages for people: a chat at /, and the list of endpoints at /docs. They need nothing from elsewhere.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from quire.server import admin
from quire.server.admission import AdmittedEndpoint
from quire.server.anthropic import messages
from quire.server.anthropic.messages import CountTokensBody, MessagesBody
from quire.server.context import ServerState
from quire.server.http.errors import HANDLERS
from quire.server.http.request_context import context_of, route_path
from quire.server.openai import models, responses
from quire.server.openai.chat import chat_completions
from quire.server.openai.completions import completions
from quire.server.openai.embeddings import embeddings
from quire.server.openai.responses_input import ResponsesBody
from quire.server.request.schema import (
    ApplyTemplateBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from quire.server.tgi import generate as tgi
from quire.server.tgi.generate import GenerateBody
from quire.version import __version__


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint: where it is, what answers, what it takes."""

    method: str
    path: str
    handler: Callable[[ServerState, Request], Awaitable[Response]]
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


def error_of(endpoint: Endpoint) -> str:
    """In whose words a door refuses: the name of one of `ERRORS`."""
    if endpoint.path.startswith("/v1/messages"):
        return "AnthropicError"
    return "TgiError" if endpoint.path in ("/", "/generate", "/generate_stream") else "Error"


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, object]:
    """An OpenAPI 3.1 document."""
    told = [endpoint for endpoint in endpoints if endpoint.in_schema]
    bodies = [endpoint.body for endpoint in told if endpoint.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    reference = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for endpoint in told:
        schema = None if endpoint.body is None else reference[endpoint.body]
        paths.setdefault(endpoint.path.replace(":path}", "}"), {})[endpoint.method.lower()] = _operation(
            endpoint, schema
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__, "description": "An LLM behind OpenAI's HTTP interface."},
        "paths": paths,
        "components": {"schemas": {**components, **ERRORS}},
    }


def _operation(endpoint: Endpoint, schema: dict[str, object] | None) -> dict[str, object]:
    refused = {
        "description": "Refused; the body says why.",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_of(endpoint)}"}}},
    }
    operation: dict[str, object] = {
        "summary": endpoint.summary,
        "responses": {"200": {"description": "Answered."}, "default": refused},
    }
    names = re.findall(r"\{(\w+)", endpoint.path)
    if names:
        schema_of_name = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema_of_name} for name in names
        ]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


_PAGES = Path(__file__).parent / "pages"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def chat_page(desk: ServerState, request: Request) -> Response:
    return _page("chat.html")


async def docs_page(desk: ServerState, request: Request) -> Response:
    return _page("docs.html")


def _page(name: str) -> Response:
    return Response((_PAGES / name).read_bytes(), media_type="text/html; charset=utf-8", headers=_HEADERS)


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat_completions, "Continue a conversation.", ChatBody, generates=True),
    Endpoint("POST", "/v1/completions", completions, "Continue one prompt or many.", CompletionBody, generates=True),
    Endpoint("POST", "/v1/responses", responses.responses, "Answer a row of items.", ResponsesBody, generates=True),
    Endpoint("GET", "/v1/responses/{response_id}", responses.stored_response, "None is stored: always 404."),
    Endpoint("DELETE", "/v1/responses/{response_id}", responses.stored_response, "None is stored: always 404."),
    Endpoint("POST", "/v1/responses/{response_id}/cancel", responses.stored_response, "None is stored: always 404."),
    Endpoint("POST", "/v1/messages", messages.messages, "Continue it for Anthropic's.", MessagesBody, generates=True),
    Endpoint("POST", "/v1/messages/count_tokens", messages.count_tokens, "Its length in tokens.", CountTokensBody),
    Endpoint("POST", "/v1/embeddings", embeddings, "Turn texts into vectors.", EmbeddingBody, generates=True),
    Endpoint("GET", "/v1/models", models.models, "The models that are served."),
    Endpoint("GET", "/v1/models/{name:path}", models.model, "One of them."),
    Endpoint("POST", "/tokenize", models.tokenize, "The tokens of a text or a conversation.", TokenizeBody),
    Endpoint("POST", "/detokenize", models.detokenize, "The text of tokens.", DetokenizeBody),
    Endpoint("GET", "/tokenizer_info", models.tokenizer_info, "What a tokenizer_config.json would say."),
    Endpoint("POST", "/apply-template", models.apply_template, "The text of a conversation.", ApplyTemplateBody),
    Endpoint("POST", "/", tgi.root, "Continue a text for TGI's clients, in a list.", GenerateBody, generates=True),
    Endpoint("POST", "/generate", tgi.generate, "Continue a text for TGI's clients.", GenerateBody, generates=True),
    Endpoint("POST", "/generate_stream", tgi.generate_stream, "The same, streamed.", GenerateBody, generates=True),
    Endpoint("GET", "/info", tgi.info, "What is served, in TGI's words."),
    Endpoint("GET", "/health", admin.health, "Whether the engine lives."),
    Endpoint("GET", "/ready", admin.ready, "Whether a request sent now would be served."),
    Endpoint("GET", "/load", admin.load, "How much it has to do."),
    Endpoint("GET", "/metrics", admin.metrics, "What Prometheus reads."),
    Endpoint("GET", "/version", models.version, "Which quire this is."),
    Endpoint("GET", "/requests/{request_id}/explain", admin.explain, "Why a request waited.", admin=True),
    Endpoint("POST", "/abort_requests", admin.abort, "End requests.", admin.AbortBody, admin=True),
    Endpoint("POST", "/reset_prefix_cache", admin.reset_prefix_cache, "Forget cached prefixes.", admin=True),
    Endpoint("POST", "/pause", admin.pause, "Let nobody new in.", admin=True),
    Endpoint("POST", "/resume", admin.resume, "Let everybody in again.", admin=True),
    Endpoint("GET", "/", chat_page, "A chat for people.", in_schema=False),
    Endpoint("GET", "/docs", docs_page, "This list, for people.", in_schema=False),
)
ADMIN_ROUTES = tuple(endpoint.path for endpoint in ENDPOINTS if endpoint.admin)


_GENERATING = frozenset((endpoint.method, endpoint.path) for endpoint in ENDPOINTS if endpoint.generates)


class Application(Starlette):
    """The endpoints, and who may come to them: under overload, to refuse is most of the work."""

    def __init__(self, desk: ServerState, routes: list[Route]) -> None:
        super().__init__(routes=routes, exception_handlers=HANDLERS)
        self.router.redirect_slashes = False  # it would send clients to wherever their Host header says
        self._admission = desk.admission

    def admit(self, scope: Scope) -> None:
        """For the gate, before the body is read: a place for a request that wants the engine, or a `QuireError`.

        Taken here and not at the endpoint: of a crowd that comes in one turn of the event loop, all would pass.
        """
        if (scope["method"], route_path(scope)) in _GENERATING:
            identity = context_of(scope).identity
            self._admission.enter(identity.name, identity.max_open)


def make_app(desk: ServerState) -> Application:
    """The endpoints over one desk. Errors are raised through it: the gate around it answers them."""
    described = msgspec.json.encode(openapi(ENDPOINTS))

    async def schema(request: Request) -> Response:
        return Response(described, media_type="application/json")

    routes = [_route(endpoint, desk) for endpoint in ENDPOINTS]
    routes.append(Route("/openapi.json", schema))
    return Application(desk, routes)


def _route(endpoint: Endpoint, desk: ServerState) -> Route:
    handler = partial(endpoint.handler, desk)
    if endpoint.generates:
        return Route(endpoint.path, AdmittedEndpoint(handler, desk.admission), methods=[endpoint.method])
    return Route(endpoint.path, handler, methods=[endpoint.method])
