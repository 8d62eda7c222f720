"""The server on one event loop: listen, start the engine, serve, drain, stop.

The socket accepts from the first moment: until the engine is ready, with 503 and a Retry-After. The first SIGTERM
drains: new requests are refused, open ones run to their end or to the drain timeout. A second signal, or Ctrl-C, stops.
A status line is written every 10 s while there is work.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from quire.config import DEFAULT_SERVER_ROWS, EngineConfig
from quire.core.errors import QuireError
from quire.core.process import freeze_heap
from quire.engine.kv_events import KvEventsConfig
from quire.engine.open_model import OpenedModel
from quire.engine.prefix_transfer import EngineRole, KvTransport
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.tool_formats import ToolFormat
from quire.server.admission import AdmissionControl
from quire.server.app import Application, make_app
from quire.server.async_engine import AsyncEngine, FinishedRequest
from quire.server.autoscaling import ReplicaLimits
from quire.server.context import ServedModel, ServerState, make_served_model
from quire.server.engine_client import EngineClient, EngineSupervision
from quire.server.engine_supervisor import EngineLauncher, Supervisor
from quire.server.fair_shares import reserve_of
from quire.server.grammar_precompiler import CompileWorker, GrammarPrecompiler
from quire.server.http.errors import Stopping
from quire.server.metrics import Metrics
from quire.server.prefill_decode import PrefillEngines
from quire.server.replicas import ReplicaSupervisor, ReplicatedEngine
from quire.text.template_worker import check_template

EVERY_S = 10.0


class StatusLine:
    """Throughput since the last line, from the difference of counters."""

    def __init__(self, engine: EngineClient, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._before = self._counts()
        self._before_s = clock()

    async def run(self, write: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            line = self.line()
            if line is not None:
                write(line)

    def line(self) -> str | None:
        """The rates since the last line; None if there was no work."""
        now, now_s = self._counts(), self._clock()
        prompt, cached, generated = (new - old for new, old in zip(now, self._before, strict=True))
        seconds = max(now_s - self._before_s, 1e-3)
        self._before, self._before_s = now, now_s
        stats = self._engine.stats
        if stats is None or not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        held = stats.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks
        hits = f" · prefix hit {100 * cached / prompt:.0f} %" if prompt else ""
        return (
            f"gen {generated / seconds:,.1f} tok/s · prompt {prompt / seconds:,.0f} tok/s · run {stats.num_running} · "
            f"wait {stats.num_waiting} · kv {100 * held / max(stats.num_blocks, 1):.0f} %{hits}"
        )

    def _counts(self) -> tuple[float, float, float]:
        gauges = self._metrics.engine
        return gauges.total("prompt_tokens"), gauges.total("cached_tokens"), gauges.total("sampled_tokens")


_CLOSE_S = 2  # for slow clients to read the end of their responses
_CANCELLED_AFTER_S = 3  # for handlers that still run then
_DRAIN_POLL_S = 0.05

_log = logging.getLogger(__name__)

# The event loop accepts one connection per iteration and listening socket: with one socket, a burst of n connections
# waits for n iterations. So the same socket is registered this often.
_ACCEPTED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What to serve, and how."""

    opened: OpenedModel
    config: EngineConfig
    script: str | None = None
    aliases: tuple[str, ...] = ()
    chat_template: str | None = None  # overrides the model's own
    tool_format: ToolFormat | None = None  # overrides the one detected from the template
    reasoning_tags: ReasoningTags | None = None
    max_waiting: int = 1024
    max_waiting_tokens: int = 4_000_000
    serving: bool = True  # False: a batch, where latency does not matter
    replicas: int = 1  # engines of this model
    prefill_engines: int = 0  # further engines, which compute long prompts for these
    kv_transport: KvTransport = KvTransport.MEMORY  # how they get the KV blocks of these prompts
    kv_events: KvEventsConfig | None = None  # publish what the prefix cache stores and removes
    limits: ReplicaLimits | None = None  # as many engines as the queue needs, within these; instead of `replicas`
    launch: EngineLauncher | None = None  # starts an engine: on another machine, or one prepared before
    journal: str | None = None  # where to record the decisions of each engine; each has a file of its own


_FIRST_REQUESTS = 1024  # of keys, admitted beyond the limit and its reserve


def with_burst_queue(config: EngineConfig, max_waiting: int) -> EngineConfig:
    """Raise the engine's own queue bound above what admission control admits: a burst between two steps waits in the
    engine even where rows are free, and must not be refused there."""
    limit = max_waiting + (config.max_num_seqs or DEFAULT_SERVER_ROWS)
    return replace(config, max_waiting=limit + reserve_of(limit) + _FIRST_REQUESTS)


