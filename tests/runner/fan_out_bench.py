"""`python -m tests.runner.fan_out_bench`: what the fan-out of a plan costs per step, without a model or a collective.

Followers are processes, which decode each plan, apply it to nothing and answer. Prints one line of JSON per row: the
CPU time of rank 0, and the time until all answers are there, which on a busy machine is mostly waiting for a core.
"""

import json
import socket
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, Row
from quire.core.step import Grants, Masks, Pending, StepPlan, StepResult
from quire.runner.tensor_parallel import TensorParallelRunner, follow
from tests import children

NUM_STEPS, NUM_ROUNDS = 500, 5


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
    """Seconds."""

    wall_s: float
    cpu_s: float


def cost_of_step(runner: TensorParallelRunner | NoWork, first: int, num_rows: int, num_grants: int) -> StepCost:
    numbers = np.arange(num_grants, dtype=np.int32)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for step in range(first, first + NUM_STEPS):
        grants = Grants(numbers, numbers + 70_000) if num_grants else Grants()
        runner.launch(StepPlan(step, grants=grants, num_decoding=num_rows)).wait()
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return StepCost(wall_s / NUM_STEPS, cpu_s / NUM_STEPS)


def measure(num_ranks: int, num_rows: int, num_grants: int) -> dict[str, object]:
    pairs = [socket.socketpair() for _ in range(num_ranks - 1)]
    command = [sys.executable, "-m", "tests.runner.fan_out_bench", "--follow", str(num_rows)]
    followers = [children.start([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()]) for _, theirs in pairs]
    fan_out = TensorParallelRunner(NoWork(num_rows), [ours for ours, _ in pairs], lambda: None)
    cost_of_step(fan_out, 0, num_rows, num_grants)
    rounds = range(NUM_STEPS, NUM_STEPS * (NUM_ROUNDS + 1), NUM_STEPS)
    times = [cost_of_step(fan_out, first, num_rows, num_grants) for first in rounds]
    alone = [cost_of_step(NoWork(num_rows), first, num_rows, num_grants) for first in rounds]
    for ours, _ in pairs:
        ours.close()
    for follower in followers:
        follower.wait()
    return {
        "ranks": num_ranks,
        "rows": num_rows,
        "grants": num_grants,
        "cpu_us": round(1e6 * (_median(times, "cpu_s") - _median(alone, "cpu_s")), 1),
        "wall_us": round(1e6 * (_median(times, "wall_s") - _median(alone, "wall_s")), 1),
    }


def _median(costs: list[StepCost], name: str) -> float:
    return statistics.median(getattr(cost, name) for cost in costs)


if __name__ == "__main__":
    if "--follow" in sys.argv:
        follow(NoWork(int(sys.argv[2])), socket.socket(fileno=int(sys.argv[3])))
    else:
        for ranks in (2, 4):
            for rows, grants in ((1, 0), (256, 0), (256, 16), (4096, 256)):
                print(json.dumps(measure(ranks, rows, grants)), flush=True)
