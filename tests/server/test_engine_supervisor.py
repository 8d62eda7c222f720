"""The supervisor with a fake clock and fake engines: silent starts, restarts, back-off."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig
from quire.core.errors import EngineFailed
from quire.engine.messages import Heartbeat, LoadProgress
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo, MemoryUsage
from quire.engine.wire import Message, ToFront
from quire.server import engine_supervisor as supervising
from quire.server.async_engine import AsyncEngine
from quire.server.context import ServedModel
from quire.server.engine_supervisor import (
    KILL_AFTER_S,
    MAX_FAILED_STARTS,
    READY_WITHIN_S,
    SILENT_START_S,
    STABLE_S,
    Health,
    Supervisor,
)
from tests.server.scripted_app import Script, app_over, events

INFO = EngineInfo("m", 1024, 100, 4, 64, 16, "script", "none", MemoryUsage(), 1, 0)


class Engine:
    """A fake engine process: sends what the test wants, and ends when it is killed."""

    def __init__(self, deliver: Callable[[ToFront], None], end: Callable[[], None]) -> None:
        self.deliver, self.end = deliver, end
        self.pid, self.num_kills = 1, 0

    def start(self) -> None: ...

    def send(self, message: Message) -> None: ...

    def kill(self) -> None:
        self.num_kills += 1
        self.end()

    def close(self) -> None:
        self.end()

    def exit_status(self) -> int:
        return -9


class SupervisedEngines:
    """A supervisor with a fake clock; its waits between two starts are recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.engines: list[Engine] = []
        self.waited_s: list[float] = []
        monkeypatch.setattr(supervising, "EngineProcess", self._new)
        monkeypatch.setattr(supervising, "_CHECK_S", 0.0)
        monkeypatch.setattr(supervising.asyncio, "sleep", self._sleep)
        self.engine = AsyncEngine(None, lambda: self.now_s)
        self.supervisor = Supervisor(EngineConfig(), None, self.engine, clock=lambda: self.now_s)

    def _new(self, deliver: Callable[[ToFront], None], end: Callable[[], None]) -> Engine:
        self.engines.append(Engine(deliver, end))
        return self.engines[-1]

    def _sleep(self, seconds: float) -> Awaitable[None]:
        self.waited_s.append(seconds)
        return _turns()

    async def started(self, number: int) -> Engine:
        """The engine with this number, once it is started."""
        while len(self.engines) <= number:
            await _turns()
        return self.engines[number]

    async def beats(self, seconds: int, expected_s: float) -> list[tuple[Health, bool]]:
        """A step begins now and takes at least so many seconds: what is seen after each."""
        seen, engine = [], self.engines[-1]
        for running_s in range(1, seconds + 1):
            self.now_s += 1.0
            if not engine.num_kills:
                engine.deliver(Heartbeat(float(running_s), expected_s))
            await _turns()
            seen.append((self.supervisor.health, self.supervisor.hangs or engine.num_kills > 0))
        return seen

    async def watched(self) -> asyncio.Task[None]:
        """The first engine is ready, and the supervisor watches it."""
        starting = asyncio.create_task(self.supervisor.first_start())
        (await self.started(0)).deliver(INFO)
        await starting
        return asyncio.create_task(self.supervisor.watch())


async def _turns() -> None:
    """Run the event loop until nothing is due."""
    for _ in range(10):
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


class Garbage:
    """As a failed request's traceback: a cycle."""

    itself: "Garbage"


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(bounded())


def test_a_start_may_take_long_if_it_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        starting = asyncio.create_task(supervised.supervisor.first_start())
        engine = await supervised.started(0)
        for message in (StartupPhase("config", 1.0, ""), LoadProgress(1, 3), LoadProgress(2, 3), LoadProgress(3, 3)):
            supervised.now_s += SILENT_START_S - 1
            await _turns()
            engine.deliver(message)
            await _turns()
        assert engine.num_kills == 0 and supervised.supervisor.health is Health.STARTING
        engine.deliver(INFO)
        assert await starting is INFO

    run(body())


def test_a_first_start_that_hangs_is_killed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        starting = asyncio.create_task(supervised.supervisor.first_start())
        engine = await supervised.started(0)
        supervised.now_s += SILENT_START_S + 1
        with pytest.raises(EngineFailed, match="reported nothing for 601 s while starting"):
            await starting
        assert engine.num_kills == 1

    run(body())


