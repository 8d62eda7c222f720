"""Access checks: authentication, CSRF and DNS rebinding protection, body limit. What is not allowed is refused.

All checks but the last read only the head of a request, so a refusal reads no body. Does not depend on the
application.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import ConfigError
from quire.server.http.auth import ANONYMOUS, Identity, KeyRing
from quire.server.http.errors import AdminOnly, BodyTooLarge, ForeignOrigin, Unauthorized, UnsupportedMediaType
from quire.server.http.request_context import RequestContext, context_of, route_path

Admit = Callable[[Scope], None]  # the application's admission control: returns, or raises a `QuireError`

PUBLIC = frozenset({"/health", "/ready"})

_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\[\]:-]+")
_PORT = re.compile(r":\d*\Z")
_JSON = re.compile(rb"\s*application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_KEY_HEADERS = {b"authorization", b"x-api-key"}


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """What the operator allows."""

    max_body_bytes: int = 16 << 20
    allowed_origins: tuple[str, ...] = ()
    admin_routes: tuple[str, ...] = ()  # patterns; every path below /admin/ needs the admin key in any case
    own_host: str = "localhost"  # where the server listens

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r:.100} is not an origin; write for example https://example.org:8443, or * for all.",
                    param="allowed_origins",
                )


class AccessCheck:
    """ASGI: authentication first, then origin, content type, body limit and admission control."""

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
        context = context_of(scope)
        if not context.passed:
            self.check(scope, context)
        await self._app(scope, self._limited(receive), send)

    def check(self, scope: Scope, context: RequestContext) -> None:
        """Raise the reason for a refusal, if there is one. Called once: it removes the key from the headers."""
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several, the first counts
        context.identity = self._authenticate(scope, headers, context)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]
        if scope["method"] not in ("GET", "HEAD"):
            self._check_origin_and_host(headers)
        self._check_body(scope["method"], headers)
        if self._admit is not None:
            self._admit(scope)
        context.passed = True

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes], context: RequestContext) -> Identity:
        path = route_path(scope)
        identity = next((found for key in _given_keys(headers) if (found := self._keys.find(key))), None)
        if path in PUBLIC and scope["method"] in ("GET", "HEAD"):
            return identity or context.identity
        if path == "/admin" or path.startswith("/admin/") or any(regex.match(path) for regex in self._admin):
            return self._check_admin(identity)
        if identity is not None:
            return identity
        if self._keys.open:
            return ANONYMOUS
        raise Unauthorized("No valid API key was given; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.")

    def _check_admin(self, identity: Identity | None) -> Identity:
        if not self._keys.has_admin and (identity is not None or self._keys.open):
            raise AdminOnly("This route needs the admin key, and this server has none: start it with --admin-key-file.")
        if identity is None:
            raise Unauthorized("This route needs the admin key; send it as 'Authorization: Bearer KEY'.")
        if not identity.admin:
            raise AdminOnly("This route needs the admin key, and another key was given.")
        return identity

    def _check_origin_and_host(self, headers: dict[bytes, bytes]) -> None:
        """CSRF and DNS rebinding protection of a server without keys: only its own pages may use the model.

        CSRF: the origin must be the Host. DNS rebinding: a foreign name can resolve to this server's address, and then
        origin and Host agree; so the Host must be an IP address or a name that is known to be this server's.
        """
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
                f"This server has no keys, and {host:.100} is not known to be its own name (DNS rebinding). Use its IP "
                f"address, or start it with --allowed-origins {origin:.100} or with keys."
            )

    def _is_own(self, name: str) -> bool:
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
                f"The body is compressed ({coding[:40].decode('latin-1')}), and compressed bodies are not read: send "
                f"it without the header 'Content-Encoding'."
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._limit:
            raise BodyTooLarge(self._limit)

    def _limited(self, receive: Receive) -> Receive:
        """The body limit for bodies without a length."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            if num_bytes > self._limit:
                raise BodyTooLarge(self._limit)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise BodyTooLarge(self._limit)
            return message

        return limited


def _host(origin: str) -> str:
    return origin.partition("://")[2]


def _name(host: str) -> str:
    """The host without its port, an IPv6 address without its brackets."""
    return _PORT.sub("", host).removeprefix("[").removesuffix("]").lower()


def _given_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    given = [headers[b"x-api-key"]] if b"x-api-key" in headers else []
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return [*given, key.strip()] if scheme.lower() == b"bearer" else given