class PromptName(NamedTuple):
    """A prompt of one of the models: each numbers its own."""

    model: str
    number: int


class Tracer(Protocol):
    """Follows requests from end to end: `tracing.py`, if it is installed."""

    def around(self, app: ASGIApp, server: "ServedApplication") -> ASGIApp: ...

    def finished(self, model: str, end: FinishedRequest) -> None: ...


@dataclass(frozen=True, slots=True)
class ServerObservers:
    """Callbacks for the start, the status line and tracing."""

    phase: Callable[[StartupPhase], None]
    ready: Callable[[ServedModel, EngineInfo], None]
    status: Callable[[str], None]
    tracer: Tracer | None = None


class DrainedEngine(Protocol):
    """What is drained: one engine, or those of several models."""

    draining: bool

    @property
    def num_requests(self) -> int: ...

    def fail_all(self, failure: Callable[[], QuireError]) -> None: ...


class DrainingServer(uvicorn.Server):
    """uvicorn with draining on SIGTERM."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: DrainedEngine,
        drain_s: float,
        end_watching: Callable[[], None] = lambda: None,  # ends streams that have no end of their own
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._end_watching = end_watching
        self._loop = asyncio.get_running_loop()
        self._draining: Future[None] | None = None  # kept: a task without a reference may be collected

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and not self._engine.draining:
            self._engine.draining = True
            self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
            return
        self._loop.call_soon_threadsafe(self._end)

    async def _drain(self) -> None:
        _log.info("draining: %d requests are open", self._engine.num_requests)
        self._end_watching()
        deadline_s = time.monotonic() + self._drain_s
        while self._engine.num_requests and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._end()

    def _end(self) -> None:
        """Requests that are still open get a `Stopping` error."""
        self._engine.draining = True
        self._engine.fail_all(Stopping)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_watching()
        closing = self._loop.call_later(_CLOSE_S, self._abort_connections)
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    def _abort_connections(self) -> None:
        """Drop connections that have not read their response: uvicorn would log a stack trace for each."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class Server:
    """The parts of one server, on a running event loop."""

    def __init__(self, config: ServerConfig, observers: ServerObservers) -> None:
        self._config = config
        self._observers = observers
        clock = time.monotonic
        num_replicas = config.replicas if config.limits is None else max(config.limits.max_replicas, 2)
        engines = [AsyncEngine(config.opened.tokenizer, clock, rank, num_replicas) for rank in range(num_replicas)]
        supervisors = [self._supervisor(rank, engine, clock) for rank, engine in enumerate(engines)]
        prefill = [AsyncEngine(config.opened.tokenizer, clock) for _ in range(config.prefill_engines)]
        split = PrefillEngines(prefill, clock) if prefill else None
        self.engine: EngineClient = engines[0]
        self.supervisor: EngineSupervision = supervisors[0]
        replicas: ReplicaSupervisor | None = None
        if num_replicas > 1 or split is not None:
            self.engine = replicated = ReplicatedEngine(engines, split)
            computing = [self._supervisor(1, engine, clock, EngineRole.PREFILL) for engine in prefill]
            self.supervisor = replicas = ReplicaSupervisor(supervisors, replicated, computing, config.limits, clock)
        admission = AdmissionControl(
            self.engine,
            lambda: self.supervisor.health,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            clock=clock,
        )
        self.name = config.aliases[0] if config.aliases else config.opened.name
        self.metrics = Metrics(lambda: self.engine.stats, clock, self.name)
        self.metrics.engine.num_restarts = lambda: self.supervisor.num_restarts
        self.metrics.engine.info = lambda: self.engine.info
        for engine in engines:
            engine.finished = self._note_end
            engine.progressed = self.metrics.progressed
            engine.slow_reader = self.metrics.slow_reader
            engine.moved = self.metrics.note_move
        if split is not None:
            split.ended = self.metrics.note_split
        if replicas is None:  # else the counts of engines that are gone stay in the sums
            engines[0].lost = self.metrics.engine.note_loss
        self.state = ServerState(self.engine, self.supervisor, admission, self.metrics, replicas=replicas)
        self.metrics.stored.set_function(lambda: self.state.responses.num_responses)
        self.metrics.stored_bytes.set_function(lambda: self.state.responses.num_bytes)
        self.app = make_app(self.state)

    def _supervisor(
        self, rank: int, engine: AsyncEngine, clock: Callable[[], float], role: EngineRole = EngineRole.DECODE
    ) -> Supervisor:
        """Of one replica, or of a prefill engine. The phases of the first one's start are reported."""
        config, phase = self._config, self._observers.phase
        events = config.kv_events if role is EngineRole.DECODE else None
        if not config.prefill_engines:
            role = EngineRole.WHOLE
        return Supervisor(
            with_burst_queue(config.config, config.max_waiting),
            config.script,
            engine,
            clock=clock,
            phase=phase if rank == 0 else lambda phase: None,
            serving=config.serving and role is not EngineRole.PREFILL,  # no client waits for its next token there
            kv_events=events.of_replica(rank) if events is not None and config.replicas > 1 else events,
            journal=config.journal,
            role=role,
            transport=config.kv_transport,
            launch=config.launch,
        )

    def _note_end(self, end: FinishedRequest) -> None:
        self.metrics.finished(end)
        if self._observers.tracer is not None:
            self._observers.tracer.finished(self.name, end)

    def prompts_of(self, request_id: str) -> tuple[PromptName, ...]:
        """The prompts that came with a request, if it is one of the latest."""
        return tuple(PromptName(self.name, number) for number in self.engine.numbers_of(request_id))

    def end_watching(self) -> None:
        """End the streams of the engine's state; no further one begins."""
        self.state.engine_state.close()

    async def stop(self) -> None:
        """Stop the engine; `run_engine` must have been cancelled."""
        await self.supervisor.stop()

    async def run_engine(self) -> None:
        """Start the engine and restart it when it dies. Ends only with an error."""
        opened = self._config.opened
        worker = CompileWorker(opened.tokenizer, opened.end_ids, opened.checkpoint.spec.vocab_size)
        with contextlib.closing(GrammarPrecompiler(worker)) as constrainer:
            constrainer.warm()  # while the engine loads, as the next line
            Thread(target=self._warm_template_worker, name="quire-template", daemon=True).start()
            await self._run_engine(constrainer)

    def _warm_template_worker(self) -> None:
        """Start it with the template. If that fails, the report at ready or the first chat says why."""
        tokenizer = self._config.opened.tokenizer
        template = self._config.chat_template or (None if tokenizer is None else tokenizer.chat_template)
        if template is not None:
            with contextlib.suppress(QuireError):
                check_template(template)

    async def _run_engine(self, constrainer: GrammarPrecompiler) -> None:
        config = self._config
        opened = config.opened
        info = await self.supervisor.first_start()
        self.state.loaded = make_served_model(
            opened,
            info.max_model_len,
            constrainer,
            aliases=config.aliases,
            chat_template=config.chat_template,
            tool_format=config.tool_format,
            reasoning_tags=config.reasoning_tags,
        )
        freeze_heap()
        self._observers.ready(self.state.loaded, info)
        status = StatusLine(self.engine, self.metrics, time.monotonic)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(status.run(self._observers.status))
            tasks.create_task(self.supervisor.watch())


