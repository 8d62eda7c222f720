"""Streams of server-sent events or of JSON lines, and JSON responses: keep-alive bytes, errors in streams, disconnects.

The status is sent with the first event or the first keep-alive comment. A failure before that has its own status; after
it, the failure is an event and the stream closes without `[DONE]`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.errors import EngineFailed, QuireError
from quire.server.http.errors import error_body, log_failure
from quire.server.http.request_context import CURRENT_CONTEXT, context_of, has_context

_SHORT_BYTES = 1 << 16  # decoding this much is faster than handing it to a thread
_MEDIUM_BYTES = 1 << 20  # longer bodies wait for each other, and not these for them
_MIN_LOGPROB = -9999.0  # JSON has no infinity

P = ParamSpec("P")
T = TypeVar("T")


class _BodyThreads(NamedTuple):
    """Of one event loop: work on bodies holds the interpreter's lock, so the loop would have its turn after as many
    bodies as there are threads at work."""

    medium: asyncio.Semaphore
    long: asyncio.Semaphore


_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, _BodyThreads] = WeakKeyDictionary()


async def run_inline_if_short(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of work on the body of a request: done inline if the body is short, else on a thread, one medium and
    one long body at a time."""
    num_bytes = len(await request.body())
    if num_bytes <= _SHORT_BYTES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    if (threads := _threads.get(loop)) is None:
        threads = _threads[loop] = _BodyThreads(asyncio.Semaphore(), asyncio.Semaphore())
    async with threads.medium if num_bytes <= _MEDIUM_BYTES else threads.long:
        return await run_in_threadpool(work, *args, **kwargs)


def finite(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(value, _MIN_LOGPROB)


def json_response(body: Mapping[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def client_error(error: Exception) -> QuireError:
    """The error for a client: a `QuireError` as it is, an internal error with a fixed text. A 500 is logged."""
    public = error if isinstance(error, QuireError) else None
    public = public or EngineFailed("The server failed to answer this request; see its log.")
    log_failure(error, public, CURRENT_CONTEXT.get())
    return public


async def until_disconnect(
    request: Request, work: Coroutine[None, None, T], on_close: Callable[[], None] = lambda: None
) -> T:
    """The result of some work, or `ClientDisconnect` if the client disconnects first. Calls `on_close` at the end."""
    result = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        raise ClientDisconnect
    finally:
        result.cancel()
        gone.cancel()
        on_close()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class StreamFormat(NamedTuple):
    """The media type of a stream, and the bytes that keep a silent one alive."""

    media_type: str
    keep_alive: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": self.media_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


EVENTS = StreamFormat("text/event-stream; charset=utf-8", KEEP_ALIVE)
JSON_LINES = StreamFormat("application/x-ndjson", b" ")  # space before a line's object; an empty line is not JSON

Events = AsyncGenerator[bytes, None]


def event(body: Mapping[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: Mapping[str, object]) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(body)


def numbered_event(number: int, data: bytes) -> bytes:
    """An event that a client can go on after: it sends the number back as `Last-Event-ID`."""
    return b"id: %d\ndata: %b\n\n" % (number, data)


def error_event(error: Exception) -> bytes:
    return event(error_body(client_error(error)))


async def stream(
    request: Request,
    events: Events,
    on_close: Callable[[], None],
    keep_alive_s: float = KEEP_ALIVE_S,
    failed: Callable[[Exception], bytes] = error_event,
    stream_format: StreamFormat = EVENTS,
) -> Response:
    """A response of these events; `on_close` is called at its end, however it ends.

    Waits up to `keep_alive_s` for the first event, so that an early error keeps its status.
    """
    first = asyncio.ensure_future(anext(events, b""))  # there may be none
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({first, gone}, timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            first.result()
        elif gone.done():
            raise ClientDisconnect
        return EventStream(first, events, on_close, keep_alive_s, failed, stream_format)
    except BaseException:
        first.cancel()
        on_close()
        raise
    finally:
        gone.cancel()


class EventStream(Response):
    """Sends events as they come. One task sends, one writes keep-alive comments, one waits for a disconnect."""

    def __init__(
        self,
        first: "asyncio.Future[bytes]",
        events: Events,
        on_close: Callable[[], None],
        keep_alive_s: float,
        failed: Callable[[Exception], bytes],
        stream_format: StreamFormat = EVENTS,
    ) -> None:
        super().__init__(headers=stream_format.headers)
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._failed = failed
        self._keep_alive_bytes = stream_format.keep_alive
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Future[None]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if not self._first.done():
                await self._write(send, self._keep_alive_bytes)
            gone = asyncio.ensure_future(disconnected(receive))
            tasks += [gone, *map(asyncio.ensure_future, (self._send_all(scope, send, gone), self._keep_alive(send)))]
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done():
                tasks[1].result()  # an error of the error event itself: it is logged, and the connection closed
        finally:
            self._first.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, self._first, return_exceptions=True)
            self._on_close()
            await self._events.aclose()

    async def _send_all(self, scope: Scope, send: Send, gone: "asyncio.Future[None]") -> None:
        """Until the end, or until the client is gone: encoding the rest would delay other requests."""
        try:
            await self._write(send, await self._first)
            async for chunk in self._events:
                await self._write(send, chunk)
                if gone.done():
                    return
        except Exception as error:
            if has_context(scope):  # the status was sent before; the access log gets the error code
                context_of(scope).error_code = error.code if isinstance(error, QuireError) else EngineFailed.code
            await self._write(send, self._failed(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_s
            if silent_s >= self._keep_alive_s:
                await self._write(send, self._keep_alive_bytes)
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)

    async def _write(self, send: Send, chunk: bytes) -> None:
        self._sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
