"""The way in: who may pass, and how much they may carry. Everything is refused that is not known to be allowed.

Pure ASGI, outside in: the witness (ids, headers, what came of it), CORS where it is wanted, the translator of errors,
the door. Whoever holds a request's head may ask before all that whether the door would refuse it: `turn_away`. Knows
keys, paths and sizes; not what the application does.

Ids that nobody can choose or guess. Drawn from the system many at a time: a call of it for each would let go of the
interpreter, which other threads then keep for milliseconds.
"""

import ipaddress
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import ConfigError, QuireError
from quire.server.http.auth import ANONYMOUS, Identity, KeyRing
from quire.server.http.errors import (
    CLIENT_LEFT,
    AdminOnly,
    BodyTooLarge,
    ErrorReply,
    ErrorTranslator,
    ForeignOrigin,
    Headers,
    Unauthorized,
    UnsupportedMediaType,
    is_anthropic,
    translated,
)
from quire.server.http.request_context import (
    OTHER,
    RequestContext,
    RequestRecord,
    RouteNames,
    begin_visit,
    has_visit,
    patterns,
    route_path,
    visit_of,
)

ID_BYTES = 8
_DRAWN_AT_ONCE = 256


class RandomIds:
    """May be asked by several threads."""

    __slots__ = ("_unused",)

    def __init__(self) -> None:
        self._unused: list[str] = []

    def draw(self) -> str:
        """One that was not given before, in hexadecimal."""
        while True:
            try:
                return self._unused.pop()
            except IndexError:
                drawn = os.urandom(ID_BYTES * _DRAWN_AT_ONCE).hex()
                self._unused += [drawn[start : start + 2 * ID_BYTES] for start in range(0, len(drawn), 2 * ID_BYTES)]


Hear = Callable[[RequestRecord], None]
Admit = Callable[[Scope], None]  # the application's own door: a `QuireError`, or it will be called for this request
TurnAway = Callable[[Scope], ErrorReply | None]

PUBLIC = frozenset({"/health", "/ready"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_LABEL = re.compile(rb"[!-~]{1,128}")
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\[\]:-]+")
_PORT = re.compile(r":\d*\Z")
_JSON = re.compile(rb"\s*application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
_SHOWN = {b"authorization", b"x-api-key"}


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """What the operator allows."""

    max_body_bytes: int = 16 << 20
    allowed_origins: tuple[str, ...] = ()
    admin_routes: tuple[str, ...] = ()  # patterns; all below /admin/ are the admin's in any case
    own_host: str = "localhost"  # where it listens

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r:.100} is not an origin; write for example https://example.org:8443, or * for all.",
                    param="allowed_origins",
                )


def secure(
    app: Starlette | Router,
    *,
    keys: KeyRing,
    options: AccessOptions | None = None,
    hear: Sequence[Hear] = (),
    admit: Admit | None = None,
) -> ASGIApp:
    """The application behind the gate. Whoever hears is told of each request when it is over."""
    options = options or AccessOptions()
    door = AccessCheck(app, keys, options, admit)
    guarded: ASGIApp = ErrorTranslator(door)
    if options.allowed_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-quire-request-id", "request-id", "retry-after", "retry-after-ms"],
        )
    return RequestLogger(app, guarded, door, RouteNames(patterns(app.routes)), hear)


def early_refusals(app: ASGIApp, options: AccessOptions) -> TurnAway | None:
    """How to refuse without asking `app`; None where somebody around the door adds to its answers or wants to see."""
    return app.turn_away if isinstance(app, RequestLogger) and not options.allowed_origins else None


new_request_id = RandomIds().draw  # the server's own: a person can read it out


class RequestLogger:
    """Gives every request its ids and every answer its headers, and tells of both when they are over."""

    def __init__(
        self, app: ASGIApp, guarded: ASGIApp, door: "AccessCheck", names: RouteNames, hear: Sequence[Hear]
    ) -> None:
        self._app = app
        self._guarded = guarded
        self._door = door
        self._names = names
        self._hear = hear

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http", "served without WebSockets"
        visit = visit_of(scope) if has_visit(scope) else self._begin(scope)
        headers = _headers(scope, visit)

        async def tell(message: Message) -> None:
            if visit.cut_off:
                return  # answered already, by who holds the connection
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            elif not message.get("more_body", False):
                visit.complete = True
            await send(message)

        try:
            await self._guarded(scope, receive, tell)
        finally:
            self._tell(scope, visit)

    def turn_away(self, scope: Scope) -> ErrorReply | None:
        """The whole answer to one whom the door refuses, who is told of; None: it passed, and may be asked in."""
        visit = self._begin(scope)
        try:
            self._door.look(scope, visit)
        except Exception as error:
            reply = _whole_reply(error, scope, visit)
            self._tell(scope, visit)
            return reply
        return None

    @staticmethod
    def _begin(scope: Scope) -> RequestContext:
        visit = RequestContext(new_request_id(), time.monotonic(), _label(scope))
        begin_visit(scope, visit)
        return visit

    def _tell(self, scope: Scope, visit: RequestContext) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER
        status = visit.status if visit.status is not None and visit.complete else CLIENT_LEFT
        answered = RequestRecord(
            self._names.name(route_path(scope)),
            method,
            500 if visit.failed else status,
            time.monotonic() - visit.began_s,
            visit.identity.name,
            visit.request_id,
            visit.label,
            visit.num_prompt_tokens,
            visit.num_completion_tokens,
            visit.error_code,
        )
        for hear in self._hear:
            hear(answered)


