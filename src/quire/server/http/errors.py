"""Error replies: how an error becomes a status, headers and a JSON body. Does not depend on the engine.

The body has the shape of the API that was called: OpenAI's, Anthropic's, Ollama's, or that of text-generation-inference
with its own statuses. It is bounded, and has no path of this machine and no memory address. `rename_error_params`
replaces internal names of fields by those of the API.
"""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from quire.core.errors import QuireError
from quire.server.http.request_context import RequestContext, context_of, route_path

MAX_ERROR_CHARACTERS = 1000  # an error may quote what a client sent, which may be long

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class BodyTooLarge(QuireError):
    """More bytes than the body limit."""

    status = 413
    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit} bytes, the limit (--max-body).")


class TooManyStreams(QuireError):
    """Streams that take no place in the queue take too much; this client has its share."""

    status = 429
    code = "too_many_streams"
    retry_after_s = 1.0


class Stopping(QuireError):
    """The server is shutting down."""

    status = 503
    code = "server_stopping"
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("The server is stopping; try again when it is back.")


def error_body(error: QuireError) -> dict[str, object]:
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    message = error.message[:MAX_ERROR_CHARACTERS].encode("utf-8", "replace").decode()  # no lone surrogates
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


TGI_PATHS = frozenset({"/generate", "/generate_stream", "/"})

_STATUSES = {400: 422, 500: 424}
_TGI_TYPES = {422: "validation", 424: "generation", 429: "overloaded", 503: "unhealthy"}


Headers = list[tuple[bytes, bytes]]

CLIENT_LEFT = 499  # never sent; the status in logs for a client that disconnected

_MAX_MESSAGE_BYTES = 3000  # as JSON; a body stays below 4 kB
_MAX_CHARACTER_BYTES = 6  # per character, as JSON
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_MACHINE_PATH = re.compile(  # without the full stop of its sentence
    r"(?<![\w/.-])/(?:usr|home|root|tmp|opt|var|etc|mnt|srv|proc|sys|dev|Users)/(?:[^\s'\",;:)]*[^\s'\",;:).])?"
)
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

_log = logging.getLogger(__name__)


class Unauthorized(QuireError):
    """No key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class AdminOnly(QuireError):
    """A route that needs the admin key."""

    status = 403
    code = "admin_only"


class ForeignOrigin(QuireError):
    """A web page of a foreign origin calls a server without keys."""

    status = 403
    code = "origin_not_allowed"


class UnsupportedMediaType(QuireError):
    """A body with another content type than JSON, or a compressed one."""

    status = 415
    code = "unsupported_media_type"


class RouteNotFound(QuireError):
    """No such route, or not with this method."""

    code = "not_served"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class InternalError(QuireError):
    """An internal error. The text is fixed; the log has the stack under the same id."""

    status = 500
    code = "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"The server failed to answer this request; see its log, id {request_id}.")


class ErrorReply(NamedTuple):
    status: int
    headers: Headers
    body: bytes


def reply_to(error: QuireError, *, path: str = "", request_id: str = "") -> ErrorReply:
    """The reply to a request for this path."""
    body = error_body(error)
    parts = body["error"]
    assert isinstance(parts, dict)
    parts["message"] = sanitized(str(parts["message"]))
    if is_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        body = {
            "type": "error",
            "error": {"type": kind, "message": parts["message"]},
            "request_id": request_id,
        }
    status = error.status
    if path in TGI_PATHS:
        status = _STATUSES.get(error.status, error.status)
        body = {"error": parts["message"], "error_type": _TGI_TYPES.get(status, error.code)}
    elif is_ollama(path):
        body = {"error": parts["message"]}
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    return ErrorReply(status, _headers(error, len(content)), content)


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_ollama(path: str) -> bool:
    """Whether a path is of Ollama's API."""
    return path.startswith("/api/")


