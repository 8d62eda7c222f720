"""The application: which endpoint answers where. A plain Starlette app; keys, limits and logs stand around it."""

from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from quire.server import messages, models, operations, people, responses, tgi, tokenizing
from quire.server.admitted import Admitted
from quire.server.bodies.chat import ChatBody
from quire.server.bodies.completion import CompletionBody
from quire.server.bodies.embedding import EmbeddingBody
from quire.server.bodies.messages import CountTokensBody, MessagesBody
from quire.server.bodies.responses import ResponsesBody
from quire.server.bodies.tgi import GenerateBody
from quire.server.bodies.tokenizing import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from quire.server.chat import chat_completions
from quire.server.completions import completions
from quire.server.desk import Desk
from quire.server.embeddings import embeddings
from quire.server.openapi import Door, openapi
from quire.server.replies import HANDLERS
from quire.server.routes import route_path
from quire.server.visit import visit_of

DOORS = (
    Door("POST", "/v1/chat/completions", chat_completions, "Continue a conversation.", ChatBody, generates=True),
    Door("POST", "/v1/completions", completions, "Continue one prompt or many.", CompletionBody, generates=True),
    Door("POST", "/v1/responses", responses.responses, "Answer a row of items.", ResponsesBody, generates=True),
    Door("GET", "/v1/responses/{response_id}", responses.stored_response, "None is stored: always 404."),
    Door("DELETE", "/v1/responses/{response_id}", responses.stored_response, "None is stored: always 404."),
    Door("POST", "/v1/responses/{response_id}/cancel", responses.stored_response, "None is stored: always 404."),
    Door("POST", "/v1/messages", messages.messages, "Continue it for Anthropic's.", MessagesBody, generates=True),
    Door("POST", "/v1/messages/count_tokens", messages.count_tokens, "Its length in tokens.", CountTokensBody),
    Door("POST", "/v1/embeddings", embeddings, "Turn texts into vectors.", EmbeddingBody, generates=True),
    Door("GET", "/v1/models", models.models, "The models that are served."),
    Door("GET", "/v1/models/{name:path}", models.model, "One of them."),
    Door("POST", "/tokenize", tokenizing.tokenize, "The tokens of a text or a conversation.", TokenizeBody),
    Door("POST", "/detokenize", tokenizing.detokenize, "The text of tokens.", DetokenizeBody),
    Door("GET", "/tokenizer_info", tokenizing.tokenizer_info, "What a tokenizer_config.json would say."),
    Door("POST", "/apply-template", tokenizing.apply_template, "The text of a conversation.", ApplyTemplateBody),
    Door("POST", "/", tgi.root, "Continue a text for TGI's clients, in a list.", GenerateBody, generates=True),
    Door("POST", "/generate", tgi.generate, "Continue a text for TGI's clients.", GenerateBody, generates=True),
    Door("POST", "/generate_stream", tgi.generate_stream, "The same, streamed.", GenerateBody, generates=True),
    Door("GET", "/info", tgi.info, "What is served, in TGI's words."),
    Door("GET", "/health", operations.health, "Whether the engine lives."),
    Door("GET", "/ready", operations.ready, "Whether a request sent now would be served."),
    Door("GET", "/load", operations.load, "How much it has to do."),
    Door("GET", "/metrics", operations.metrics, "What Prometheus reads."),
    Door("GET", "/version", models.version, "Which quire this is."),
    Door("GET", "/requests/{request_id}/explain", operations.explain, "Why a request waited.", admin=True),
    Door("POST", "/abort_requests", operations.abort, "End requests.", operations.AbortBody, admin=True),
    Door("POST", "/reset_prefix_cache", operations.reset_prefix_cache, "Forget cached prefixes.", admin=True),
    Door("POST", "/pause", operations.pause, "Let nobody new in.", admin=True),
    Door("POST", "/resume", operations.resume, "Let everybody in again.", admin=True),
    Door("GET", "/", people.chat_page, "A chat for people.", in_schema=False),
    Door("GET", "/docs", people.docs_page, "This list, for people.", in_schema=False),
)
ADMIN_ROUTES = tuple(door.path for door in DOORS if door.admin)


_GENERATING = frozenset((door.method, door.path) for door in DOORS if door.generates)


class Application(Starlette):
    """The endpoints, and who may come to them: under overload, to refuse is most of the work."""

    def __init__(self, desk: Desk, routes: list[Route]) -> None:
        super().__init__(routes=routes, exception_handlers=HANDLERS)
        self.router.redirect_slashes = False  # it would send clients to wherever their Host header says
        self._turnstile = desk.turnstile

    def admit(self, scope: Scope) -> None:
        """For the gate, before the body is read: a place for a request that wants the engine, or a `QuireError`.

        Taken here and not at the endpoint: of a crowd that comes in one turn of the event loop, all would pass.
        """
        if (scope["method"], route_path(scope)) in _GENERATING:
            identity = visit_of(scope).identity
            self._turnstile.enter(identity.name, identity.max_open)


def make_app(desk: Desk) -> Application:
    """The endpoints over one desk. Errors are raised through it: the gate around it answers them."""
    described = msgspec.json.encode(openapi(DOORS))

    async def schema(request: Request) -> Response:
        return Response(described, media_type="application/json")

    routes = [_route(door, desk) for door in DOORS]
    routes.append(Route("/openapi.json", schema))
    return Application(desk, routes)


def _route(door: Door, desk: Desk) -> Route:
    endpoint = partial(door.endpoint, desk)
    if door.generates:
        return Route(door.path, Admitted(endpoint, desk.turnstile), methods=[door.method])
    return Route(door.path, endpoint, methods=[door.method])
