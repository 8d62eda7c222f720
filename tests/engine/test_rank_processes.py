"""The processes of ranks: one that ends or stops ends all, and none outlives the process that started them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import ConfigError, RankFailed
from quire.engine import rank_processes
from quire.engine.machine import check_gpus, gpu_names
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


def test_a_rank_sees_its_own_gpu_only() -> None:
    """The second and the third of those that the process may use."""
    started = RankProcesses(3, os.memfd_create("ranks"), gpus=gpu_names(3, "4, 6,GPU-1f"))
    while not started.beating:  # until then, what is seen of a process may be its parent's
        started.check()
    seen = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in started.pids]
    started.close()
    assert [b"CUDA_VISIBLE_DEVICES=6" in seen[0], b"CUDA_VISIBLE_DEVICES=GPU-1f" in seen[1]] == [True, True]


@pytest.mark.parametrize(
    ("num_gpus", "visible", "names"),
    [(3, None, ["0", "1", "2"]), (2, "", ["0", "1"]), (2, "5,3", ["5", "3"]), (1, "7,-1,2", ["7"])],
)
def test_gpus_are_named_as_cuda_names_them(num_gpus: int, visible: str | None, names: list[str]) -> None:
    assert gpu_names(num_gpus, visible) == names


@pytest.mark.parametrize(
    ("num_gpus", "visible", "message"),
    [
        (1, None, "tensor_parallel_size is 4, and torch finds 1 GPU: .* Use --tensor-parallel-size 1 or less, or"),
        (2, "3,5", r"torch finds 2 GPUs \(CUDA_VISIBLE_DEVICES=3,5\): each rank needs a GPU of its own"),
    ],
)
def test_more_ranks_than_gpus_are_refused(num_gpus: int, visible: str | None, message: str) -> None:
    check_gpus(num_gpus, num_gpus, visible)
    with pytest.raises(ConfigError, match=message):
        check_gpus(4, num_gpus, visible)


def test_what_waits_for_a_lost_rank_is_told(ranks: RankProcesses) -> None:
    """When all others have ended: a kernel that waits for them would wait for ever."""
    told = list[str | None]()
    pids = ranks.pids
    ranks.call_at_end(lambda: told.append("end"))
    os.kill(pids[1], signal.SIGKILL)
    assert (ranks.why_lost() or "").startswith("Rank 2") and told == ["end"]
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