def test_a_first_engine_killed_by_the_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        starting = asyncio.create_task(supervised.supervisor.first_start())
        (await supervised.started(0)).end()
        with pytest.raises(EngineFailed, match=r"by signal 9, SIGKILL; .*--kv-cache-memory"):
            await starting

    run(body())


def test_an_engine_that_hangs_while_it_starts_again_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        supervised.engines[0].end()
        hanging = await supervised.started(1)
        hanging.deliver(LoadProgress(1, 3))
        await _turns()
        assert supervised.supervisor.health is Health.RESTARTING
        supervised.now_s += SILENT_START_S + 1
        (await supervised.started(2)).deliver(INFO)
        await _turns()
        supervised.engine.note_heartbeat()
        assert hanging.num_kills == 1 and supervised.supervisor.health is Health.READY
        assert supervised.supervisor.num_restarts == 2
        await supervised.supervisor.stop()
        await watching

    run(body())


def test_starts_that_fail_back_off_and_then_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 that would fail."""

    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        for number in range(20):
            if watching.done():
                break
            (await supervised.started(number)).end()
            await _turns()
            assert watching.done() or supervised.supervisor.reason.startswith(
                "the engine ended: by signal 9, SIGKILL; "
            )
        with pytest.raises(EngineFailed, match=f"ended {MAX_FAILED_STARTS} times in a row while it was starting"):
            await watching
        assert supervised.waited_s == [0.25, 2.0, 4.0, 8.0, 16.0]
        assert supervised.supervisor.num_restarts == MAX_FAILED_STARTS

    run(body())


def test_an_engine_that_was_ready_is_replaced_however_often_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        for number in range(50):
            failed = Garbage()
            failed.itself, collected = failed, weakref.ref(failed)
            gc.collect(0)  # it is of an older generation now
            del failed
            engine = await supervised.started(number)
            assert collected() is None or number == 0, "what an engine left is collected before the next starts"
            engine.deliver(INFO)
            await _turns()
            assert supervised.supervisor.reason is None
            supervised.now_s += STABLE_S - 1
            supervised.engine.note_heartbeat()
            engine.end()
        await supervised.started(50)
        assert supervised.waited_s == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, *[16.0] * 44]
        assert supervised.supervisor.health is Health.RESTARTING
        await supervised.supervisor.stop()
        await watching

    run(body())


def test_the_reason_of_a_kill_is_the_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        await supervised.beats(int(READY_WITHIN_S), 0.0)
        assert supervised.supervisor.health is Health.STALLED
        assert supervised.supervisor.reason == "no progress of the engine for 5 s, and 0.0 s were expected"
        await supervised.beats(int(KILL_AFTER_S), 0.0)
        await supervised.started(1)
        assert (
            supervised.supervisor.reason == "no progress of the engine for 30 s, and 0.0 s were expected; it was killed"
        )
        await supervised.supervisor.stop()
        await watching

    run(body())


def test_a_settled_engine_resets_the_failure_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        for number, lived_s in enumerate([1, 1, 1, STABLE_S, 1, 1]):
            engine = await supervised.started(number)
            engine.deliver(INFO)
            await _turns()
            supervised.now_s += lived_s
            supervised.engine.note_heartbeat()
            engine.end()
        await supervised.started(6)
        assert supervised.waited_s == [0.25, 0.5, 1.0, 0.25, 0.25, 0.5]
        await supervised.supervisor.stop()
        await watching

    run(body())


@pytest.mark.parametrize("expected_s", [40.0, 5.0, 1000.0])
def test_a_step_that_was_expected_to_take_long_is_no_hang(monkeypatch: pytest.MonkeyPatch, expected_s: float) -> None:
    """And a later one that hangs is told by its own expected time."""

    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        longest_s = int(min(10 * expected_s, expected_s + 300))
        assert longest_s > KILL_AFTER_S
        assert await supervised.beats(longest_s - 1, expected_s) == [(Health.READY, False)] * (longest_s - 1)
        assert (await supervised.beats(longest_s, expected_s))[-1][1]
        assert supervised.engines[0].num_kills == 1
        await supervised.supervisor.stop()
        await watching

    run(body())


@pytest.mark.parametrize("expected_s", [0.0, 0.05, 0.5])
def test_a_loop_that_hangs_is_told_in_seconds_though_its_process_beats(
    monkeypatch: pytest.MonkeyPatch, expected_s: float
) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        ready, stalled = int(READY_WITHIN_S) - 1, int(KILL_AFTER_S - READY_WITHIN_S)
        seen = await supervised.beats(int(KILL_AFTER_S), expected_s)
        assert seen[:-1] == [(Health.READY, False)] * ready + [(Health.STALLED, False)] * stalled
        assert seen[-1][1] and supervised.engines[0].num_kills == 1
        await supervised.supervisor.stop()
        await watching

    run(body())


def test_a_process_without_heartbeats_is_killed_whatever_its_step_was_expected_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        supervised.engines[0].deliver(Heartbeat(0.0, 1000.0))
        await _turns()
        for second in range(1, int(KILL_AFTER_S)):
            supervised.now_s += 1.0
            await _turns()
            assert supervised.supervisor.health is (Health.READY if second < READY_WITHIN_S else Health.STALLED)
            assert supervised.engines[0].num_kills == 0 and not supervised.supervisor.hangs
        supervised.now_s += 1.0
        await _turns()
        assert supervised.engines[0].num_kills == 1
        await supervised.supervisor.stop()
        await watching

    run(body())


def test_an_engine_is_not_killed_because_its_front_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the front was stopped, or swapped out: heartbeats of that time are read after the first check."""

    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        await _turns()
        supervised.now_s += 10 * KILL_AFTER_S
        await _turns()
        supervised.engines[0].deliver(Heartbeat(0.1, 0.1))
        await _turns()
        assert supervised.engines[0].num_kills == 0 and supervised.supervisor.health is Health.READY
        await supervised.supervisor.stop()
        await watching

    run(body())


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_engine_that_is_stopped_while_it_loads_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        starting = asyncio.create_task(supervised.supervisor.first_start())
        engine = await supervised.started(0)
        if is_ready:
            engine.deliver(INFO)
            await starting
        await supervised.supervisor.stop()
        assert engine.num_kills == (0 if is_ready else 1)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineFailed):
            await starting

    run(body())


