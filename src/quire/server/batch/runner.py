"""Many requests answered in one go, through the application that serves HTTP: the same endpoints, the same answers.

As many are under way at once as keep the engine full. An answer is written when it comes: the order is the engine's.

One request to an ASGI application in this process: no socket, no client that could hang up.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from quire.core.errors import EngineFailed
from quire.engine.startup import StartupPhase
from quire.server.app import ENDPOINTS
from quire.server.batch.lines import BadLine, BatchReply, BatchRequest, FinishedLines, answered, read_line, refused
from quire.server.http.auth import KeyRing
from quire.server.http.middleware import secure
from quire.server.server import Server, ServerConfig, ServerObservers, first_error
from quire.server.tgi.generate import generate_stream


async def post(app: ASGIApp, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> BatchReply:
    """What the application answers to a JSON body."""
    unread = [body]
    status, told, pieces = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # nobody hangs up

    async def send(message: Message) -> None:
        nonlocal status, told
        if message["type"] == "http.response.start":
            status, told = message["status"], dict(message["headers"])
        else:
            pieces.append(message.get("body", b""))

    await app(_scope(path, len(body), headers), receive, send)
    wait = told.get(b"retry-after-ms")
    request_id = told.get(b"x-quire-request-id", b"").decode("ascii")
    return BatchReply(status, request_id, b"".join(pieces), None if wait is None else int(wait) / 1000)


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


URLS = tuple(endpoint.path for endpoint in ENDPOINTS if endpoint.generates and endpoint.handler is not generate_stream)
_MOST_QUEUED = 256  # beyond those that the engine runs: it never waits for the next
_BUSY = (429, 503)
_MOST_TRIES = 8
_USUAL_WAIT_S = 1.0


@dataclass(slots=True)
class BatchCounts:
    """How it went, so far."""

    num_answered: int = 0
    num_refused: int = 0  # answered, but with an error
    num_unreadable: int = 0
    num_skipped: int = 0  # answered by an earlier run

    @property
    def num_lines(self) -> int:
        return self.num_answered + self.num_refused + self.num_unreadable + self.num_skipped

    @property
    def clean(self) -> bool:
        return not (self.num_refused or self.num_unreadable)


class BatchRunner:
    """Takes lines, writes lines."""

    def __init__(
        self,
        app: ASGIApp,
        lines: Iterable[bytes],
        past: FinishedLines,
        write: Callable[[bytes], None],
        tell: Callable[[BatchCounts], None],
    ) -> None:
        self._app = app
        self._past = past
        self._write = write
        self._tell = tell
        self.tally = BatchCounts()
        self._lines = enumerate(lines, 1)
        self._reading = asyncio.Lock()
        self._seen: dict[str, int] = {}  # in which line each custom_id came

    async def run(self, at_once: int) -> None:
        """Until every line is answered."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while (asked := await self._next()) is not None:
            reply = await self._reply(asked)
            if reply.status == 200:
                self.tally.num_answered += 1
            else:
                self.tally.num_refused += 1
            self._write(answered(asked, reply))
            self._tell(self.tally)

    async def _reply(self, asked: BatchRequest) -> BatchReply:
        """The answer; where the engine is busy or away for a while, a later one."""
        for _ in range(_MOST_TRIES):
            reply = await post(self._app, asked.url, asked.body)
            if reply.status not in _BUSY:
                break
            await asyncio.sleep(_USUAL_WAIT_S if reply.retry_after_s is None else reply.retry_after_s)
        return reply

    async def _next(self) -> BatchRequest | None:
        """The next request that is still to be answered. What cannot be asked is written down here."""
        async with self._reading:
            while (numbered := await asyncio.to_thread(next, self._lines, None)) is not None:  # a pipe may be slow
                number, text = numbered
                if not text.strip():
                    continue
                try:
                    asked = self._read(number, text)
                except BadLine as bad:
                    self._refuse(number, bad)
                    continue
                if not self._past.answered(asked):
                    return asked
                self.tally.num_skipped += 1
                self._tell(self.tally)
        return None

    def _read(self, number: int, text: bytes) -> BatchRequest:
        asked = read_line(number, text, URLS)
        first = self._seen.setdefault(asked.custom_id, number)
        if first != number:
            raise BadLine(f"Line {number} has the custom_id of line {first}; each needs its own.", asked.custom_id)
        return asked

    def _refuse(self, line: int, bad: BadLine) -> None:
        self.tally.num_unreadable += 1
        self._write(refused(line, bad))
        self._tell(self.tally)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a batch is to do, and who hears of it."""

    lines: Iterable[bytes]
    past: FinishedLines
    write: Callable[[bytes], None]
    phase: Callable[[StartupPhase], None]
    tell: Callable[[BatchCounts], None]
    at_once: int | None = None  # None: what keeps the engine full


def run_batch(plan: ServerConfig, desired: BatchSettings) -> BatchCounts:
    """Start an engine, answer everything, end it. A `QuireError` says why there is no engine (any more)."""

    async def life() -> BatchCounts:
        ready = asyncio.Event()
        listeners = ServerObservers(desired.phase, lambda model, facts: ready.set(), lambda line: None)
        server = Server(plan, listeners)
        app = secure(server.app, keys=KeyRing(), observers=[server.metrics.responded], admit=server.app.admit)
        batch = BatchRunner(app, desired.lines, desired.past, desired.write, desired.tell)

        async def work() -> None:
            await ready.wait()
            facts = server.engine.facts
            assert facts is not None
            await batch.run(desired.at_once or facts.max_num_seqs + min(facts.max_num_seqs, _MOST_QUEUED))

        working, keeping = asyncio.create_task(work()), asyncio.create_task(server.run_engine())
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await first_error(keeping)  # there is no engine: says why
                raise EngineFailed("The engine ended before the batch did.")
            await first_error(working)
        finally:
            working.cancel()
            await server.supervisor.stop()
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # told above, or not to be told
                await keeping
        return batch.tally

    return asyncio.run(life())
