"""Admission control before a body is read: bounded queue, concurrency limit per key, and when to retry.

A refusal reads two counters. The advised wait follows from the rate at which requests have been finishing. An admitted
request counts until its last byte is sent. Priority and timeout headers are read here.
"""

import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Receive, Scope, Send

from quire.core.errors import Draining, InvalidParameter, QueueFull, QuireError
from quire.server.async_engine import AsyncEngine, EngineRestarting
from quire.server.engine_supervisor import Health
from quire.server.http.request_context import CURRENT_CONTEXT, context_of

LONGEST_ADVICE_S = 60.0
_USUAL_ADVICE_S = 1.0  # before a rate is known


class ShareExhausted(QuireError):
    """A key has as many open requests as it may have."""

    status = 429
    code = "share_exhausted"

    def __init__(self, num_open: int, limit: int) -> None:
        super().__init__(f"This key has {num_open} requests open, the limit is {limit}. Try again later.")


class ServerPaused(QuireError):
    """The operator has paused admission."""

    status = 503
    code = "paused"


class AdmissionControl:
    """Counts open requests, in total and by key."""

    def __init__(
        self, engine: AsyncEngine, health: Callable[[], Health], *, max_waiting: int, max_waiting_tokens: int
    ) -> None:
        self._engine = engine
        self._health = health
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._open: Counter[str] = Counter()
        self.num_open = 0
        self.paused = False  # by the operator

    def admit(self, name: str, most: int | None) -> None:
        """Admit a request, or raise a `QuireError` with the time after which to retry."""
        self._check(name, most)
        self._open[name] += 1
        self.num_open += 1

    def _check(self, name: str, most: int | None) -> None:
        self._check_engine()
        info, stats = self._engine.info, self._engine.stats
        assert info is not None
        num_waiting = self.num_open - info.max_num_seqs
        if num_waiting >= self._max_waiting:
            raise self._advised(
                QueueFull(num_waiting, self._max_waiting, "requests"), num_waiting - self._max_waiting + 1
            )
        if stats is not None and stats.num_waiting_tokens >= self._max_waiting_tokens:
            raise self._advised(QueueFull(stats.num_waiting_tokens, self._max_waiting_tokens, "prompt tokens"), 1)
        if most is not None and self._open[name] >= most:
            raise self._advised(ShareExhausted(self._open[name], most), 1)

    def release(self, name: str) -> None:
        assert self._open[name] > 0, name
        self.num_open -= 1
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]

    def _check_engine(self) -> None:
        if self._engine.draining:
            raise self._advised(Draining(), self.num_open)
        if self.paused:
            raise self._advised(ServerPaused("The operator has paused this server; try again later."), 1)
        if not self._engine.attached:
            raise EngineRestarting("The engine is being started; try again in a moment.")
        if self._health() is Health.STALLED:
            raise EngineRestarting("The engine has not reported for some seconds; try again in a moment.")

    def _advised(self, error: QuireError, num_before: int) -> QuireError:
        """Add the advised wait. Little's law: requests that must finish first / requests that finish per second."""
        rate = self._engine.finished_per_s()
        wait_s = _USUAL_ADVICE_S if rate is None else num_before / rate
        error.retry_after_s = float(min(max(math.ceil(wait_s), 1), LONGEST_ADVICE_S))
        return error


_PRIORITY = b"x-quire-priority"
_TIMEOUT = b"x-quire-timeout-s"
_WHOLE = re.compile(rb"[+-]?\d{1,18}")


class AdmittedEndpoint:
    """ASGI: the handler of a request that `Application.admit` has admitted; releases it at the end."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]], admission: AdmissionControl) -> None:
        self._app = request_response(endpoint)
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            context.priority = _whole_number(scope, _PRIORITY)
            context.timeout_s = _number(scope, _TIMEOUT)
            token = CURRENT_CONTEXT.set(context)
            try:
                await self._app(scope, receive, send)
            finally:
                CURRENT_CONTEXT.reset(token)
        finally:
            self._admission.release(context.identity.name)


def _whole_number(scope: Scope, header: bytes) -> int | None:
    value = _value(scope, header)
    if value is None:
        return None
    if not _WHOLE.fullmatch(value):
        raise _invalid_header(header, "a whole number", value)
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
        raise _invalid_header(header, "a number", value)
    return number


def _value(scope: Scope, header: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == header), None)


def _invalid_header(header: bytes, kind: str, value: bytes) -> InvalidParameter:
    name, given = header.decode(), value[:40].decode("latin-1")
    return InvalidParameter(f"The header {name} must be {kind}, not {given!r}.", param=name)
