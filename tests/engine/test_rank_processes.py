"""The processes of ranks: one that ends or stops ends all, and none outlives the process that started them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.core.errors import RankFailed
from quire.engine import rank_processes
from quire.engine.rank_processes import RankProcesses
from tests import children

STARTED = """
import os, sys, time
from quire.engine.rank_processes import RankProcesses
ranks = RankProcesses(3, os.memfd_create("ranks"))
while not ranks.beating:
    time.sleep(0.01)
print(*ranks.pids, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    """Of a group of three; they wait for their settings, and load no torch."""
    started = RankProcesses(3, os.memfd_create("ranks"))
    started.note_ready()
    yield started
    started.close()


def assert_gone(pids: list[int]) -> None:
    """They were waited for: their numbers belong to no process, or to another one."""
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_rank_that_is_killed_ends_the_others(ranks: RankProcesses) -> None:
    first, second = ranks.pids
    os.kill(second, signal.SIGKILL)
    assert ranks.why_lost() == f"Rank 2 (process {second}) ended by signal 9, SIGKILL."
    with pytest.raises(RankFailed, match="Rank 2"):
        ranks.check()
    assert_gone([first, second])
    assert all(connection.recv(1) == b"" for connection in ranks.connections), "a reader is not left waiting"


def test_a_rank_that_is_stopped_ends_the_others(ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "STALLED_S", 1.0)
    monkeypatch.setattr(rank_processes, "_REASON_WITHIN_S", 60.0)
    pids = ranks.pids
    os.kill(pids[0], signal.SIGSTOP)
    assert (ranks.why_lost() or "").startswith(f"Rank 1 (process {pids[0]}) sent no heartbeat for")
    assert_gone(pids)


def test_closing_ends_them_and_is_no_failure(ranks: RankProcesses) -> None:
    pids = ranks.pids
    ranks.close()
    ranks.close()
    ranks.check()
    assert_gone(pids)


def test_they_end_when_the_object_is_dropped() -> None:
    dropped = RankProcesses(2, os.memfd_create("ranks"))
    pids = dropped.pids
    del dropped
    assert_gone(pids)


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_they_end_with_a_process_that_is_killed(stopped: bool) -> None:
    with children.started(
        [sys.executable, "-c", STARTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
        assert parent.stdout.read() == "", "they held the pipe, too"
