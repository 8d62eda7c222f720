"""The ASGI application: the table of endpoints, their OpenAPI document, and the web pages.

A plain Starlette application. Authentication, limits and logs are in the middleware around it. The OpenAPI document is
made from the table and the msgspec structs that decode the bodies. The pages are the files of `static_files.py`.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from quire.server import admin
from quire.server.admission import AdmittedEndpoint, client_of
from quire.server.anthropic import messages
from quire.server.anthropic.messages import CountTokensBody, MessagesBody
from quire.server.context import ServerState
from quire.server.examples import EXAMPLES
from quire.server.fair_shares import Client
from quire.server.http.errors import HANDLERS, is_ollama
from quire.server.http.request_context import AdmittedPlace, context_of, route_path
from quire.server.llamacpp import completion as llamacpp
from quire.server.llamacpp.completion import InfillBody, LlamacppCompletionBody
from quire.server.ollama import generate as ollama
from quire.server.ollama import models as ollama_models
from quire.server.ollama.generate import OllamaChatBody, OllamaGenerateBody
from quire.server.ollama.models import OllamaEmbeddingBody, OllamaModelBody, OllamaPromptBody
from quire.server.openai import batches, files, models, responses
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
from quire.server.static_files import static_file, static_routes
from quire.server.tgi import generate as tgi
from quire.server.tgi.generate import GenerateBody
from quire.version import __version__


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route: method, path, handler and the struct of its body."""

    method: str
    path: str
    handler: Callable[[ServerState, Request], Awaitable[Response]]
    summary: str
    body: type[msgspec.Struct] | None = None
    in_schema: bool = True
    generates: bool = False  # subject to admission control


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
_OLLAMA_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
ERRORS = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "TgiError": _TGI_ERROR, "OllamaError": _OLLAMA_ERROR}


def error_of(endpoint: Endpoint) -> str:
    """The API whose error schema an endpoint uses: a key of `ERRORS`."""
    if endpoint.path.startswith("/v1/messages"):
        return "AnthropicError"
    if is_ollama(endpoint.path):
        return "OllamaError"
    return "TgiError" if endpoint.path in ("/", "/generate", "/generate_stream") else "Error"


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, object]:
    """An OpenAPI 3.1 document."""
    documented = [endpoint for endpoint in endpoints if endpoint.in_schema]
    bodies = [endpoint.body for endpoint in documented if endpoint.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    reference = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for endpoint in documented:
        schema = None if endpoint.body is None else reference[endpoint.body]
        paths.setdefault(endpoint.path.replace(":path}", "}"), {})[endpoint.method.lower()] = _operation(
            endpoint, schema
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__, "description": "OpenAI-compatible LLM server."},
        "paths": paths,
        "components": {"schemas": {**components, **ERRORS}},
    }


