"""One HTTP request: ids, identity, outcome, token counts. Its context while it is open, its record when it ends.

Also the names of routes, from a closed set: the patterns that an application serves, and `OTHER` for the rest.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from starlette.routing import BaseRoute, Mount, Route, compile_path
from starlette.types import Scope

from quire.server.http.auth import UNAUTHENTICATED, Identity

ID_BYTES = 8
_DRAWN_AT_ONCE = 256
_STATE_KEY = "quire.request"

CURRENT_CONTEXT: ContextVar["RequestContext | None"] = ContextVar("request_context", default=None)  # of a task


class AdmittedPlace(Protocol):
    """What admission control counts for one request."""

    def add_prompt(self, num_tokens: int) -> None: ...

    def start_prompt(self, num_tokens: int) -> None: ...

    def end_prompt(self) -> None: ...

    def release(self) -> None: ...


@dataclass(slots=True)
class RequestContext:
    """Exists as long as the request. The client's own label (`x-request-id`) is only sent back, never looked up."""

    request_id: str
    began_s: float  # when the head was complete
    label: str | None = None
    passed: bool = False  # the access checks, which need only its head
    admitted: bool = False  # when it is complete
    streams_body: bool = False  # the application reads its body as it arrives: an upload
    refusal: Exception | None = None  # of the checks; the application replies with it
    place: AdmittedPlace | None = None  # of a request that generates
    identity: Identity = UNAUTHENTICATED
    num_body_bytes: int = 0  # with what is stored of the conversation that it continues
    client: str = ""  # what it counts for where clients take turns: its key, or without keys its network
    num_prompt_tokens: int | None = None  # None before a prompt is submitted to the engine
    num_completion_tokens: int | None = None
    priority: int | None = None  # from its headers
    timeout_s: float | None = None
    waited_s: float = 0.0  # for its model to be loaded: part of the timeout
    warning: str | None = None  # for a header of the response
    status: int | None = None  # once the response has begun
    complete: bool = False
    failed: bool = False  # by an internal error, whatever status was sent before it
    logged: bool = False  # its failure, with the stack
    error_code: str | None = None  # of the error that was its response

    def note_prompt(self, num_tokens: int) -> None:
        """A prompt is submitted. A request may have several; their tokens add up."""
        self.num_prompt_tokens = (self.num_prompt_tokens or 0) + num_tokens

    def note_completion(self, num_tokens: int) -> None:
        self.num_completion_tokens = (self.num_completion_tokens or 0) + num_tokens


class RequestRecord(NamedTuple):
    """A request that has ended. Route, method and status come from closed sets: they may label a metric."""

    route: str
    method: str
    status: int
    duration_s: float
    identity_name: str
    request_id: str
    label: str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    error_code: str | None = None

    @property
    def refused_early(self) -> bool:
        """Whether its response was an error from before the engine."""
        return self.error_code is not None and self.num_prompt_tokens is None


def set_context(scope: Scope, context: RequestContext) -> None:
    scope.setdefault("state", {})[_STATE_KEY] = context


def has_context(scope: Scope) -> bool:
    return _STATE_KEY in scope.get("state", ())


def context_of(scope: Scope) -> RequestContext:
    context = scope["state"][_STATE_KEY]
    assert isinstance(context, RequestContext)
    return context


class RandomIds:
    """Unguessable ids from the system's random source, 256 per call: each call releases the interpreter lock, which
    other threads then hold for milliseconds. Safe from several threads."""

    __slots__ = ("_unused",)

    def __init__(self) -> None:
        self._unused: list[str] = []

    def draw(self) -> str:
        """A new one, in hexadecimal."""
        while True:
            try:
                return self._unused.pop()
            except IndexError:
                drawn = os.urandom(ID_BYTES * _DRAWN_AT_ONCE).hex()
                self._unused += [drawn[start : start + 2 * ID_BYTES] for start in range(0, len(drawn), 2 * ID_BYTES)]


new_request_id = RandomIds().draw  # the server's own id of a request: short enough to read out

OTHER = "other"


class RouteNames:
    """Finds the pattern that a path follows."""

    __slots__ = ("_patterns", "_plain")

    def __init__(self, patterns: Iterable[str]) -> None:
        named = [(pattern, compile_path(pattern)) for pattern in patterns]
        self._plain = frozenset(pattern for pattern, (_, _, params) in named if not params)
        self._patterns = tuple((pattern, regex) for pattern, (regex, _, params) in named if params)

    def name(self, path: str) -> str:
        if path in self._plain:
            return path
        return next((pattern for pattern, regex in self._patterns if regex.match(path)), OTHER)


def patterns(routes: Sequence[BaseRoute], above: str = "") -> Iterator[str]:
    """Every pattern of some routes, with those of mounted applications."""
    for route in routes:
        if isinstance(route, Mount):
            yield from patterns(route.routes, above + route.path)
            yield above + route.path + "/{path:path}"
        elif isinstance(route, Route):
            yield above + route.path


def route_path(scope: Scope) -> str:
    """The path below the root path, as the router sees it. Never rebuilt from the Host header."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if path == root or path.startswith(root + "/"):
        return path[len(root) :]
    return path
