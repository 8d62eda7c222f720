"""One request as the gate sees it: its ids, its holder, what came of it, and how many tokens that took.

Names for paths, from a closed set: the patterns an application serves, and one word for all the rest.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from starlette.routing import BaseRoute, Mount, Route, compile_path
from starlette.types import Scope

from quire.server.http.auth import NOBODY, Identity

_STATE_KEY = "quire.visit"

CURRENT: ContextVar["RequestContext | None"] = ContextVar("visit", default=None)  # whose request a task works on


@dataclass(slots=True)
class RequestContext:
    """Lives as long as the request. The client's own label is only ever repeated to it, never looked up."""

    request_id: str
    began_s: float  # when its head was here
    label: str | None = None
    passed: bool = False  # the door has nothing against it
    identity: Identity = NOBODY
    num_prompt_tokens: int | None = None  # None as long as the engine was not asked
    num_completion_tokens: int | None = None
    priority: int | None = None  # what its headers say
    timeout_s: float | None = None
    status: int | None = None  # once the response has begun
    complete: bool = False
    cut_off: bool = False  # its connection has answered in the place of the application
    failed: bool = False  # ended by a mistake of ours, however it began
    error_code: str | None = None  # of the error that was its answer

    def note_prompt(self, num_tokens: int) -> None:
        """The engine is asked to go on with so many; with those of other prompts, if it came with several."""
        self.num_prompt_tokens = (self.num_prompt_tokens or 0) + num_tokens

    def note_completion(self, num_tokens: int) -> None:
        self.num_completion_tokens = (self.num_completion_tokens or 0) + num_tokens


class RequestRecord(NamedTuple):
    """A request is over. Route, method and status come from closed sets, so that a metric may be labelled by them."""

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
        """Whether an error answered it before the engine was asked."""
        return self.error_code is not None and self.num_prompt_tokens is None


def begin_visit(scope: Scope, visit: RequestContext) -> None:
    scope.setdefault("state", {})[_STATE_KEY] = visit


def has_visit(scope: Scope) -> bool:
    return _STATE_KEY in scope.get("state", ())


def visit_of(scope: Scope) -> RequestContext:
    visit = scope["state"][_STATE_KEY]
    assert isinstance(visit, RequestContext)
    return visit


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
    """Every pattern of some routes, those of mounted applications included."""
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
