"""Admission control: a bounded queue with fair shares, a concurrency limit per key, and when to retry.

A client is a key, or without keys a network address (of IPv6 its /64); a proxy in front is one client, since what it
says of others is not trusted. A request is checked by its head alone, and takes its place when its body is complete: a
body that never comes takes none. It counts until its last byte is sent, and each further prompt in it as one more. A
refusal reads counters. Priority and timeout headers are read here.
"""

import math
import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Receive, Scope, Send

from quire.core.errors import Draining, InvalidParameter, QueueFull, QuireError
from quire.server.async_engine import EngineRestarting
from quire.server.engine_client import EngineClient
from quire.server.engine_supervisor import Health
from quire.server.fair_shares import Client, ClientRates, FairShares, Throughput
from quire.server.http.auth import ANONYMOUS, Identity, client_name
from quire.server.http.request_context import CURRENT_CONTEXT, context_of

LONGEST_ADVICE_S = 60.0
_SHORTEST_ADVICE_S = 0.1  # refused clients that come back sooner cost more than they gain
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


def client_of(identity: Identity, scope: Scope) -> Client:
    """The client that a request counts for."""
    name = client_name(identity, scope.get("client"))
    return Client(name) if identity is ANONYMOUS else Client(name, identity.weight, known=True)


class RequestPlace:
    """The place of one admitted request: one for its first prompt, and one for each that is open beside it."""

    __slots__ = ("_admission", "_client", "_num_held", "_num_prompts")

    def __init__(self, admission: "AdmissionControl", client: Client) -> None:
        self._admission = admission
        self._client = client
        self._num_held = 1
        self._num_prompts = 0  # that are open

    def add_prompt(self, num_tokens: int) -> None:
        """A prompt is submitted and waits; or an error is raised."""
        self._admission.check_tokens(self._client)
        if self._num_prompts == self._num_held:
            self._admission.check_place(self._client)
            self._admission.take(self._client)
            self._num_held += 1
        self._num_prompts += 1
        self._admission.waiting_tokens.take(self._client, num_tokens)

    def start_prompt(self, num_tokens: int) -> None:
        """It no longer waits: it has its first token, or it ends before."""
        self._admission.waiting_tokens.release(self._client, num_tokens)

    def end_prompt(self) -> None:
        self._num_prompts -= 1
        if self._num_held > max(self._num_prompts, 1):
            self._num_held -= 1
            self._admission.release(self._client)

    def release(self) -> None:
        for _ in range(self._num_held):
            self._admission.release(self._client)
        self._num_held = 0


class AdmissionControl:
    """Counts open requests and waiting prompt tokens, in total and by client."""

    def __init__(
        self,
        engine: EngineClient,
        health: Callable[[], Health],
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._health = health
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._places = FairShares()
        self._rate = Throughput()
        self._rates = ClientRates()
        self.waiting_tokens = FairShares()
        self.paused = False  # by the operator

    @property
    def num_open(self) -> int:
        return self._places.total

    def num_held(self, client: Client) -> int:
        """Places of one client."""
        return self._places.held(client)

    def check(self, client: Client, most: int | None) -> None:
        """Raise a `QuireError` with the time after which to retry, if a request would be refused now."""
        self._check_engine()
        self.check_place(client)
        self.check_tokens(client)
        num_open = self._places.held(client)
        if most is not None and num_open >= most:
            wait_s = self._rates.wait_s(client, num_open - most + 1, self._clock())
            raise _advised(ShareExhausted(num_open, most), wait_s)

    def admit(self, client: Client, most: int | None) -> RequestPlace:
        """Take a place, or raise as `check` does."""
        self.check(client, most)
        self.take(client)
        return RequestPlace(self, client)

    def check_place(self, client: Client) -> None:
        info = self._engine.info
        assert info is not None
        limit = info.max_num_seqs + self._max_waiting
        if not self._places.has_room(client, limit):
            num_waiting, num_before = self.num_open - info.max_num_seqs, self.num_open - limit + 1
            raise self._advised(QueueFull(num_waiting, self._max_waiting, "requests"), num_before)

    def check_tokens(self, client: Client) -> None:
        limit = self._max_waiting_tokens
        if not self.waiting_tokens.has_room(client, limit):
            raise self._advised(QueueFull(self.waiting_tokens.total, limit, "prompt tokens"), 1)

    def take(self, client: Client) -> None:
        now_s = self._clock()
        self._places.take(client)
        self._rate.note_taken(now_s)
        self._rates.note_taken(client, now_s)

    def release(self, client: Client) -> None:
        now_s = self._clock()
        self._places.release(client)
        self._rate.note_released(now_s)
        self._rates.note_released(client, now_s, is_last=not self._places.held(client))

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
        return _advised(error, self._rate.wait_s(num_before, self._clock()))


def _advised(error: QuireError, wait_s: float | None) -> QuireError:
    """The error with the advised wait."""
    error.retry_after_s = min(max(_USUAL_ADVICE_S if wait_s is None else wait_s, _SHORTEST_ADVICE_S), LONGEST_ADVICE_S)
    return error


_PRIORITY = b"x-quire-priority"
_TIMEOUT = b"x-quire-timeout-s"
_WHOLE = re.compile(rb"[+-]?\d{1,18}")


class AdmittedEndpoint:
    """ASGI: the handler of a request that `Application.admit` has admitted."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        self._app = request_response(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.client = client_name(context.identity, scope.get("client"))
        context.priority = _whole_number(scope, _PRIORITY)
        context.timeout_s = timeout_header(scope)
        token = CURRENT_CONTEXT.set(context)
        try:
            await self._app(scope, receive, send)
        finally:
            CURRENT_CONTEXT.reset(token)


def timeout_header(scope: Scope) -> float | None:
    """The timeout in the headers of a request."""
    return _number(scope, _TIMEOUT)


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
