"""A scheduler over the toy, driven turn by turn, so that a test can look in between."""

from collections.abc import Sequence as Many

import numpy as np

from quire.core.ids import RequestId, SequenceId
from quire.core.request import Request, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import StepPlan
from quire.kv.manager import KVManager
from quire.sched.audit import audit
from quire.sched.loop import Loop
from quire.sched.scheduler import Absorbed, Scheduler
from quire.sim.rows import Done
from quire.sim.toy import ToyRunner

VOCAB = 1000


class Recorder:
    """The toy, with every plan kept."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self._toy = ToyRunner(VOCAB)

    def launch(self, plan: StepPlan) -> Done:
        self.plans.append(plan)
        return self._toy.launch(plan)


class Bench:
    """Everything a scheduling test needs."""

    def __init__(
        self, *, blocks: int = 64, block_size: int = 4, rows: int = 8, budget: int = 64, depth: int = 0
    ) -> None:
        self.scheduler = Scheduler(KVManager(blocks, block_size), max_rows=rows, max_step_tokens=budget)
        self.recorder = Recorder()
        self.loop = Loop(self.scheduler, self.recorder, depth)
        self.heard: dict[SequenceId, list[int]] = {}
        self.finished: dict[SequenceId, int] = {}  # the step it finished in
        self._num_requests = 0

    def add(self, prompt: Many[int], max_tokens: int, end_ids: tuple[int, ...] = ()) -> Sequence:
        request = Request(
            RequestId(self._num_requests), np.array(prompt, np.int32), max_tokens, RowSampling(end_ids=end_ids)
        )
        self._num_requests += 1
        (sequence,) = self.scheduler.add(request)
        self.heard[sequence.id] = []
        return sequence

    def turn(self) -> Absorbed | None:
        absorbed = self.loop.turn()
        audit(self.scheduler)
        if absorbed is not None:
            for number, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
                self.heard[SequenceId(number)].append(token)
            for sequence in absorbed.finished:
                self.finished[sequence.id] = absorbed.step
        return absorbed

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if self.scheduler.idle:
                return
            self.turn()
        raise AssertionError("it never came to rest")


def toy_answer(prompt: Many[int], count: int) -> list[int]:
    """By hand: each token is the sum of all before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]
