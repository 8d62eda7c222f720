"""The engine in its own process: output reaches each request once, and its death is survived."""

import asyncio
import ctypes
import os
import queue
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core.errors import BrokenModelFile, ModelNotFound, NumericalError, QuireError
from quire.core.sampling import SamplingParams
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import LoadProgress, StartEngine
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.outputs import EMBEDDING, Delta, RequestOutput, unit
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo
from quire.engine.wire import ToFront
from quire.server import engine_supervisor as supervising
from quire.server.async_engine import AsyncEngine, EngineLost, EngineRestarting
from quire.server.engine_supervisor import Health, Supervisor
from quire.server.request_stream import RequestStream
from quire.sim.scripted_runner import counted
from tests import children
from tests.server.supervision import until, watched
from tests.tiers import long_only

LINES = """
{"say": "Nobody knows. 🙂 日本語", "when": "secret"}
{"say": "Bang", "break": true, "when": "boom"}
{"say": "on and on ", "end": false, "when": "endless"}
{"say": "Hello there."}
"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def opened(default_model_path: Path) -> OpenedModel:
    return open_model(EngineConfig())


class EngineHarness:
    """An engine client with an engine process."""

    def __init__(self, opened: OpenedModel, script: Path, config: EngineConfig) -> None:
        assert opened.tokenizer is not None
        self.tokenizer = opened.tokenizer
        self.engine = AsyncEngine(opened.tokenizer, monotonic)
        self.supervisor = Supervisor(config, str(script), self.engine, clock=monotonic)

    def submit(self, text: str, params: SamplingParams = GREEDY, *, streaming: bool = True) -> RequestStream:
        return self.engine.submit(self.tokenizer.encode(text), params, streaming=streaming)

    async def response(self, text: str, params: SamplingParams = GREEDY, *, streaming: bool = True) -> RequestOutput:
        call = self.submit(text, params, streaming=streaming)
        try:
            return await call.output()
        finally:
            call.close()


@asynccontextmanager
async def harness(
    opened: OpenedModel, folder: Path, lines: str = LINES, **config: object
) -> AsyncIterator[EngineHarness]:
    script = folder / "script.jsonl"
    script.write_text(lines)
    made = EngineHarness(opened, script, EngineConfig(**config))  # type: ignore[arg-type]
    async with watched(made.supervisor):
        yield made


def run(body: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await body

    asyncio.run(bounded())


InHarness = Callable[[Callable[[EngineHarness], Coroutine[None, None, None]]], None]


@pytest.fixture(scope="module")
def in_harness(opened: OpenedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InHarness]:
    """Runs a test on an event loop with one harness for all that leave its engine working, or replaced."""
    script = '{"step_ms": 2}' + LINES
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        made = runner.run(
            stack.enter_async_context(harness(opened, tmp_path_factory.mktemp("shared"), script, max_num_seqs=4))
        )

        async def bounded(body: Callable[[EngineHarness], Coroutine[None, None, None]]) -> None:
            async with asyncio.timeout(120):
                await body(made)

        try:
            yield lambda body: runner.run(bounded(body))
        finally:
            runner.run(stack.aclose())


def test_streamed_and_whole_outputs_are_the_script(in_harness):
    async def body(w: EngineHarness) -> None:
        assert (await w.response("hi")).outputs[0].text == "Hello there."
        whole = await w.response("a secret", streaming=False)
        assert whole.outputs[0].text == "Nobody knows. 🙂 日本語" and whole.outputs[0].finish_reason == "stop"
        call = w.submit("a secret")
        pieces = []
        while isinstance(news := await call.receive(), Delta):
            pieces.append(news)
        assert "".join(piece.text for piece in pieces) == whole.outputs[0].text == news.outputs[0].text
        assert [piece.finish_reason for piece in pieces].count("stop") == 1 and pieces[-1].finish_reason == "stop"
        assert news.metrics.num_cached_tokens > 0 and news.metrics.queue_s is not None

    in_harness(body)


def test_stop_strings_lengths_siblings_beams_and_logprobs_cross_the_wire(in_harness):
    async def body(w: EngineHarness) -> None:
        stopped = (await w.response("hi", SamplingParams(temperature=0.0, max_tokens=40, stop=["ther"]))).outputs[0]
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("Hello ", "stop", "ther")
        short = (await w.response("hi", SamplingParams(temperature=0.0, max_tokens=2))).outputs[0]
        assert short.finish_reason == "length" and len(short.token_ids) == 2
        twins = await w.response("hi", SamplingParams(n=3, max_tokens=40))
        assert [twin.text for twin in twins.outputs] == ["Hello there."] * 3
        beams = await w.response("hi", SamplingParams(n=2, use_beam_search=True, max_tokens=4))
        assert len(beams.outputs) == 2 and beams.outputs[0].score is not None
        logprobs = SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=3)
        scored = await w.response("hi", logprobs, streaming=False)  # those of a stream are in its deltas
        assert scored.outputs[0].logprobs is not None and len(scored.outputs[0].logprobs) == 3
        assert all(len(entry) == 2 for entry in scored.outputs[0].logprobs)
        assert w.engine.num_requests == 0

    in_harness(body)


def test_reading_a_message_allocates_no_more_than_the_message_needs(in_harness):
    """Bytes that are allocated for the largest message and then cut leave holes: 0.3 kB more memory per request."""

    async def body(w: EngineHarness) -> None:
        await w.response("hi")
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(3):
                await w.response("hi")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak - before < 1 << 18, "a read allocates a buffer"

    in_harness(body)


def test_an_error_reaches_only_its_own_request(in_harness):
    async def body(w: EngineHarness) -> None:
        good = w.submit("hi")
        with pytest.raises(NumericalError):
            await w.response("boom")
        with pytest.raises(QuireError, match="ids run from 0") as refused:
            call = w.engine.submit([10**6], GREEDY, streaming=True)
            await call.receive()
        assert refused.value.status == 400 and refused.value.param == "prompt"
        with pytest.raises(QuireError, match="cannot be sent"):
            w.engine.submit([2**70], GREEDY, streaming=True)
        assert (await good.output()).outputs[0].text == "Hello there."
        assert w.engine.num_requests == 0

    in_harness(body)


def test_a_slow_reader_gets_merged_deltas(in_harness):
    async def body(w: EngineHarness) -> None:
        call = w.submit("a secret")
        await until(lambda: not w.engine.num_requests)
        news = await call.receive()
        assert isinstance(news, Delta) and news.text == "Nobody knows. 🙂 日本語" and news.finish_reason == "stop"
        assert isinstance(await call.receive(), RequestOutput)

    in_harness(body)


def test_an_aborted_request_releases_everything(in_harness):
    async def body(w: EngineHarness) -> None:
        calls = [w.submit("endless", SamplingParams(max_tokens=2000)) for _ in range(12)]  # eight of them wait
        await calls[0].receive()
        for call in calls:
            call.close()
            call.close()
        stats = lambda: w.engine.stats  # noqa: E731
        await until(lambda: stats() is not None and stats().num_running + stats().num_waiting == 0)
        assert w.engine.stats.num_free_blocks + w.engine.stats.num_evictable_blocks == w.engine.stats.num_blocks
        assert (await w.response("hi")).outputs[0].text == "Hello there."

    in_harness(body)


def test_a_killed_engine_fails_all_requests_and_is_replaced(in_harness):
    async def body(w: EngineHarness) -> None:
        restarts = w.supervisor.num_restarts
        calls = [w.submit("endless", SamplingParams(max_tokens=2000)) for _ in range(64)]
        await calls[0].receive()
        pending = asyncio.create_task(w.engine.query("no such thing"))
        await asyncio.sleep(0)
        os.kill(w.supervisor.engine_pid, signal.SIGKILL)
        failures = await asyncio.gather(*(call.output() for call in calls), return_exceptions=True)
        assert all(isinstance(each, EngineLost) for each in failures)
        assert len({id(each) for each in failures}) == 64  # each its own
        assert w.supervisor.health is Health.RESTARTING and w.supervisor.num_restarts == restarts
        with pytest.raises(EngineRestarting):
            w.submit("hi")
        await asyncio.gather(pending, return_exceptions=True)
        await until(lambda: w.supervisor.health is Health.READY)
        assert (await w.response("hi")).outputs[0].text == "Hello there." and w.supervisor.num_restarts == restarts + 1

    in_harness(body)


def test_an_engine_that_hangs_is_not_ready_then_killed_and_replaced(in_harness, monkeypatch):
    async def body(w: EngineHarness) -> None:
        pid = w.supervisor.engine_pid
        call = w.submit("hi", SamplingParams(max_tokens=40))
        await call.output()
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(supervising, "READY_WITHIN_S", 1.0)
        await until(lambda: w.supervisor.health is Health.STALLED)
        waiting = w.submit("hi")
        monkeypatch.setattr(supervising, "KILL_AFTER_S", 3.0)
        with pytest.raises(EngineLost):
            await waiting.receive()
        monkeypatch.undo()
        await until(lambda: w.supervisor.health is Health.READY)
        assert w.supervisor.engine_pid != pid
        assert (await w.response("hi")).outputs[0].text == "Hello there."

    in_harness(body)


@pytest.mark.long  # 7 s; that of a process that hangs as a whole runs always
@pytest.mark.skipif(sys.platform != "linux", reason="ptrace")
def test_a_loop_that_hangs_in_a_process_that_beats_is_killed_and_replaced(in_harness, monkeypatch, caplog):
    async def body(w: EngineHarness) -> None:
        pid = w.supervisor.engine_pid
        stop_main_thread(pid)
        monkeypatch.setattr(supervising, "READY_WITHIN_S", 2.0)
        monkeypatch.setattr(supervising, "KILL_AFTER_S", 4.0)
        await until(lambda: w.supervisor.health is Health.STALLED)
        waiting = w.submit("hi")
        with pytest.raises(EngineLost):
            await waiting.receive()
        assert "no progress of the engine for 4 s" in caplog.text and "no heartbeat" not in caplog.text
        monkeypatch.undo()
        await until(lambda: w.supervisor.health is Health.READY)
        assert (await w.response("hi")).outputs[0].text == "Hello there."

    in_harness(body)


def stop_main_thread(pid: int) -> None:
    """As a debugger does; the other threads of the process run on. It is stopped where it waits for messages: elsewhere
    it may hold a lock that heartbeats need."""
    seize, interrupt, all_threads = 0x4206, 0x4207, 0x40000000
    ptrace = ctypes.CDLL(None).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    waits_in, _ = Counter(system_call(pid) for _ in range(200)).most_common(1)[0]
    if ptrace(seize, pid, None, None) < 0:
        pytest.skip("this process may not use ptrace")
    while system_call(pid) != waits_in:
        pass
    assert ptrace(interrupt, pid, None, None) == 0
    os.waitpid(pid, all_threads)


def system_call(pid: int) -> str:
    """The number of the system call that the main thread is in; "running", or -1, outside of one."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0]


