"""Names for paths, from a closed set: the patterns an application serves, and one word for all the rest."""

from collections.abc import Iterable, Iterator, Sequence

from starlette.routing import BaseRoute, Mount, Route, compile_path
from starlette.types import Scope

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
