"""The middleware stack: request ids, response headers and access records around CORS, error replies and access checks.

Pure ASGI, from the outside in: `RequestLogger`, CORS if any origin is allowed, `ErrorTranslator`, `AccessCheck`. The
protocol runs the access checks on the head of a request before all that (`RequestLogger.check`), and admits it when it
is complete: under overload most requests are refused, and such a refusal costs no task.
"""

import re
import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.access import AccessCheck, AccessOptions, AdmissionCheck
from quire.server.http.auth import KeyRing
from quire.server.http.errors import CLIENT_LEFT, ErrorReply, ErrorTranslator, Headers, is_anthropic, translated
from quire.server.http.request_context import (
    OTHER,
    RequestContext,
    RequestRecord,
    RouteNames,
    context_of,
    has_context,
    new_request_id,
    patterns,
    route_path,
    set_context,
)

RequestObserver = Callable[[RequestRecord], None]

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_LABEL = re.compile(rb"[!-~]{1,128}")
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]


def secure(
    app: Starlette | Router,
    *,
    keys: KeyRing,
    options: AccessOptions | None = None,
    observers: Sequence[RequestObserver] = (),
    admission: AdmissionCheck | None = None,
) -> "RequestLogger":
    """The application inside the middleware stack. Observers get a record of each request when it ends."""
    options = options or AccessOptions()
    access = AccessCheck(app, keys, options, admission)
    guarded: ASGIApp = ErrorTranslator(access)
    if options.allowed_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                *("x-request-id", "x-quire-request-id", "request-id", "retry-after", "retry-after-ms"),
                "x-quire-warning",
            ],
        )
    return RequestLogger(app, guarded, access, RouteNames(patterns(app.routes)), observers)


class RequestLogger:
    """ASGI: gives a request its context and a response its headers, and reports a record of both at the end."""

    def __init__(
        self,
        app: ASGIApp,
        guarded: ASGIApp,
        access: AccessCheck,
        names: RouteNames,
        observers: Sequence[RequestObserver],
    ) -> None:
        self._app = app
        self._guarded = guarded
        self._access = access
        self._names = names
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http", "served without WebSockets"
        context = context_of(scope) if has_context(scope) else self._begin(scope)
        headers = _headers(scope, context)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                warning = [] if context.warning is None else [(b"x-quire-warning", context.warning.encode("ascii"))]
                message = {**message, "headers": [*message.get("headers", ()), *headers, *warning]}
            elif not message.get("more_body", False):
                context.complete = True
            await send(message)

        try:
            await self._guarded(scope, receive, send_noted)
        finally:
            self._report(scope, context)

    def check(self, scope: Scope, *, replies: bool) -> ErrorReply | None:
        """Run the access checks on the head of a request. If they refuse it: the whole reply, and its record is
        reported; or without `replies` None, and the application will reply."""
        return self._checked(self._access.check, scope, self._begin(scope), replies=replies)

    def admit(self, scope: Scope, *, replies: bool) -> ErrorReply | None:
        """The same when the request is complete: it takes its place in the queue."""
        return self._checked(self._access.admit, scope, context_of(scope), replies=replies)

    def _checked(
        self, check: Callable[[Scope, RequestContext], None], scope: Scope, context: RequestContext, *, replies: bool
    ) -> ErrorReply | None:
        try:
            check(scope, context)
        except Exception as error:
            if replies:
                return self.cut_off(scope, error)
            context.refusal = error
        return None

    def cut_off(self, scope: Scope, error: Exception) -> ErrorReply:
        """The whole reply to a request that never reaches the application; its record is reported."""
        context = context_of(scope)
        reply = _whole_reply(error, scope, context)
        self._report(scope, context)
        return reply

    def abandoned(self, scope: Scope) -> None:
        """The client disconnected before its request was complete."""
        self._report(scope, context_of(scope))

    @staticmethod
    def _begin(scope: Scope) -> RequestContext:
        label = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        context = RequestContext(
            new_request_id(), time.monotonic(), label.decode("ascii") if _LABEL.fullmatch(label) else None
        )
        set_context(scope, context)
        return context

    def _report(self, scope: Scope, context: RequestContext) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER
        status = context.status if context.status is not None and context.complete else CLIENT_LEFT
        record = RequestRecord(
            self._names.name(route_path(scope)),
            method,
            500 if context.failed else status,
            time.monotonic() - context.began_s,
            context.identity.name,
            context.request_id,
            context.label,
            context.num_prompt_tokens,
            context.num_completion_tokens,
            context.error_code,
        )
        for observe in self._observers:
            observe(record)


def _whole_reply(error: Exception, scope: Scope, context: RequestContext) -> ErrorReply:
    reply = translated(error, scope)
    context.status, context.complete = reply.status, True
    return reply._replace(headers=[*reply.headers, *_headers(scope, context)])


def _headers(scope: Scope, context: RequestContext) -> Headers:
    headers = response_headers(context.request_id, context.label)
    if is_anthropic(route_path(scope)):
        headers.append((b"request-id", context.request_id.encode("ascii")))
    return headers


def response_headers(request_id: str, label: str | None) -> Headers:
    """The headers that every response has, from the application or from the protocol."""
    return [
        (b"x-request-id", (label or request_id).encode("ascii")),
        (b"x-quire-request-id", request_id.encode("ascii")),
        *_HEADERS,
    ]
