"""Errors as clients of text-generation-inference read them: a flat body, and statuses of its own."""

from quire.core.errors import QuireError

TGI_PATHS = frozenset({"/generate", "/generate_stream", "/"})

_STATUSES = {400: 422, 500: 424}
_TYPES = {422: "validation", 424: "generation", 429: "overloaded", 503: "unhealthy"}


def tgi_error(error: QuireError, message: str) -> tuple[int, dict[str, object]]:
    """The status, and the body."""
    status = _STATUSES.get(error.status, error.status)
    return status, {"error": message, "error_type": _TYPES.get(status, error.code)}
