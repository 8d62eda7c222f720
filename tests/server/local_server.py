"""`quire serve` with a script, in threads of this process: real options, HTTP and engine, without the time of a start.

For tests to which the processes do not matter: a process takes seconds to import what this one has imported already.
"""

import asyncio
import functools
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn
from starlette.types import ASGIApp

from quire.cli import batch as batching
from quire.cli import serve as serving
from quire.cli.access_settings import AccessSettings
from quire.cli.config_file import read_tables
from quire.cli.main import serve as command
from quire.cli.options import engine_config
from quire.cli.serve_models import router_config
from quire.config import EngineConfig
from quire.core.errors import QuireError
from quire.engine import engine_main, grammar_masks, scripted_engine
from quire.engine import open_model as opening
from quire.engine.build_scheduler import load_vocabulary
from quire.engine.engine_process import EngineProcess, FrameConnection
from quire.engine.engine_server import EngineServer
from quire.engine.messages import LoadProgress, Refused
from quire.engine.open_model import OpenedModel
from quire.engine.open_model import open_model as open_anew
from quire.engine.startup import StartupReporter
from quire.engine.stats import EngineInfo
from quire.engine.wire import ToFront, pack
from quire.grammar.vocabulary import GrammarVocabulary
from quire.server import engine_supervisor
from quire.server import server as lifecycle
from quire.server.context import ServedModel
from quire.server.grammar_precompiler import CompileWorker
from quire.server.model_router import ModelRouter, RouterObservers
from quire.server.router_app import RoutedServer
from quire.server.server import DrainingServer, Server, ServerObservers, Tracer
from tests.server.server_process import PATIENCE_S


