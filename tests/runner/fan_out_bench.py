"""`python -m tests.runner.fan_out_bench`: what the fan-out of a plan costs per step, without a model or a collective.

Followers are processes, which decode each plan, apply it to nothing and answer. Prints one line of JSON per row: the
CPU time of a step in rank 0 and in rank 1, and the time until all answers are there, of the step that only a tenth are
faster than and of the median. On a busy machine the median has waits for a core in it; the tenth has few. `echo` is the
same percentile of ten bytes to another process and back, measured in between. `path` is what a rank computes in a
step, with its calls of sockets, where nothing is waited for: the least of many short rounds, which no load changes.
"""

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, Row
from quire.core.plan_codec import encode_plan
from quire.core.step import Grants, Masks, Pending, StepPlan, StepResult
from quire.core.worker_process import send_bytes
from quire.runner.tensor_parallel import PLAN, TensorParallelRunner, follow, summary
from tests import children

NUM_STEPS, NUM_ROUNDS = 1000, 5
NUM_SHORT_STEPS, NUM_SHORT_ROUNDS = 50, 400  # a millisecond each: on a busy machine, some are undisturbed


class NoWork:
    """A runner whose rows emit one token each."""

    def __init__(self, num_rows: int) -> None:
        self._rows = np.arange(num_rows, dtype=np.int32)

    def launch(self, plan: StepPlan) -> Pending:
        return _Done(StepResult(plan.step, self._rows, self._rows))


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.drafted: dict[Row, IntArray] = {}

    def sample(self, masks: Masks) -> None:
        raise AssertionError("no row is masked")

    def wait(self) -> StepResult:
        return self._result


class StepCost(NamedTuple):
    """Of the steps of a round, in seconds."""

    wall_s: list[float]
    cpu_s: float  # of this process, for one step