def test_an_engine_with_long_steps_stays_ready_and_serves(opened, tmp_path, monkeypatch):
    """Steps that take longer than both limits, as the script says that they do."""
    monkeypatch.setattr(supervising, "READY_WITHIN_S", 2.5)
    monkeypatch.setattr(supervising, "KILL_AFTER_S", 2.5)

    async def body() -> None:
        async with harness(opened, tmp_path, '{"step_ms": 3500}' + LINES) as w:
            pid = w.supervisor.engine_pid
            serving = asyncio.create_task(w.response("hi", SamplingParams(temperature=0.0, max_tokens=1)))
            seen = set()
            while not serving.done():
                seen.add(w.supervisor.health)
                await asyncio.sleep(0.05)
            assert len((await serving).outputs[0].token_ids) == 1
            assert seen == {Health.READY} and w.supervisor.num_restarts == 0 and w.supervisor.engine_pid == pid

    run(body())


@pytest.mark.parametrize(
    ("lines", "config", "kind"),
    [
        ("{}", {}, BrokenModelFile),
        ('{"shout": "a"}', {}, BrokenModelFile),
        (LINES, {"model": "no-such-model-anywhere"}, ModelNotFound),
    ],
)
def test_a_failed_start_reports_its_reason(opened, tmp_path, lines, config, kind):
    async def body() -> None:
        with pytest.raises(QuireError) as caught:
            async with harness(opened, tmp_path, lines, **config):
                pass
        assert caught.value.code == kind.code and caught.value.message.endswith(".")

    run(body())


