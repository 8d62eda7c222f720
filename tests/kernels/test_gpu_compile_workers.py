"""Worker processes: each call is made once, and a failing worker does not harm its parent."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from quire.kernels.gpu import compile_workers
from quire.kernels.gpu.compile_workers import CompileResults, call_in_workers


class Diary:
    """A file in which those who are called leave who they are, and their number."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "diary"
        self.path.touch()

    def write(self, number: int) -> bool:
        with self.path.open("a") as diary:
            diary.write(f"{os.getpid()} {number}\n")
        return number % 2 == 0

    def read(self) -> list[tuple[int, int]]:
        """By number."""
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return sorted(((int(pid), int(number)) for pid, number in lines), key=lambda line: line[1])


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Diary:
    monkeypatch.setattr(compile_workers, "_MAX_FORKING_S", 60.0)  # on a busy machine too
    return Diary(tmp_path)


def call_and_collect(calls: Sequence[Callable[[], bool]], max_workers: int) -> CompileResults:
    with call_in_workers(calls, max_workers) as workers:
        return workers.collect()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_each_call_is_made_once_in_a_worker_that_is_gone_afterwards(diary: Diary) -> None:
    assert call_and_collect([partial(diary.write, number) for number in range(7)], 2) == (2, 4), "0, 2, 4 and 6"
    pids, numbers = zip(*diary.read(), strict=True)
    assert numbers == tuple(range(7))
    assert os.getpid() not in pids and len(set(pids)) <= 2
    assert not any(map(alive, pids))


def test_a_call_that_raises_or_kills_its_worker_affects_no_other(diary: Diary) -> None:
    calls = [lambda: 1 // 0 == 0, lambda: os._exit(1), *(partial(diary.write, number) for number in range(4))]
    assert call_and_collect(calls, 2) == (2, 2)
    assert [number for _, number in diary.read()] == [0, 1, 2, 3]


def test_a_hanging_worker_is_killed(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_MAX_SILENCE_S", 0.3)
    assert call_and_collect([lambda: diary.write(0) and time.sleep(600) is None], 1) == (1, 0)
    assert not any(alive(pid) for pid, _ in diary.read())


def test_results_before_collect_count(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_MAX_SILENCE_S", 0.0)
    with call_in_workers([partial(diary.write, number) for number in range(5)], 2) as workers:
        for pid in workers._pids:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert workers.collect() == (2, 3)
        assert workers._pids == []


def test_leaving_without_collect_leaves_no_worker(diary: Diary) -> None:
    pids: list[int] = []
    with (
        pytest.raises(ZeroDivisionError),
        call_in_workers([lambda: time.sleep(600) is None, partial(diary.write, 0)], 2) as workers,
    ):
        pids.extend(workers._pids)
        assert len(pids) == 2 and all(map(alive, pids))
        _ = 1 // 0
    assert not any(map(alive, pids))


def test_a_worker_without_its_parent_starts_no_call(diary: Diary) -> None:
    """As the child sees it: whoever made it is not its parent any more."""
    numbers, handing_out = os.pipe()
    os.write(handing_out, bytes(compile_workers._NUMBER_BYTES))
    os.close(handing_out)
    work = partial(compile_workers._work, [partial(diary.write, 0)], numbers, numbers, 0)
    child = compile_workers._fork_worker(work, os.getpid())
    os.close(numbers)
    os.waitpid(child, 0)
    assert diary.read() == []


def test_nothing_is_done_if_fork_fails(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", no_room)
    assert call_and_collect([partial(diary.write, 0)], 2) == (0, 0) and diary.read() == []


def test_more_than_half_of_the_workers_suffice(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork
    room = iter([fork, fork])

    def little_room() -> int:
        for make in room:
            return make()
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", little_room)
    assert call_and_collect([partial(diary.write, number) for number in range(4)], 3) == (2, 2)
    assert [number for _, number in diary.read()] == [0, 1, 2, 3]


def test_slow_forks_leave_no_worker(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    fork = os.fork

    def slow_fork() -> int:
        monkeypatch.setattr(compile_workers, "_MAX_FORKING_S", 0.0)
        child = fork()
        made.append(child)
        return child

    monkeypatch.setattr(os, "fork", slow_fork)
    assert call_and_collect([partial(diary.write, number) for number in range(4)], 4) == (0, 0)
    assert len(made) == 1 and not alive(made[0])


def test_a_signal_right_after_fork_does_not_return_into_the_caller(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception between two lines of the child: it must not run on as its parent."""
    fork = os.fork

    def interrupted_fork() -> int:
        child = fork()
        if child == 0:
            raise KeyboardInterrupt
        return child

    monkeypatch.setattr(os, "fork", interrupted_fork)
    assert call_and_collect([partial(diary.write, number) for number in range(2)], 2) == (2, 0)
    diary.write(7)
    assert [number for _, number in diary.read()] == [7], "nobody came here twice"