def _headers(error: QuireError, num_bytes: int) -> Headers:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes)]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)))
    elif error.status >= 500:
        headers.append((b"x-should-retry", b"false"))  # known to OpenAI's and Anthropic's clients
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def sanitized(message: str) -> str:
    """Without paths and addresses of this machine."""
    message = _MACHINE_PATH.sub("a path", _ADDRESS.sub("an address", message))
    if len(message) * _MAX_CHARACTER_BYTES <= _MAX_MESSAGE_BYTES:
        return message
    while (num_bytes := len(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))) > _MAX_MESSAGE_BYTES:
        message = message[: len(message) * _MAX_MESSAGE_BYTES // num_bytes]
    return message


def public_error(error: Exception, scope: Scope) -> QuireError:
    """Any exception as an error that may be sent to a client."""
    if isinstance(error, QuireError):
        return error
    if isinstance(error, HTTPException) and error.status_code < 500:
        return RouteNotFound(f"{scope['method']:.20} {route_path(scope):.200} is not served here.", error.status_code)
    return InternalError(context_of(scope).request_id)


def _error_path(scope: Scope) -> str:
    """The path that decides the shape of an error. POST / is TGI's, GET / is the chat page."""
    path = route_path(scope)
    return path if path != "/" or scope["method"] == "POST" else ""


def log_failure(error: Exception, public: QuireError, context: RequestContext | None) -> None:
    """Each 500 leaves one line with its stack, wherever it was raised; other errors none."""
    if public.status != 500 or (context is not None and context.logged):
        return
    fields = {"error": public.code}
    if context is not None:
        context.logged = True
        fields["id"] = context.request_id
    _log.error("request_failed", exc_info=error, extra={"fields": fields})


def translated(error: Exception, scope: Scope) -> ErrorReply:
    """The reply to this request."""
    public, context = public_error(error, scope), context_of(scope)
    context.error_code = public.code
    context.failed |= isinstance(public, InternalError)
    log_failure(error, public, context)
    return reply_to(public, path=_error_path(scope), request_id=context.request_id)


async def _respond(request: Request, error: Exception) -> Response:
    public, context = public_error(error, request.scope), context_of(request.scope)
    context.error_code = public.code
    log_failure(error, public, context)
    extra: Mapping[str, str] = (error.headers or {}) if isinstance(error, HTTPException) else {}
    reply = reply_to(public, path=_error_path(request.scope), request_id=context.request_id)
    headers = {name.decode("ascii"): value.decode("ascii") for name, value in reply.headers}
    return Response(reply.body, reply.status, {**extra, **headers})


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


# For `Starlette(exception_handlers=...)`: by default Starlette replies in plain text to uncaught exceptions.
HANDLERS: dict[type[Exception], ExceptionHandler] = {
    QuireError: _respond,
    HTTPException: _respond,
    ClientDisconnect: _client_left,
    Exception: _respond,
}


class ErrorTranslator:
    """ASGI: an uncaught exception becomes an error reply, or ends a response that has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as error:
            reply = translated(error, scope)
            if context.status is None:
                await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
                await send({"type": "http.response.body", "body": reply.body})


Names = Mapping[str, str]  # from the internal name of a field to that of the API


@contextmanager
def rename_error_params(names: Names) -> Iterator[None]:
    """Errors raised in this block use these names of fields."""
    try:
        yield
    except QuireError as error:
        if names:
            _rename(error, names)
        raise


def _rename(error: QuireError, names: Names) -> None:
    """A name without an underscore is also a plain word (stop, prompt): it is replaced only at the start of a text."""
    before = {name: r"(?<![\w.'\"])" if "_" in name else "^" for name in sorted(names, key=len, reverse=True)}
    pattern = re.compile("|".join(rf"{place}{re.escape(name)}(?!\w)" for name, place in before.items()))
    error.message = pattern.sub(lambda found: names[found[0]], error.message)
    if error.param is not None:
        error.param = pattern.sub(lambda found: names[found[0]], error.param)