class _EngineThread(threading.Thread):
    """The engine of `engine_main`, with the methods of the process that it usually is."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(name="engine", daemon=True)
        self.pid = 0
        self._connection = connection
        self.start()

    def run(self) -> None:
        with self._connection as connection, suppress(ConnectionError):  # closed by `kill`
            start = engine_main._read_start(connection)
            if start is None:
                return
            watch = StartupReporter(
                loading=lambda done, total: connection.sendall(pack(LoadProgress(done, total))),
                finished=lambda phase: connection.sendall(pack(phase)),
            )
            try:
                engine, facts = engine_main._build(start, watch)
            except QuireError as error:
                connection.sendall(pack(Refused(None, error)))
                return
            if engine.grammars is not None:
                load_vocabulary(engine.grammars)
            connection.sendall(pack(facts))
            EngineServer(engine, connection, time.monotonic).run()

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)

    def kill(self) -> None:
        """The engine can neither send nor read from now on, and ends. Not at once, as a process does."""
        with suppress(OSError):  # ended already
            self._connection.shutdown(socket.SHUT_RDWR)

    def poll(self) -> int | None:
        return None if self.is_alive() else 0


class LocalEngine(EngineProcess):
    """An engine in a thread: the same frames over the same socket."""

    def __init__(self, receive: Callable[[ToFront], None], end: Callable[[], None]) -> None:
        self._end = end
        self._socket, theirs = socket.socketpair()
        self._process = _EngineThread(theirs)  # type: ignore[assignment]
        self._frames = FrameConnection(receive, self.kill)
        self._reader = threading.Thread(target=self._read, name="from-engine", daemon=True)


@functools.cache
def _opened(model: str | None) -> OpenedModel:
    return open_anew(EngineConfig(model=model))


def _open_model(config: EngineConfig, *_: object, **__: object) -> OpenedModel:
    return _opened(config.model)


_vocabulary = functools.cache(GrammarVocabulary)  # of one tokenizer, which `_opened` keeps


class SharedCompileWorker(CompileWorker):
    """Outlives the server that started it."""

    def close(self) -> None:
        pass


_compile_worker = functools.cache(SharedCompileWorker)


@contextmanager
def local_engines() -> Iterator[None]:
    """Engines that are started inside are threads; what they read of a model is read once."""
    with (
        patch.object(engine_supervisor, "EngineProcess", LocalEngine),
        patch.object(lifecycle, "freeze_heap", lambda: None),  # this process lives on
        patch.object(scripted_engine, "open_model", _open_model),
        patch.object(opening, "open_model", _open_model),
        patch.object(batching, "open_model", _open_model),
        patch.object(grammar_masks, "GrammarVocabulary", _vocabulary),
        patch.object(lifecycle, "CompileWorker", _compile_worker),
    ):
        yield


class LocalServer:
    """A server that is ready."""

    def __init__(self, *arguments: str, tracer: Tracer | None = None) -> None:
        context = command.make_context("serve", [*arguments])
        given, tables = dict(context.params), read_tables(context)
        model, host, _ = given.pop("model"), given.pop("host"), given.pop("port")
        self._access = AccessSettings(host, given)
        self._drain_s = given["drain_s"]
        self._tracer = tracer
        self.changes: list[tuple[str, str]] = []  # of several models, as the server reports them
        self._ready = threading.Event()
        self._listening = socket.create_server((host, 0), backlog=2048)
        self._failures: list[BaseException] = []
        self.port = int(self._listening.getsockname()[1])
        self.url = f"http://{host}:{self.port}"
        self.chat_support = ""  # as the start reports it
        self._make: Callable[[], Server | RoutedServer]
        self.server: Server | RoutedServer
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        with local_engines():
            if tables:
                routed = router_config(tables, given, self._access.weights)
                self._make = lambda: RoutedServer(ModelRouter(routed, self._router_observers(), time.monotonic))
            else:
                engine = replace(engine_config(model, given), tenant_weights=self._access.weights)
                config = serving.server_config_of(engine, given)
                self._make = lambda: Server(config, self._observers())
            self._thread.start()
            assert self._ready.wait(PATIENCE_S)
        if self._failures:
            raise self._failures[0]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": PATIENCE_S, **options})

    def send_signal(self, number: int) -> None:
        """What uvicorn does when a signal has come."""
        self._http.handle_exit(number, None)

    def wait(self) -> None:
        """Until it has stopped, and its engine."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        if self._thread.is_alive():
            self.send_signal(signal.SIGINT)
        self.wait()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        """As `serve_until_signal` does it."""
        server = self.server = self._make()
        app: ASGIApp = self._access.secure(server.app, server.metrics)
        servers = [server] if isinstance(server, Server) else [slot.server for slot in server.router.slots]
        self._access.serve_files([each.state for each in servers], app)
        if self._tracer is not None:
            app = self._tracer.around(app, server)
        settings = uvicorn.Config(lifespan="off", timeout_graceful_shutdown=3, **self._access.uvicorn_settings(app))
        self._http = DrainingServer(settings, server.engine, self._drain_s, server.end_watching)
        running = asyncio.create_task(server.run_engine())
        running.add_done_callback(lambda _: setattr(self._http, "should_exit", True))
        try:
            await self._http.serve(sockets=[self._listening])
        finally:
            running.cancel()
            await server.stop()

    def _observers(self) -> ServerObservers:
        return ServerObservers(lambda phase: None, self._note_ready, lambda line: None, self._tracer)

    def _router_observers(self) -> RouterObservers:
        def changed(name: str, what: str) -> None:
            self.changes.append((name, what))

        return RouterObservers(lambda name, phase: None, changed, lambda line: None, self._ready.set, self._tracer)

    def _note_ready(self, served: ServedModel, info: EngineInfo) -> None:
        self.chat_support = serving.chat_support(served)
        self._ready.set()


@contextmanager
def local_server(
    folder: Path, lines: Sequence[Mapping[str, object]], *arguments: str, tracer: Tracer | None = None
) -> Iterator[LocalServer]:
    """A server of a script, with options of `quire serve`."""
    script = folder / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    server = LocalServer("--script", str(script), *arguments, tracer=tracer)
    try:
        yield server
    finally:
        server.stop()
