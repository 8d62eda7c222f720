"""Batch runner: answers the lines of a batch file through the ASGI application, in this process, without a socket.

The endpoints, and so the responses, are those of the HTTP server. Enough requests run at once to keep the engine full.
Responses are written as they finish, not in the order of the lines.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from quire.core.errors import EngineFailed
from quire.engine.startup import StartupPhase
from quire.server.app import ENDPOINTS
from quire.server.batch.lines import (
    BatchReply,
    BatchRequest,
    FinishedLines,
    InvalidLine,
    error_line,
    error_message,
    read_line,
    response_line,
)
from quire.server.http.auth import KeyRing
from quire.server.http.errors import is_ollama
from quire.server.http.middleware import secure
from quire.server.server import Server, ServerConfig, ServerObservers, first_error
from quire.server.tgi.generate import generate_stream


async def post(app: ASGIApp, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> BatchReply:
    """POSTs a JSON body to the application."""
    unread = [body]
    status, response_headers, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never disconnects

    async def send(message: Message) -> None:
        nonlocal status, response_headers
        if message["type"] == "http.response.start":
            status, response_headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(_scope(path, len(body), headers), receive, send)
    wait = response_headers.get(b"retry-after-ms")
    request_id = response_headers.get(b"x-quire-request-id", b"").decode("ascii")
    return BatchReply(status, request_id, b"".join(parts), None if wait is None else int(wait) / 1000)


def _scope(path: str, num_bytes: int, headers: Sequence[tuple[bytes, bytes]]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes), *headers],
        "client": None,
        "server": None,
    }


URLS = tuple(  # not those that stream always, or by default
    endpoint.path
    for endpoint in ENDPOINTS
    if endpoint.generates and endpoint.handler is not generate_stream and not is_ollama(endpoint.path)
)
_MAX_QUEUED = 256  # requests beyond the running ones: the engine never waits for the next
_BUSY = (429, 503)
_MAX_TRIES = 8
_LOST = b'"engine_lost"'
_DEFAULT_WAIT_S = 1.0


@dataclass(slots=True)
class BatchCounts:
    """Counts of lines so far."""

    num_answered: int = 0
    num_refused: int = 0  # answered with an error
    num_unreadable: int = 0
    num_skipped: int = 0  # answered by an earlier run
    first_problem: str | None = None  # of a line that was refused or could not be read

    @property
    def num_lines(self) -> int:
        return self.num_answered + self.num_refused + self.num_unreadable + self.num_skipped

    @property
    def clean(self) -> bool:
        return not (self.num_refused or self.num_unreadable)


class BatchRunner:
    """Reads input lines, writes output lines."""

    def __init__(
        self,
        app: ASGIApp,
        lines: Iterable[bytes],
        finished: FinishedLines,
        write: Callable[[bytes, bool], None],  # a line, and whether it has a 200
        report: Callable[[BatchCounts], None],
        max_tries: int = _MAX_TRIES,
    ) -> None:
        self._app = app
        self._max_tries = max_tries
        self._finished = finished
        self._write = write
        self._report = report
        self.counts = BatchCounts()
        self._lines = enumerate(lines, 1)
        self._reading = asyncio.Lock()
        self._seen: dict[str, int] = {}  # custom_id -> line

    async def run(self, concurrency: int) -> None:
        """Returns when every line is answered."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while (request := await self._next()) is not None:
            reply = await self._reply(request)
            if reply.status == 200:
                self.counts.num_answered += 1
            else:
                self.counts.num_refused += 1
                self._note_problem(f"Line {request.line} was refused: {error_message(reply.body)}")
            self._write(response_line(request, reply), reply.status == 200)
            self._report(self.counts)

    async def _reply(self, request: BatchRequest) -> BatchReply:
        """The response. A busy or restarting engine is retried; fewer times if the engine was lost with the request,
        which may be the cause."""
        num_lost = 0
        for _ in range(self._max_tries):
            reply = await post(self._app, request.url, request.body)
            num_lost += _LOST in reply.body
            if reply.status not in _BUSY or num_lost >= _MAX_TRIES:
                break
            await asyncio.sleep(_DEFAULT_WAIT_S if reply.retry_after_s is None else reply.retry_after_s)
        return reply

    async def _next(self) -> BatchRequest | None:
        """The next request without a response. Invalid lines are written as errors here."""
        async with self._reading:
            while (numbered := await asyncio.to_thread(self._next_line)) is not None:  # a pipe may be slow
                number, text = numbered
                try:
                    request = self._read(number, text)
                except InvalidLine as invalid:
                    self.counts.num_unreadable += 1
                    self._note_problem(invalid.message)
                    self._write(error_line(number, invalid), False)
                    self._report(self.counts)
                    continue
                if request not in self._finished:
                    return request
                self.counts.num_skipped += 1
                self._report(self.counts)
        return None

    def _next_line(self) -> tuple[int, bytes] | None:
        """The next line that is not blank, and its number. On a thread: there may be millions of blank ones."""
        return next(((number, text) for number, text in self._lines if text.strip()), None)

    def _note_problem(self, sentence: str) -> None:
        self.counts.first_problem = self.counts.first_problem or sentence

    def _read(self, number: int, text: bytes) -> BatchRequest:
        request = read_line(number, text, URLS)
        first = self._seen.setdefault(request.custom_id, number)
        if first != number:
            raise InvalidLine(
                f"Line {number} has the custom_id of line {first}; each needs its own.", request.custom_id
            )
        return request


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Input, output and callbacks of a batch."""

    lines: Iterable[bytes]
    finished: FinishedLines
    write: Callable[[bytes], None]
    phase: Callable[[StartupPhase], None]
    report: Callable[[BatchCounts], None]
    concurrency: int | None = None  # None: what keeps the engine full


def run_batch(config: ServerConfig, settings: BatchSettings) -> BatchCounts:
    """Starts an engine, answers all lines, stops it. Raises the `QuireError` that ended the engine."""

    async def life() -> BatchCounts:
        ready = asyncio.Event()
        listeners = ServerObservers(settings.phase, lambda model, info: ready.set(), lambda line: None)
        server = Server(config, listeners)
        app = secure(server.app, keys=KeyRing(), observers=[server.metrics.responded], admission=server.app)

        def write(line: bytes, answered: bool) -> None:
            settings.write(line)

        batch = BatchRunner(app, settings.lines, settings.finished, write, settings.report)

        async def work() -> None:
            await ready.wait()
            info = server.engine.info
            assert info is not None
            await batch.run(settings.concurrency or info.max_num_seqs + min(info.max_num_seqs, _MAX_QUEUED))

        working, keeping = asyncio.create_task(work()), asyncio.create_task(server.run_engine())
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await first_error(keeping)  # the reason why the engine failed
                raise EngineFailed("The engine ended before the batch did.")
            await first_error(working)
        finally:
            working.cancel()
            await server.supervisor.stop()
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # already raised, or of no interest
                await keeping
        return batch.counts

    return asyncio.run(life())
