"""Keeps an engine process alive: starts it, watches its heartbeat, and starts another when it dies or hangs.

Health is progress: heartbeats must arrive, and what they say the engine's loop does must not take much longer than it
was expected to; before them, the reports of the start. A configuration error (no such model, no memory) is not retried;
other failures of a start are retried a limited number of times.
"""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from enum import Enum

from quire.config import EngineConfig
from quire.core.errors import EngineFailed, QuireError
from quire.engine.engine_process import EngineHandle, EngineProcess
from quire.engine.kv_events import KvEventsConfig
from quire.engine.messages import LoadProgress, Refused, StartEngine
from quire.engine.prefix_transfer import EngineRole, KvTransport
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo
from quire.engine.wire import ToFront
from quire.server.async_engine import AsyncEngine

READY_WITHIN_S = 5.0  # with an older heartbeat, or a loop in one place for longer, the server is not ready
KILL_AFTER_S = 30.0  # and the engine is killed
# A step may take longer than these limits if it was expected to: 10 times as long (other programs on the same cores
# slow a step down by that), but 300 s more at most.
_STEP_STRETCH = 10
_STEP_SLACK_S = 300.0
# A start without a report for this time is killed. It reports each hundredth of the weights (1.4 GB of a model with
# 70 billion parameters: 2.4 MB/s are enough) and of each phase; kernels are compiled, and memory is pinned, in silence.
SILENT_START_S = 600.0
STABLE_S = 60.0  # an engine that ends sooner after it was ready makes the next one wait for longer
MAX_FAILED_STARTS = 5  # in a row, of engines that were never ready; then the server gives up
_CHECK_S = 0.25  # heartbeat check interval
# Before another engine is started; doubled with each further one that fails. What prevents a start (memory that is
# held, a disk that is full) takes longer to pass than what killed an engine that was ready.
_FIRST_WAIT_S = 0.25
_FIRST_WAIT_AFTER_FAILED_START_S = 2.0
_LONGEST_WAIT_S = 16.0  # so that an engine that starts in 10 s is ready within 30 s, however often it was killed

EngineLauncher = Callable[[Callable[[ToFront], None], Callable[[], None]], EngineHandle]  # receives, and ends

_log = logging.getLogger(__name__)


def longest_step_s(expected_s: float) -> float:
    """How long a step may take."""
    return min(_STEP_STRETCH * expected_s, expected_s + _STEP_SLACK_S)


