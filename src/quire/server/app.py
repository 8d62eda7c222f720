"""The application: which endpoint answers where. A plain Starlette app; keys, limits and logs stand around it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.core.errors import QuireError
from quire.server import models, people, tokenizing
from quire.server.answers import error_body
from quire.server.bodies.chat import ChatBody
from quire.server.bodies.completion import CompletionBody
from quire.server.bodies.tokenizing import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from quire.server.chat import chat_completions
from quire.server.completions import completions
from quire.server.desk import Desk
from quire.server.edge import answering, json_response
from quire.server.openapi import Door, openapi
from quire.server.served import Served
from quire.server.service import Service
from quire.server.sse import KEEP_ALIVE_S

DOORS = (
    Door("POST", "/v1/chat/completions", chat_completions, "Continue a conversation.", ChatBody),
    Door("POST", "/v1/completions", completions, "Continue one prompt or many.", CompletionBody),
    Door("GET", "/v1/models", models.models, "The models that are served."),
    Door("GET", "/v1/models/{name:path}", models.model, "One of them."),
    Door("POST", "/tokenize", tokenizing.tokenize, "The tokens of a text or a conversation.", TokenizeBody),
    Door("POST", "/detokenize", tokenizing.detokenize, "The text of tokens.", DetokenizeBody),
    Door("GET", "/tokenizer_info", tokenizing.tokenizer_info, "What a tokenizer_config.json would say."),
    Door("POST", "/apply-template", tokenizing.apply_template, "The text of a conversation.", ApplyTemplateBody),
    Door("GET", "/health", models.health, "Whether the engine lives."),
    Door("GET", "/load", models.load, "How much it has to do."),
    Door("GET", "/version", models.version, "Which quire this is."),
    Door("GET", "/", people.chat_page, "A chat for people.", in_schema=False),
    Door("GET", "/docs", people.docs_page, "This list, for people.", in_schema=False),
)


def make_app(served: Served, service: Service, *, keep_alive_s: float = KEEP_ALIVE_S) -> Starlette:
    """The application over an engine; the engine's thread lives as long as it does."""
    desk = Desk(served, service, keep_alive_s)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    described = msgspec.json.encode(openapi(DOORS))

    async def schema(request: Request) -> Response:
        return Response(described, media_type="application/json")

    routes = [Route(door.path, answering(partial(door.endpoint, desk)), methods=[door.method]) for door in DOORS]
    routes.append(Route("/openapi.json", schema))
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_such_route})


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    wrong = QuireError(f"{request.method} {request.url.path:.200} is not served here.")
    return json_response(error_body(wrong, status), status)
