"""Access checks: authentication, CSRF and DNS rebinding protection, body limit. What is not allowed is refused.

They read only the head of a request, so a refusal reads no body. The body limit of bodies without a length is the
protocol's. Does not depend on the application.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Protocol

from starlette.applications import Starlette
from starlette.routing import Match, Router, compile_path
from starlette.types import Receive, Scope, Send

from quire.core.errors import ConfigError
from quire.server.http.auth import ANONYMOUS, Identity, KeyRing, is_loopback
from quire.server.http.errors import AdminOnly, BodyTooLarge, ForeignOrigin, Unauthorized, UnsupportedMediaType
from quire.server.http.request_context import RequestContext, context_of, route_path


class AdmissionCheck(Protocol):
    """The admission control of an application. Both return, or raise a `QuireError`."""

    def check(self, scope: Scope) -> None:
        """By the head of a request: whether it would be admitted now."""

    def admit(self, scope: Scope) -> None:
        """When its body is complete."""


PUBLIC = frozenset({"/health", "/ready"})

_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\[\]:-]+")
_PORT = re.compile(r":\d*\Z")
_LABELS = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")  # in lower case; what is no name ends in no private one
_JSON = re.compile(rb"\s*application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_BROWSER_HEADERS = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode"}
_KEY_HEADERS = {b"authorization", b"x-api-key"}

# Endings that no registry of public names delegates: no stranger can let such a name resolve to this server.
# RFC 6761, 6762 (with appendix G), 8375; svc is Kubernetes' own.
_PRIVATE = (".corp", ".home", ".home.arpa", ".internal", ".intranet", ".lan", ".local", ".localdomain", ".localhost",
            ".private", ".svc", ".test")  # fmt: skip


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """What the operator allows."""

    max_body_bytes: int = 16 << 20
    allowed_origins: tuple[str, ...] = ()
    admin_routes: tuple[str, ...] = ()  # patterns; every path below /admin/ needs the admin key in any case
    page_routes: tuple[str, ...] = ()  # exact paths of web pages and their files, read without a key
    own_host: str = "0.0.0.0"  # where the server listens
    upload_routes: tuple[str, ...] = ()  # exact paths that take multipart bodies
    max_upload_bytes: int | None = None  # of these; None: as of others, and in memory

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r:.100} is not an origin; write for example https://example.org:8443, or * for all.",
                    param="allowed_origins",
                )


class AccessCheck:
    """ASGI: authentication first, then origin, content type, body limit and admission control."""

    def __init__(
        self, app: Starlette | Router, keys: KeyRing, options: AccessOptions, admission: AdmissionCheck | None
    ) -> None:
        self._app = app
        self._keys = keys
        self._admission = admission
        self._limit = options.max_body_bytes
        self._origins = frozenset(options.allowed_origins)
        self._own_names = frozenset(
            name.lower()
            for name in (options.own_host, socket.gethostname(), *(_name(_host(origin)) for origin in self._origins))
        )
        self._pages = frozenset(options.page_routes)
        self._uploads = frozenset(options.upload_routes)
        self._upload_limit = options.max_upload_bytes
        # Without any key, on this machine alone: all that is read is the user's own.
        self._is_private = keys.open and not keys.has_admin and is_loopback(options.own_host)
        self._admin = tuple(compile_path(pattern)[0] for pattern in options.admin_routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        if context.refusal is not None:
            raise context.refusal
        if not context.passed:
            self.check(scope, context)
        if not context.admitted:
            self.admit(scope, context)
        try:
            await self._app(scope, receive, send)
        finally:
            if context.place is not None:
                context.place.release()

    def check(self, scope: Scope, context: RequestContext) -> None:
        """Raise the reason for a refusal, if there is one. Called once: it removes the key from the headers."""
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several, the first counts
        context.identity = self._authenticate(scope, headers, context)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]
        if self._keys.open and "*" not in self._origins:
            self._check_origin_and_host(scope, headers)
        is_upload = scope["method"] == "POST" and route_path(scope) in self._uploads
        context.streams_body = is_upload and self._upload_limit is not None
        self._check_body(scope, headers, is_upload=is_upload)
        if self._admission is not None:
            self._admission.check(scope)
        context.passed = True

    def admit(self, scope: Scope, context: RequestContext) -> None:
        """Take a place for a complete request, or raise the reason for a refusal."""
        if self._admission is not None:
            self._admission.admit(scope)
        context.admitted = True

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes], context: RequestContext) -> Identity:
        path = route_path(scope)
        identity = next((found for key in _given_keys(headers) if (found := self._keys.find(key))), None)
        if (path in PUBLIC or path in self._pages) and scope["method"] in ("GET", "HEAD"):
            return identity or context.identity
        if path == "/admin" or path.startswith("/admin/") or any(regex.match(path) for regex in self._admin):
            reads = scope["method"] in ("GET", "HEAD")
            return ANONYMOUS if reads and self._is_private else self._check_admin(identity)
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

    def _check_origin_and_host(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """CSRF and DNS rebinding protection of a server without keys: only its own pages may use the model.

        CSRF: the origin must be the Host, or allowed. DNS rebinding: a foreign name can resolve to this server's
        address; then origin and Host agree, and a GET has no origin at all. So the Host must be a name that no stranger
        can own, whatever the method; only probes may use any.
        """
        reads = scope["method"] in ("GET", "HEAD")
        origin = "" if reads else headers.get(b"origin", b"").decode("latin-1")
        host = headers.get(b"host", b"").decode("latin-1")
        if origin in self._origins or (reads and route_path(scope) in PUBLIC):
            return
        if origin and _host(origin) != host:
            raise ForeignOrigin(
                "A web page of another origin may not use this server; allow it with --allowed-origins."
            )
        if host and not self._is_own(_name(host)):
            raise ForeignOrigin(
                f"This server has no keys, and {host:.100} is not known to be its own name (DNS rebinding). Use its IP "
                f"address, or start it with --allowed-origins {origin or 'http://' + host:.100} or with keys."
            )

    def _is_own(self, name: str) -> bool:
        """An IP address, a name given at the start, or one that cannot be a public name."""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            is_name = _LABELS.fullmatch(name) is not None
            return name in self._own_names or (is_name and ("." not in name or name.endswith(_PRIVATE)))
        return True

    def _check_body(self, scope: Scope, headers: dict[bytes, bytes], *, is_upload: bool) -> None:
        kind = headers.get(b"content-type")
        coding = headers.get(b"content-encoding", b"").strip().lower()
        is_other = kind is not None and not _JSON.fullmatch(kind) and not is_upload
        if is_other and self._reads_body(scope) and not _is_curl(scope, headers):
            raise UnsupportedMediaType("The body must be JSON: send the header 'Content-Type: application/json'.")
        if coding not in (b"", b"identity") and self._reads_body(scope):
            raise UnsupportedMediaType(
                f"The body is compressed ({coding[:40].decode('latin-1')}), and compressed bodies are not read: send "
                f"it without the header 'Content-Encoding'."
            )
        length = headers.get(b"content-length", b"0")
        limit = self._limit if not is_upload or self._upload_limit is None else self._upload_limit
        if length.isdigit() and int(length[:20]) > limit:
            raise BodyTooLarge(limit)

    def _reads_body(self, scope: Scope) -> bool:
        """Whether a route is served with a method that has a body: what is not served is 404 or 405, whatever it
        holds."""
        served = (route.matches(scope)[0] is Match.FULL for route in self._app.routes)
        return scope["method"] in ("POST", "PUT", "PATCH") and any(served)


def _is_curl(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Ollama's users send `curl -d`, whose content type is that of a form. A page of another origin can send such a
    body, too, but no browser does so without one of these headers."""
    form = headers.get(b"content-type", b"").strip().lower() == b"application/x-www-form-urlencoded"
    return form and route_path(scope).startswith("/api/") and headers.keys().isdisjoint(_BROWSER_HEADERS)


def _host(origin: str) -> str:
    return origin.partition("://")[2]


def _name(host: str) -> str:
    """The host without its port and the dot of the root, an IPv6 address without its brackets."""
    return _PORT.sub("", host).removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _given_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    given = [headers[b"x-api-key"]] if b"x-api-key" in headers else []
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return [*given, key.strip()] if scheme.lower() == b"bearer" else given