class ServedApplication(Protocol):
    """An application and its engines: a `Server`, or the router of several."""

    @property
    def app(self) -> Application: ...

    @property
    def engine(self) -> DrainedEngine: ...

    @property
    def metrics(self) -> Metrics: ...

    def prompts_of(self, request_id: str) -> tuple[PromptName, ...]: ...

    def end_watching(self) -> None: ...

    async def run_engine(self) -> None: ...

    async def stop(self) -> None: ...


Serving = TypeVar("Serving", bound=ServedApplication)


def serve_until_signal(
    make_server: Callable[[], Serving],
    listening: socket.socket,
    secure: Callable[[Serving], ASGIApp],
    settings: Callable[[ASGIApp], dict[str, Any]],
    drain_s: float,
) -> None:
    """Serve until a signal. A `QuireError` is raised if the engine cannot be started, or not restarted."""

    async def serve() -> None:
        server = make_server()
        app = secure(server)
        uvicorn_config = uvicorn.Config(lifespan="off", timeout_graceful_shutdown=_CANCELLED_AFTER_S, **settings(app))
        http_server = DrainingServer(uvicorn_config, server.engine, drain_s, server.end_watching)
        running = asyncio.create_task(server.run_engine())
        running.add_done_callback(lambda _: setattr(http_server, "should_exit", True))
        try:
            await http_server.serve(sockets=[listening, *(listening.dup() for _ in range(_ACCEPTED_AT_ONCE - 1))])
        finally:
            running.cancel()  # first: an engine that is stopped from here has not failed
            await server.stop()
            with contextlib.suppress(asyncio.CancelledError):
                await first_error(running)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


async def first_error(task: "asyncio.Task[None]") -> None:
    """Wait for a task. Of a group of errors, raise the first that is for the user."""
    try:
        await task
    except* QuireError as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
