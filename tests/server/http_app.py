"""A tiny application behind the real middleware and protocol, on a real socket, in a thread of this process."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.core.errors import InvalidPrompt, QueueFull
from quire.server.http.access import AccessOptions, AdmissionCheck
from quire.server.http.auth import ADMIN, Identity, KeyRing
from quire.server.http.errors import HANDLERS
from quire.server.http.middleware import secure
from quire.server.http.protocol import ConnectionLimits, GuardedProtocol, guarded
from quire.server.http.request_context import RequestRecord, context_of

KEY = "sk-right-key-0123456789"
ADMIN_KEY = "sk-admin-key-987654321"
AUTH_LINE = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
KEYED = KeyRing([(KEY, Identity("holder", weight=2.0)), (ADMIN_KEY, ADMIN)])
BEARER = {"authorization": f"Bearer {KEY}"}
ADMIN_ROUTES = ("/requests/{id}/explain",)
DEADLINE_S = 20
LARGE_BYTES = 8 << 20  # more than the kernel takes from a client that does not read
SECRET = "a prompt that no log may hold"


class Application:
    """Endpoints that echo, count, stream and fail; counts the bytes that were read."""

    def __init__(self) -> None:
        self.num_read = 0
        self.left = threading.Event()
        self.starlette = Starlette(
            routes=[
                Route("/", self.empty),
                Route("/health", self.empty),
                Route("/ready", self.empty),
                Route("/metrics", self.empty),
                Route("/v1/echo", self.echo, methods=["POST"]),
                Route("/v1/messages", self.refuse, methods=["POST"]),
                Route("/v1/messages/echo", self.echo, methods=["POST"]),
                Route("/v1/models/{name:path}", self.empty),
                Route("/v1/full", self.full),
                Route("/v1/broken", self.broken),
                Route("/v1/broken_stream", self.broken_stream),
                Route("/v1/endless", self.endless),
                Route("/v1/pieces", self.pieces),
                Route("/v1/large", self.large),
                Route("/v1/flood", self.flood),
                Route("/requests/{id}/explain", self.empty),
                Route("/admin/pause", self.empty, methods=["GET", "POST"]),
            ],
            exception_handlers=HANDLERS,
        )

    async def empty(self, request: Request) -> Response:
        return JSONResponse({"holder": context_of(request.scope).identity.name})

    async def echo(self, request: Request) -> Response:
        body = bytearray()
        self.num_read = 0
        async for piece in request.stream():
            body += piece
            self.num_read += len(piece)
        context = context_of(request.scope)
        context.num_prompt_tokens, context.num_completion_tokens = len(body), 1
        return JSONResponse({"length": len(body), "headers": [name.decode() for name, _ in request.headers.raw]})

    async def refuse(self, request: Request) -> Response:
        raise InvalidPrompt("A bad prompt from /home/somebody/file.py at 0x7f00deadbeef: " + "\x00" * 5000)

    async def full(self, request: Request) -> Response:
        raise QueueFull(3, 2, "requests")

    async def broken(self, request: Request) -> Response:
        raise KeyError(SECRET)

    async def broken_stream(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first"
            raise KeyError(SECRET)

        return StreamingResponse(pieces())

    async def pieces(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            for piece in (b"one ", b"two ", b"three"):
                yield piece

        return StreamingResponse(pieces())

    async def large(self, request: Request) -> Response:
        return Response(b"x" * LARGE_BYTES)

    async def flood(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 8192
                    await asyncio.sleep(0)  # to notice a disconnect
            finally:
                self.left.set()

        return StreamingResponse(pieces())

    async def endless(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.01)
            finally:
                self.left.set()

        return StreamingResponse(pieces())


class Timers:
    """Timers of connections that fire only when the test fires them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, asyncio.Handle]] = []

    def protocol(self, base: type[GuardedProtocol]) -> type[GuardedProtocol]:
        timers = self

        class Timed(base):  # type: ignore[misc, valid-type]
            def call_later(self, delay_s: float, then: Callable[[], None]) -> asyncio.Handle:
                handle = asyncio.Handle(then, (), self.loop)
                timers.waiting.append((delay_s, handle))
                return handle

        return Timed

    def running(self, delay_s: float) -> list[asyncio.Handle]:
        return [handle for each_s, handle in self.waiting if each_s == delay_s and not handle.cancelled()]


class RunningServer(NamedTuple):
    port: int
    application: Application
    records: list[RequestRecord]
    cut: list[str]  # reasons of slow readers
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=DEADLINE_S)

    def send(self, *pieces: bytes) -> bytes:
        """The response to these bytes, until the server closes."""
        with self.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
            return received_until_closed(connection)

    def in_loop(self, work: Callable[[], object]) -> None:
        """Run something in the server's thread after the input that has arrived."""
        done = threading.Event()

        def then() -> None:
            work()
            done.set()

        self.loop.call_soon_threadsafe(then)
        assert done.wait(DEADLINE_S)

    def control(self) -> None:
        """A valid request still works."""
        response = self.send(
            b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 7\r\n"
            b"Authorization: Bearer %b\r\n\r\n" % KEY.encode(),
            b'{"a":1}',
        )
        assert response.startswith(b"HTTP/1.1 200 OK") and b'"length":7' in response, response


def received_until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def first_response(connection: socket.socket) -> bytes:
    """The next response with a Content-Length, and nothing after it."""
    received, num_more = b"", 1
    while num_more:
        piece = connection.recv(num_more)
        assert piece, f"the connection was closed after {received!r}"
        received += piece
        match = re.search(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n", received)
        num_more = match.end() + int(match[1]) - len(received) if match else 1
    return received


def status_of(response: bytes) -> int:
    """The status of a whole raw response, which must be HTTP/1.1 with a JSON body and an id."""
    head, _, body = response.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0].startswith(b"http/1.1 "), response[:200]
    assert any(line.startswith(b"x-request-id: ") for line in lines), head
    assert set(json.loads(body)) == {"error"}
    return int(lines[0].split()[1])


@contextmanager
def running_server(
    *,
    keys: KeyRing = KEYED,
    options: AccessOptions | None = None,
    limits: ConnectionLimits | None = None,
    timers: Timers | None = None,
    admission: AdmissionCheck | None = None,
    **settings: object,
) -> Iterator[RunningServer]:
    application, records = Application(), list[RequestRecord]()
    options = options or AccessOptions(admin_routes=ADMIN_ROUTES)
    app = secure(application.starlette, keys=keys, options=options, observers=[records.append], admission=admission)
    limits = replace(limits or ConnectionLimits(), body_bytes=options.max_body_bytes)
    cut = list[str]()
    protocol = guarded(limits, records.append, app, replies_early=not options.allowed_origins, slow_reader=cut.append)
    config = uvicorn.Config(
        app,
        http=timers.protocol(protocol) if timers else protocol,
        ws="none",
        log_config=None,
        log_level="critical",
        lifespan="off",
        timeout_graceful_shutdown=1,
        **settings,  # type: ignore[arg-type]
    )
    server = uvicorn.Server(config)
    loop: list[asyncio.AbstractEventLoop] = []
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    started = threading.Event()

    async def serve() -> None:
        loop.append(asyncio.get_running_loop())
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listening])
        started.set()
        await server.main_loop()
        await server.shutdown(sockets=[listening])

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(DEADLINE_S)
    try:
        yield RunningServer(listening.getsockname()[1], application, records, cut, server, loop[0])
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