class AccessCheck:
    """Asks for the key, then looks at what is carried in. What it refuses, it refuses before reading a body."""

    def __init__(self, app: ASGIApp, keys: KeyRing, options: AccessOptions, admit: Admit | None) -> None:
        self._app = app
        self._keys = keys
        self._admit = admit
        self._limit = options.max_body_bytes
        self._origins = frozenset(options.allowed_origins)
        self._own_names = frozenset(
            ["localhost", options.own_host.lower(), *(_name(_host(origin)) for origin in self._origins)]
        )
        self._admin = tuple(compile_path(pattern)[0] for pattern in options.admin_routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        if not visit.passed:
            self.look(scope, visit)
        await self._app(scope, self._limited(receive), send)

    def look(self, scope: Scope, visit: RequestContext) -> None:
        """Let it pass, or raise what speaks against it. Once: nobody behind the door sees the key."""
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several, the first counts
        visit.identity = self._identify(scope, headers, visit)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _SHOWN]
        if scope["method"] not in ("GET", "HEAD"):
            self._check_origin(headers)
        self._check_body(scope["method"], headers)
        if self._admit is not None:
            self._admit(scope)
        visit.passed = True

    def _identify(self, scope: Scope, headers: dict[bytes, bytes], visit: RequestContext) -> Identity:
        path = route_path(scope)
        identity = next((found for key in _keys_shown(headers) if (found := self._keys.find(key))), None)
        if path in PUBLIC and scope["method"] in ("GET", "HEAD"):
            return identity or visit.identity
        if path == "/admin" or path.startswith("/admin/") or any(regex.match(path) for regex in self._admin):
            return self._admit_admin(identity)
        if identity is not None:
            return identity
        if self._keys.open:
            return ANONYMOUS
        raise Unauthorized("No valid API key was given; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.")

    def _admit_admin(self, identity: Identity | None) -> Identity:
        if not self._keys.has_admin and (identity is not None or self._keys.open):
            raise AdminOnly("This route needs the admin key, and this server has none: start it with --admin-key-file.")
        if identity is None:
            raise Unauthorized("This route needs the admin key; send it as 'Authorization: Bearer KEY'.")
        if not identity.admin:
            raise AdminOnly("This route needs the admin key, and another key was given.")
        return identity

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Without keys, any web page that its user opens could use the model: only this server's own pages may."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not self._keys.open or not origin or "*" in self._origins or origin in self._origins:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        if _host(origin) != host:
            raise ForeignOrigin(
                "A web page of another origin may not use this server; allow it with --allowed-origins."
            )
        if not self._is_own(_name(host)):
            raise ForeignOrigin(
                f"This server has no keys, and does not know that {host:.100} is its own name and no stranger's. Use "
                f"its IP address, or start it with --allowed-origins {origin:.100} or with keys."
            )

    def _is_own(self, name: str) -> bool:
        """Whether a page at this name can only be ours: whoever owns another name may say that it is our address."""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._own_names
        return True

    def _check_body(self, method: str, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type")
        if kind is not None and method in ("POST", "PUT", "PATCH") and not _JSON.fullmatch(kind):
            raise UnsupportedMediaType("The body must be JSON: send the header 'Content-Type: application/json'.")
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            raise UnsupportedMediaType(
                f"The body is compressed ({coding[:40].decode('latin-1')}), and bodies are read here only as they are: "
                f"send it without the header 'Content-Encoding'."
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._limit:
            raise BodyTooLarge(self._limit)

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def take() -> Message:
            nonlocal num_bytes
            if num_bytes > self._limit:
                raise BodyTooLarge(self._limit)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise BodyTooLarge(self._limit)
            return message

        return take


def cut_off(scope: Scope, error: QuireError) -> ErrorReply:
    """The whole answer to one who passed, and whom his connection ends before the application answers: it goes on to
    hear that its client is gone, and what is told of the request is this answer."""
    visit = visit_of(scope)
    visit.cut_off = True
    return _whole_reply(error, scope, visit)


def _whole_reply(error: Exception, scope: Scope, visit: RequestContext) -> ErrorReply:
    reply = translated(error, scope)
    visit.status, visit.complete = reply.status, True
    return reply._replace(headers=[*reply.headers, *_headers(scope, visit)])


def _host(origin: str) -> str:
    return origin.partition("://")[2]


def _name(host: str) -> str:
    """Without its port, and an address of IPv6 without its brackets."""
    return _PORT.sub("", host).removeprefix("[").removesuffix("]").lower()


def _keys_shown(headers: dict[bytes, bytes]) -> list[bytes]:
    shown = [headers[b"x-api-key"]] if b"x-api-key" in headers else []
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return [*shown, key.strip()] if scheme.lower() == b"bearer" else shown


def _headers(scope: Scope, visit: RequestContext) -> Headers:
    headers = answer_headers(visit.request_id, visit.label)
    if is_anthropic(route_path(scope)):
        headers.append((b"request-id", visit.request_id.encode("ascii")))
    return headers


def answer_headers(request_id: str, label: str | None) -> Headers:
    """What every answer has, whoever gives it."""
    return [
        (b"x-request-id", (label or request_id).encode("ascii")),
        (b"x-quire-request-id", request_id.encode("ascii")),
        *_HEADERS,
    ]


def _label(scope: Scope) -> str | None:
    value = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return value.decode("ascii") if _LABEL.fullmatch(value) else None