class Follower(NamedTuple):
    """A process that follows plans, or one that echoes bytes."""

    process: subprocess.Popen[bytes]
    ours: socket.socket

    @staticmethod
    def start(*mode: str) -> "Follower":
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.runner.fan_out_bench", str(theirs.fileno()), *mode]
            return Follower(children.start(command, pass_fds=[theirs.fileno()]), ours)

    @property
    def cpu_s(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    def end(self) -> None:
        self.ours.close()
        self.process.wait()


def cost_of_steps(runner: TensorParallelRunner | NoWork, first: int, num_rows: int, num_grants: int) -> StepCost:
    numbers = np.arange(num_grants, dtype=np.int32)
    grants = Grants(numbers, numbers + 70_000) if num_grants else Grants()
    times, began_cpu_s = [], time.process_time()
    for step in range(first, first + NUM_STEPS):
        began_s = time.perf_counter()
        runner.launch(StepPlan(step, grants=grants, num_decoding=num_rows)).wait()
        times.append(time.perf_counter() - began_s)
    return StepCost(times, (time.process_time() - began_cpu_s) / NUM_STEPS)


def echo_times(connection: socket.socket) -> list[float]:
    """Of a plan's bytes to another process and back: what the sockets and the change of process cost."""
    times = []
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        connection.sendall(bytes(10))
        connection.recv(1 << 16)
        times.append(time.perf_counter() - began_s)
    return times


def path_of_rank_0(num_rows: int, grants: Grants) -> float:
    """Seconds of a step in rank 0 alone: the answers are there when it asks for them. The least of many rounds."""
    runner, times, alone = NoWork(num_rows), [], []
    for first in range(0, NUM_SHORT_ROUNDS * NUM_SHORT_STEPS, NUM_SHORT_STEPS):
        plans = [StepPlan(step, grants=grants, num_decoding=num_rows) for step in range(first, first + NUM_SHORT_STEPS)]
        with connected() as (ours, theirs):
            for plan in plans:
                send_bytes(theirs, summary(runner.launch(plan).wait()))
            times.append(seconds_of(TensorParallelRunner(runner, [ours], lambda: None), plans))
        alone.append(seconds_of(runner, plans))
    return (min(times) - min(alone)) / NUM_SHORT_STEPS


def seconds_of(runner: TensorParallelRunner | NoWork, plans: list[StepPlan]) -> float:
    began_s = time.perf_counter()
    for plan in plans:
        runner.launch(plan).wait()
    return time.perf_counter() - began_s


def path_of_rank_1(num_rows: int, grants: Grants) -> float:
    """Seconds of a step in rank 1 alone: the plans are there when it asks for them. The least of many rounds."""
    runner, times, alone = NoWork(num_rows), [], []
    plans = [StepPlan(step, grants=grants, num_decoding=num_rows) for step in range(NUM_SHORT_STEPS)]
    for _ in range(NUM_SHORT_ROUNDS):
        with connected() as (ours, theirs):
            for plan in plans:
                send_bytes(ours, PLAN + encode_plan(plan))
            ours.shutdown(socket.SHUT_WR)
            began_s = time.perf_counter()
            follow(runner, theirs)
            times.append(time.perf_counter() - began_s)
        alone.append(seconds_of(runner, plans))
    return (min(times) - min(alone)) / NUM_SHORT_STEPS


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Packets, so that frames that wait are read one by one, as those that come with a step."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def measure(num_ranks: int, num_rows: int, num_grants: int) -> dict[str, object]:
    followers = [Follower.start("follow", str(num_rows)) for _ in range(num_ranks - 1)]
    other = Follower.start("echo")
    fan_out = TensorParallelRunner(NoWork(num_rows), [each.ours for each in followers], lambda: None)
    cost_of_steps(fan_out, 0, num_rows, num_grants), echo_times(other.ours)
    before_s = followers[0].cpu_s
    times, alone, echoes = [], [], []
    for first in range(NUM_STEPS, NUM_STEPS * (NUM_ROUNDS + 1), NUM_STEPS):
        times.append(cost_of_steps(fan_out, first, num_rows, num_grants))
        alone.append(cost_of_steps(NoWork(num_rows), first, num_rows, num_grants))
        echoes.append(echo_times(other.ours))
    follower_cpu_s = (followers[0].cpu_s - before_s) / NUM_STEPS / NUM_ROUNDS
    for each in (*followers, other):
        each.end()
    own_s = percentiles([each.wall_s for each in alone])[1]
    p10_s, p50_s = percentiles([each.wall_s for each in times])
    echo_s, _ = percentiles(echoes)
    found = {
        "cpu_rank_0": statistics.median(each.cpu_s for each in times) - statistics.median(each.cpu_s for each in alone),
        "cpu_rank_1": follower_cpu_s,
        "wall_p10": p10_s - own_s,
        "wall_p50": p50_s - own_s,
        "echo_p10": echo_s,
    }
    if num_ranks == 2:
        numbers = np.arange(num_grants, dtype=np.int32)
        grants = Grants(numbers, numbers + 70_000) if num_grants else Grants()
        found |= {"path_rank_0": path_of_rank_0(num_rows, grants), "path_rank_1": path_of_rank_1(num_rows, grants)}
    sizes = {"ranks": num_ranks, "rows": num_rows, "grants": num_grants}
    return sizes | {f"{name}_us": round(1e6 * value, 1) for name, value in found.items()}


def percentiles(rounds: list[list[float]]) -> tuple[float, float]:
    """The tenth and the fiftieth of all steps."""
    every = sorted(chain.from_iterable(rounds))
    return every[len(every) // 10], every[len(every) // 2]


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        leader = socket.socket(fileno=int(sys.argv[1]))
        if sys.argv[2] == "echo":
            echo(leader)
        else:
            follow(NoWork(int(sys.argv[3])), leader)
    else:
        for ranks in (2, 4):
            for rows, grants in ((1, 0), (256, 0), (256, 16), (4096, 256)):
                print(json.dumps(measure(ranks, rows, grants)), flush=True)
