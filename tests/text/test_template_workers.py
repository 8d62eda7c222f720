"""The processes that render chat templates: a rendering that takes long does not hold up others."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from quire.core.errors import ChatTemplateError
from quire.core.worker_process import WorkerProcess
from quire.text import template_worker
from quire.text.template_worker import TemplateWorkers

NOW = "2026-01-01T00:00:00"


def job(template: str) -> dict[str, object]:
    return {"template": template, "variables": {}, "now": NOW}


class Renderings:
    """Renderings of the template "slow" last until they are told to end; the processes are real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids: dict[str, list[int]] = {}
        self.begun = threading.Semaphore(0)
        self.end = threading.Event()
        exchange = template_worker._exchange

        def observed(process: WorkerProcess, message: Mapping[str, object]) -> dict[str, object] | None:
            name = str(message["template"])
            self.pids.setdefault(name, []).append(process.pid)
            if name == "slow":
                self.begun.release()
                assert self.end.wait(60)
            return exchange(process, message)

        monkeypatch.setattr(template_worker, "_exchange", observed)

    def begin(self, threads: ThreadPoolExecutor, workers: TemplateWorkers, count: int) -> list[Future[str]]:
        """So many slow ones, which are all under way."""
        begun = [threads.submit(workers.call, job("slow")) for _ in range(count)]
        for _ in begun:
            assert self.begun.acquire(timeout=60)
        return begun


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> Renderings:
    return Renderings(monkeypatch)


def close_all(workers: TemplateWorkers) -> None:
    for process, _ in workers._idle:
        process.close()


@pytest.mark.parametrize("num_slow", [1, 3])
def test_a_rendering_does_not_wait_for_those_that_take_long(renderings: Renderings, num_slow: int) -> None:
    workers = TemplateWorkers()
    with ThreadPoolExecutor(num_slow) as threads:
        slow = renderings.begin(threads, workers, num_slow)
        assert [workers.call(job(name)) for name in ("one", "two")] == ["one", "two"]
        assert not any(each.done() for each in slow)
        renderings.end.set()
        assert [each.result() for each in slow] == ["slow"] * num_slow
    assert len(set(renderings.pids["slow"])) == num_slow
    assert renderings.pids["one"] == renderings.pids["two"], "one process is enough for renderings in a row"
    assert not set(renderings.pids["one"]) & set(renderings.pids["slow"])
    close_all(workers)


def test_the_number_of_processes_is_bounded(renderings: Renderings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_worker, "_MAX_PROCESSES", 2)
    workers = TemplateWorkers()
    with ThreadPoolExecutor(12) as threads:
        slow = renderings.begin(threads, workers, 2)
        waiting = [threads.submit(workers.call, job("late")) for _ in range(10)]
        renderings.end.set()
        assert [each.result() for each in (*slow, *waiting)] == ["slow"] * 2 + ["late"] * 10
    assert set(renderings.pids["late"]) <= set(renderings.pids["slow"])
    close_all(workers)


def test_processes_that_are_not_used_for_a_minute_are_ended(renderings: Renderings) -> None:
    now_s = 0.0
    workers = TemplateWorkers(clock=lambda: now_s)
    with ThreadPoolExecutor(3) as threads:
        slow = renderings.begin(threads, workers, 3)
        renderings.end.set()
        assert [each.result() for each in slow] == ["slow"] * 3
    assert len(workers._idle) == 3
    started = [process for process, _ in workers._idle]
    for now_s in (59.0, 61.0):  # noqa: B007  the workers' clock
        assert workers.call(job("hi")) == "hi"
    assert [each.exit_status() is None for each in started] == [False, False, True]
    assert [process for process, _ in workers._idle] == started[2:]
    close_all(workers)


@pytest.mark.parametrize("failing", ["{{ 1 // 0 }}", "{{ '%1500000000d' % 1 }}"])
def test_a_failure_takes_no_process_away(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setattr(template_worker, "_MAX_PROCESSES", 1)
    workers = TemplateWorkers()
    for _ in range(3):
        with pytest.raises(ChatTemplateError):
            workers.call(job(failing))
    assert workers.call(job("hi")) == "hi"
    close_all(workers)


def test_a_killed_process_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_worker, "_MAX_PROCESSES", 1)
    workers = TemplateWorkers()
    exchange: Callable[..., object] = template_worker._exchange

    def killed(process: WorkerProcess, message: Mapping[str, object]) -> object:
        os.kill(process.pid, signal.SIGKILL)
        return exchange(process, message)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(template_worker, "_exchange", killed)
            with pytest.raises(template_worker.TemplateWorkerLost):
                workers.call(job("hi"))
    assert workers.call(job("hi")) == "hi"
    close_all(workers)