def _operation(endpoint: Endpoint, schema: dict[str, object] | None) -> dict[str, object]:
    refused = {
        "description": "An error; the body has the reason.",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_of(endpoint)}"}}},
    }
    operation: dict[str, object] = {
        "summary": endpoint.summary,
        "responses": {"200": {"description": "Success."}, "default": refused},
    }
    names = re.findall(r"\{(\w+)", endpoint.path)
    if names:
        schema_of_name = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema_of_name} for name in names
        ]
    if schema is not None:
        examples = {name: {"value": body} for name, body in EXAMPLES[endpoint.path].items()}
        content = {"application/json": {"schema": schema, "examples": examples}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


_REFUSED = ("create", "copy", "push")  # of Ollama's API
_SERVER_INFO, _MODEL_INFO = ("/server_info", "/get_server_info"), ("/model_info", "/get_model_info")  # new and old
OPENAI = (
    Endpoint("POST", "/v1/chat/completions", chat_completions, "Create a chat completion.", ChatBody, generates=True),
    Endpoint("POST", "/v1/completions", completions, "Create text completions.", CompletionBody, generates=True),
    Endpoint("POST", "/v1/responses", responses.responses, "Create a model response.", ResponsesBody, generates=True),
    Endpoint("POST", "/v1/responses/input_tokens", responses.input_tokens, "Count input tokens.", ResponsesBody),
    Endpoint("GET", "/v1/responses/{response_id}", responses.retrieve, "A stored response."),
    Endpoint("DELETE", "/v1/responses/{response_id}", responses.delete, "Delete a stored response."),
    Endpoint("POST", "/v1/responses/{response_id}/cancel", responses.cancel, "Cancel a background response."),
    Endpoint("GET", "/v1/responses/{response_id}/input_items", responses.input_items, "The input of a response."),
    Endpoint("POST", "/v1/embeddings", embeddings, "Create embeddings.", EmbeddingBody, generates=True),
    Endpoint("GET", "/v1/models", models.models, "List the served models."),
    Endpoint("GET", "/v1/models/{name:path}", models.model, "One served model."),
)
FILES = (  # with --files-dir
    Endpoint("POST", "/v1/files", files.upload, "Upload a file, as multipart/form-data."),
    Endpoint("GET", "/v1/files", files.list_files, "List the files of this key."),
    Endpoint("GET", "/v1/files/{file_id}", files.retrieve_file, "One file."),
    Endpoint("DELETE", "/v1/files/{file_id}", files.delete_file, "Delete a file."),
    Endpoint("GET", "/v1/files/{file_id}/content", files.file_content, "The content of a file."),
    Endpoint("POST", "/v1/batches", batches.create_batch, "Create a batch.", batches.BatchBody),
    Endpoint("GET", "/v1/batches", batches.list_batches, "List the batches of this key."),
    Endpoint("GET", "/v1/batches/{batch_id}", batches.retrieve_batch, "One batch."),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, "Cancel a batch."),
)
UPLOAD_ROUTES = ("/v1/files",)
ANTHROPIC = (
    Endpoint("POST", "/v1/messages", messages.messages, "Anthropic Messages API.", MessagesBody, generates=True),
    Endpoint("POST", "/v1/messages/count_tokens", messages.count_tokens, "Count a request's tokens.", CountTokensBody),
)
TGI = (
    Endpoint("POST", "/", tgi.root, "TGI: generate text; the result is a list.", GenerateBody, generates=True),
    Endpoint("POST", "/generate", tgi.generate, "TGI: generate text.", GenerateBody, generates=True),
    Endpoint("POST", "/generate_stream", tgi.generate_stream, "TGI: stream text.", GenerateBody, generates=True),
    Endpoint("GET", "/info", tgi.info, "Model info in TGI's format."),
)
LLAMACPP = (
    Endpoint("POST", "/completion", llamacpp.completion, "llama.cpp: text.", LlamacppCompletionBody, generates=True),
    Endpoint("POST", "/infill", llamacpp.infill, "llama.cpp: fill in the middle.", InfillBody, generates=True),
    Endpoint("GET", "/props", llamacpp.props, "llama.cpp: properties of the server."),
    Endpoint("GET", "/slots", llamacpp.slots, "llama.cpp: rows of the batch."),
)
OLLAMA = (
    Endpoint("POST", "/api/chat", ollama.chat, "Ollama: continue a conversation.", OllamaChatBody, generates=True),
    Endpoint("POST", "/api/generate", ollama.generate, "Ollama: generate.", OllamaGenerateBody, generates=True),
    Endpoint("POST", "/api/embed", ollama_models.embed, "Ollama: embed texts.", OllamaEmbeddingBody, generates=True),
    Endpoint("POST", "/api/embeddings", ollama_models.embeddings, "Ollama: embed.", OllamaPromptBody, generates=True),
    Endpoint("GET", "/api/tags", ollama_models.tags, "Ollama: the models."),
    Endpoint("GET", "/api/ps", ollama_models.ps, "Ollama: the loaded models."),
    Endpoint("POST", "/api/show", ollama_models.show, "Ollama: one model.", OllamaModelBody),
    Endpoint("GET", "/api/version", ollama_models.version, "Ollama: version."),
    Endpoint("POST", "/api/pull", ollama_models.pull, "Ollama: done for a served model.", OllamaModelBody),
    Endpoint("DELETE", "/api/delete", ollama_models.refuse, "Refused.", in_schema=False),
    *(Endpoint("POST", f"/api/{verb}", ollama_models.refuse, "Refused.", in_schema=False) for verb in _REFUSED),
)
TOKENIZER = (  # as vLLM and llama.cpp have them
    Endpoint("POST", "/tokenize", models.tokenize, "Tokenize a text or a conversation.", TokenizeBody),
    Endpoint("POST", "/detokenize", models.detokenize, "Convert token ids to text.", DetokenizeBody),
    Endpoint("GET", "/tokenizer_info", models.tokenizer_info, "The model's tokenizer configuration."),
    Endpoint("POST", "/apply-template", models.apply_template, "Apply the chat template.", ApplyTemplateBody),
)
ROUTERS = (  # what routers ask of a worker, as SGLang has it
    *(Endpoint("GET", path, admin.server_info, "Server info in SGLang's format.") for path in _SERVER_INFO),
    *(Endpoint("GET", path, admin.model_info, "Model info in SGLang's format.") for path in _MODEL_INFO),
    Endpoint("GET", "/get_load", admin.get_load, "Load in SGLang's format."),
)
MONITORING = (
    Endpoint("GET", "/health", admin.health, "Liveness: the engine makes progress."),
    Endpoint("GET", "/ready", admin.ready, "Readiness: a request sent now would be served."),
    Endpoint("GET", "/load", admin.load, "Server load."),
    Endpoint("GET", "/metrics", admin.metrics, "Prometheus metrics."),
    Endpoint("GET", "/engine/state", admin.engine_state, "Blocks, rows, queue and recent steps, once."),
    Endpoint("GET", "/engine/events", admin.engine_events, "The same as a stream of differences, for /engine."),
    Endpoint("GET", "/version", models.version, "Version."),
)
ADMIN = (
    Endpoint("GET", "/requests/{request_id}/explain", admin.explain, "Explain why a request waited."),
    Endpoint("GET", "/engine/requests/{number}/explain", admin.explain_number, "The same, by the number of /engine."),
    Endpoint("POST", "/abort_requests", admin.abort, "Abort requests.", admin.AbortBody),
    Endpoint("POST", "/reset_prefix_cache", admin.reset_prefix_cache, "Clear the prefix cache."),
    Endpoint("POST", "/rolling_restart", admin.rolling_restart, "Replace the replicas, one after the other."),
    Endpoint("POST", "/pause", admin.pause, "Refuse new requests."),
    Endpoint("POST", "/resume", admin.resume, "Accept requests again."),
)
ENDPOINTS = (*OPENAI, *FILES, *ANTHROPIC, *TGI, *OLLAMA, *LLAMACPP, *TOKENIZER, *ROUTERS, *MONITORING, *ADMIN)
STATIC_ROUTES = static_routes()
ADMIN_ROUTES = tuple(endpoint.path for endpoint in ADMIN)
_GENERATING = frozenset((endpoint.method, endpoint.path) for endpoint in ENDPOINTS if endpoint.generates)