class Health(Enum):
    """Engine health; `/ready` returns the values."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Supervisor:
    """Starts and restarts the engine process."""

    def __init__(
        self,
        config: EngineConfig,
        script: str | None,
        engine: AsyncEngine,
        *,
        clock: Callable[[], float],
        phase: Callable[[StartupPhase], None] = lambda phase: None,
        serving: bool = True,  # False: offline, no client waits for its next token
        kv_events: KvEventsConfig | None = None,
        journal: str | None = None,
        role: EngineRole = EngineRole.WHOLE,
        transport: KvTransport = KvTransport.MEMORY,
        launch: EngineLauncher | None = None,  # on another machine, or prepared before; else a new process
    ) -> None:
        self._start_message = StartEngine(config, script, serving, kv_events, journal, role, transport)
        self._engine = engine
        self._clock = clock
        self._phase = phase
        self._launch = launch
        self._process: EngineHandle | None = None
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._refusal: QuireError | None = None
        self._stopping = False
        self._ever_ready = False
        self._failure: str | None = None  # why the last engine ended, until the next one is ready
        self._ready_s: float | None = None  # since when this engine is ready
        self._reported_s = 0.0  # the last report of an engine that starts
        self.num_restarts = 0

    @property
    def health(self) -> Health:
        if self._stopping:
            return Health.STOPPED
        if not self._engine.attached:
            return Health.RESTARTING if self._ever_ready else Health.STARTING
        return Health.STALLED if self._stall(READY_WITHIN_S) else Health.READY

    @property
    def hangs(self) -> bool:
        """The engine has made no progress for so long that it is killed."""
        return self._engine.attached and self._stall(KILL_AFTER_S) is not None

    @property
    def reason(self) -> str | None:
        """In one line, why the engine is not ready."""
        return self._failure or (self._stall(READY_WITHIN_S) if self._engine.attached else None)

    def _stall(self, limit_s: float) -> str | None:
        """What shows that the engine makes no progress, if anything does. A step may take longer than the limit if it
        was expected to; a process without heartbeats may not."""
        now_s, engine = self._clock(), self._engine
        silent_s, running_s = now_s - engine.heartbeat_s, now_s - engine.progress_s
        if silent_s >= limit_s:
            return f"no heartbeat from the engine for {silent_s:.0f} s"
        if running_s >= max(limit_s, longest_step_s(engine.expected_s)):
            return f"no progress of the engine for {running_s:.0f} s, and {engine.expected_s:.1f} s were expected"
        return None

    @property
    def engine_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def first_start(self) -> EngineInfo:
        """Start the engine, also after `stop`; a `QuireError` says why it cannot be."""
        self._stopping = self._ever_ready = False
        self._failure = None
        self._engine.listen()
        self._spawn()
        await self._until_ready_or_ended()
        if not self._ready.is_set() or self._engine.info is None:
            raise self._refusal or EngineFailed(
                f"The engine process ended while it was starting ({self._exit_reason()})."
            )
        return self._engine.info

    async def watch(self) -> None:
        """From the first start on, until `stop`. An engine that cannot be started again is raised."""
        num_short = num_failed_starts = 0  # in a row
        await self._watch_one()
        while not self._stopping:
            was_ready = self._ready_s is not None
            stable = self._ready_s is not None and self._clock() - self._ready_s >= STABLE_S
            num_short = 0 if stable or not was_ready else num_short + 1
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            if num_failed_starts >= MAX_FAILED_STARTS:
                raise self._refusal or EngineFailed(
                    f"The engine ended {num_failed_starts} times in a row while it was starting "
                    f"({self._exit_reason()})."
                )
            self._failure = self._refusal.message if self._refusal else f"the engine ended: {self._exit_reason()}"
            first_s = _FIRST_WAIT_S if was_ready else _FIRST_WAIT_AFTER_FAILED_START_S
            wait_s = min(first_s * 2 ** max(num_short + num_failed_starts - 1, 0), _LONGEST_WAIT_S)
            _log.error("%s; starting another in %s s", self._failure, wait_s)
            await self._start_another(wait_s)
            await self._watch_one()

    async def _start_another(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        gc.collect(1)  # what failed with the engine: its tracebacks hold connections, and no token waits now
        if not self._stopping:
            self.num_restarts += 1
            self._spawn()
            await self._until_ready_or_ended()

    def _exit_reason(self) -> str:
        status = None if self._process is None else self._process.exit_status()
        if status is None or status >= 0:
            return f"status {status}; see above"
        names = {number.value: number.name for number in signal.Signals}
        ended = f"by signal {-status}, {names.get(-status, 'unknown')}"
        if status == -signal.SIGKILL:
            return f"{ended}; if the kernel's log says that memory ran out, lower --kv-cache-memory"
        return f"{ended}; see above"

    async def stop(self) -> None:
        self._stopping = True
        process, self._process = self._process, None
        if process is not None:
            if not self._ready.is_set():
                process.kill()  # while it loads it reads nothing, and has nothing to finish
            await asyncio.to_thread(process.close)
        self._engine.detach()

    def _spawn(self) -> None:
        self._ready, self._ended, self._refusal = asyncio.Event(), asyncio.Event(), None
        self._ready_s, self._reported_s = None, self._clock()
        loop = asyncio.get_running_loop()
        ready, ended = self._ready, self._ended

        def receive(message: ToFront) -> None:
            match message:
                case StartupPhase():
                    loop.call_soon_threadsafe(self._note_phase, message)
                case LoadProgress():
                    loop.call_soon_threadsafe(self._note_startup_progress)
                case EngineInfo():
                    loop.call_soon_threadsafe(self._note_ready, process, message, ready)
                case Refused(None, error):
                    loop.call_soon_threadsafe(self._note_refusal, error)
                case _:
                    self._engine.receive(message)

        def end() -> None:
            try:
                loop.call_soon_threadsafe(self._note_end, ended)
            except RuntimeError:  # the loop is closed
                return

        process = self._process = (self._launch or EngineProcess)(receive, end)
        process.start()
        process.send(self._start_message)

    def _note_startup_progress(self) -> None:
        self._reported_s = self._clock()

    def _note_phase(self, phase: StartupPhase) -> None:
        self._note_startup_progress()
        self._phase(phase)

    def _note_ready(self, process: EngineHandle, info: EngineInfo, ready: asyncio.Event) -> None:
        if process is self._process:
            self._ever_ready = True
            self._ready_s, self._failure = self._clock(), None
            self._engine.attach(process, info)
            ready.set()

    def _note_refusal(self, error: QuireError) -> None:
        self._refusal = error

    def _note_end(self, ended: asyncio.Event) -> None:
        if ended is self._ended:
            self._engine.detach()
        ended.set()

    async def _until_ready_or_ended(self) -> None:
        """A start that hangs is killed."""
        waits = [asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(self._ended.wait())]
        try:
            while not (await asyncio.wait(waits, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                silent_s = self._clock() - self._reported_s
                if silent_s > SILENT_START_S and self._process is not None:
                    self._refusal = EngineFailed(f"The engine reported nothing for {silent_s:.0f} s while starting.")
                    _log.error("%s Killing it.", self._refusal.message)
                    self._process.kill()
                    await self._ended.wait()
                    return
        finally:
            for wait in waits:
                wait.cancel()

    async def _watch_one(self) -> None:
        """Until this engine has ended. One that hangs is killed."""
        checked_s = self._clock()
        while not self._ended.is_set():
            now_s = self._clock()
            if now_s - checked_s > READY_WITHIN_S:  # this process stood still, and heartbeats wait to be read
                self._engine.note_heartbeat()
            checked_s = now_s
            stall = self._stall(KILL_AFTER_S) if self._engine.attached else None
            if stall is not None and self._process is not None:
                _log.error("%s; killing it", stall)
                self._refusal = EngineFailed(f"{stall}; it was killed")
                self._process.kill()
                await self._ended.wait()
                return
            try:
                await asyncio.wait_for(self._ended.wait(), _CHECK_S)
            except TimeoutError:
                continue