@pytest.mark.parametrize(("model", "fewest"), [("shallow_model_path", 10), *long_only([("default_model_path", 51)])])
def test_an_engine_reports_the_progress_of_loading(request, model, fewest):
    """Otherwise a slow disk would look like a hanging engine."""
    path = str(request.getfixturevalue(model))
    messages: queue.SimpleQueue[ToFront | None] = queue.SimpleQueue()
    child = EngineProcess(messages.put, lambda: messages.put(None))
    child.start()
    child.send(StartEngine(EngineConfig(path, threads=1, max_model_len=512, kv_cache_memory=64 << 20), None))
    failures = []
    try:
        while isinstance(message := messages.get(timeout=60), StartupPhase | LoadProgress):
            failures.append(message)
    finally:
        child.close()
    loading = [message for message in failures if isinstance(message, LoadProgress)]
    assert isinstance(message, EngineInfo) and fewest <= len(loading) <= 100
    assert loading[-1].done_bytes == loading[-1].total_bytes > 0
    while messages.get(timeout=60) is not None:
        pass
    assert child._socket.fileno() == -1, "each engine that is replaced would leave a file open until a collection"


def test_the_front_process_loads_no_torch():
    code = "import sys, quire.server.engine_supervisor, quire.engine.open_model; assert 'torch' not in sys.modules"
    children.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_engine_dies_with_its_parent(default_model_path, tmp_path):
    (tmp_path / "script.jsonl").write_text(LINES)
    program = f"""
import asyncio, time
from quire.config import EngineConfig
from quire.server.async_engine import AsyncEngine
from quire.server.engine_supervisor import Supervisor
async def main():
    service = AsyncEngine(None, time.monotonic)
    supervisor = Supervisor(EngineConfig(), {str(tmp_path / "script.jsonl")!r}, service, clock=time.monotonic)
    await supervisor.first_start()
    print(supervisor.engine_pid, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""
    with children.started([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = int(front.stdout.readline())
        front.kill()
        front.wait(10)
    deadline_s = monotonic() + 30
    while Path(f"/proc/{engine}").exists() and _alive(engine):
        assert monotonic() < deadline_s, "the engine outlived its parent by 30 s"
        os.sched_yield()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_an_embedding_crosses_the_wire(in_harness):
    """The scripted body counts tokens by their remainder; a line that breaks, breaks an embedding too."""

    async def body(w: EngineHarness) -> None:
        ids = w.tokenizer.encode("a secret")
        call = w.engine.submit(ids, EMBEDDING, pooled=True)
        counts = counted(np.array(ids))
        found = (await call.output()).embedding
        assert found is not None and found.tolist() == unit(counts).tolist()
        assert call.state.metrics.first_token_s is not None
        with pytest.raises(NumericalError):
            await w.engine.submit(w.tokenizer.encode("boom"), EMBEDDING, pooled=True).output()
        left = w.engine.submit(ids, EMBEDDING, pooled=True)
        left.close()
        assert (await w.response("hi")).outputs[0].text == "Hello there."

    in_harness(body)