class RequestAdmission(Protocol):
    """Admission control of one model, or of several."""

    def check(self, client: Client, most: int | None) -> None: ...

    def admit(self, client: Client, most: int | None) -> AdmittedPlace: ...


class Application(Starlette):
    """The routes, and their admission control: under overload most of the work is to refuse."""

    def __init__(self, admission: RequestAdmission, routes: list[Route]) -> None:
        super().__init__(routes=[*routes, *_shared_routes()], exception_handlers=HANDLERS)
        self.router.redirect_slashes = False  # a redirect would follow the Host header that the client sent
        self._admission = admission

    def check(self, scope: Scope) -> None:
        """Raise a `QuireError` if a request that generates would be refused now; its body is not there yet."""
        if _generates(scope):
            identity = context_of(scope).identity
            self._admission.check(client_of(identity, scope), identity.max_open)

    def admit(self, scope: Scope) -> None:
        """Take a place for a request that generates and is complete, or raise as `check` does.

        Not in the handler: a burst in one iteration of the event loop would pass as a whole.
        """
        if _generates(scope):
            context = context_of(scope)
            context.place = self._admission.admit(client_of(context.identity, scope), context.identity.max_open)


def _generates(scope: Scope) -> bool:
    return (scope["method"], route_path(scope)) in _GENERATING


def _shared_routes() -> list[Route]:
    """The web pages and the OpenAPI document: the same for one model and for several."""
    document = msgspec.json.encode(openapi(ENDPOINTS))

    async def schema(request: Request) -> Response:
        return Response(document, media_type="application/json")

    files = [Route(path, partial(static_file, name)) for path, name in STATIC_ROUTES.items()]
    return [*files, Route("/openapi.json", schema)]


def make_app(state: ServerState) -> Application:
    """The endpoints over one server state. Errors pass through it: the middleware around it writes the replies."""
    routes = []
    for endpoint in ENDPOINTS:
        handler = partial(endpoint.handler, state)
        served = AdmittedEndpoint(handler) if endpoint.generates else handler
        routes.append(Route(endpoint.path, served, methods=[endpoint.method]))
    return Application(state.admission, routes)