def test_a_supervisor_that_was_stopped_while_it_waited_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        starting = asyncio.create_task(supervised.supervisor.first_start())
        (await supervised.started(0)).deliver(INFO)
        await starting
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(supervising.asyncio, "sleep", lambda seconds: waking)
        watching = asyncio.create_task(supervised.supervisor.watch())
        await _turns()
        supervised.engines[0].end()
        await _turns()
        await supervised.supervisor.stop()
        waking.set_result(None)
        await watching
        assert len(supervised.engines) == 1

    run(body())


def test_a_new_engine_is_not_ready_before_its_model_is_known(model: ServedModel) -> None:
    """Otherwise a client that waited for readiness would be refused a moment later."""

    def statuses(known: ServedModel | None) -> list[tuple[int, object]]:
        app = app_over(Script(["Hello."]), known)

        async def talk(client: httpx.AsyncClient) -> list[tuple[int, object]]:
            ready, health = await client.get("/ready"), await client.get("/health")
            response = await client.post("/v1/completions", json={"prompt": "hi"})
            return [(ready.status_code, ready.json()["status"]), (health.status_code, health.json()["status"]),
                    (response.status_code, response.json().get("error", {}).get("code"))]  # fmt: skip

        return events(app, talk)

    assert statuses(None) == [(503, "starting"), (503, "starting"), (503, "engine_unavailable")]
    assert statuses(model) == [(200, "ready"), (200, "ready"), (200, None)]


def test_what_an_engine_says_after_its_successor_has_begun_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages and its end may still be on their way to the event loop."""

    async def body() -> None:
        supervised = SupervisedEngines(monkeypatch)
        watching = await supervised.watched()
        first = supervised.engines[0]
        first.end()
        second = await supervised.started(1)
        first.deliver(INFO)
        await _turns()
        assert supervised.supervisor.health is Health.RESTARTING, "requests would go to an engine that has ended"
        second.deliver(INFO)
        await _turns()
        assert supervised.supervisor.health is Health.READY
        first.end()
        await _turns()
        assert supervised.supervisor.health is Health.READY, "the end of another engine"
        await supervised.supervisor.stop()
        await watching

    run(body())
