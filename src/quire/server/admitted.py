"""An endpoint behind the turnstile: whoever was let in is counted until its last byte is sent.

What a request's headers say of its class and its patience is read here.
"""

import math
import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Receive, Scope, Send

from quire.core.errors import InvalidParameter
from quire.server.turnstile import Turnstile
from quire.server.visit import CURRENT, visit_of

_PRIORITY = b"x-quire-priority"
_TIMEOUT = b"x-quire-timeout-s"
_WHOLE = re.compile(rb"[+-]?\d{1,18}")


class Admitted:
    """ASGI: answers one whom `Application.admit` let in, and lets it out."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]], turnstile: Turnstile) -> None:
        self._app = request_response(endpoint)
        self._turnstile = turnstile

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        try:
            visit.priority = _whole_number(scope, _PRIORITY)
            visit.timeout_s = _number(scope, _TIMEOUT)
            token = CURRENT.set(visit)
            try:
                await self._app(scope, receive, send)
            finally:
                CURRENT.reset(token)
        finally:
            self._turnstile.leave(visit.identity.name)


def _whole_number(scope: Scope, header: bytes) -> int | None:
    value = _value(scope, header)
    if value is None:
        return None
    if not _WHOLE.fullmatch(value):
        raise _misfit(header, "a whole number", value)
    return int(value)


def _number(scope: Scope, header: bytes) -> float | None:
    value = _value(scope, header)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _misfit(header, "a number", value)
    return number


def _value(scope: Scope, header: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == header), None)


def _misfit(header: bytes, wanted: str, value: bytes) -> InvalidParameter:
    name, said = header.decode(), value[:40].decode("latin-1")
    return InvalidParameter(f"The header {name} must be {wanted}, not {said!r}.", param=name)
