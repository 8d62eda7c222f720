"""How a runner reads plans, in plain Python: seats, leaves, grants and cruising turned into this step's work.

The toy and the oracle share it. The torch runner does the same with tensors; both must agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.core.ids import BlockId, Row
from quire.core.step import Ended, FinishReason, Output, Seat, StepPlan, StepResult


class Work(NamedTuple):
    """Compute positions [start, stop) of a row's tokens; emit the next one if `samples`."""

    row: Row
    start: int
    stop: int
    samples: bool


@dataclass(slots=True)
class SeatedRow:
    """A row as the runner sees it."""

    seat: Seat
    tokens: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    cruising: bool = False
    ended: bool = False


class Done:
    """A step that was computed when it was launched."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class Rows:
    """The persistent batch of a runner without tensors."""

    def __init__(self) -> None:
        self.rows: dict[Row, SeatedRow] = {}
        self._next_step = 0

    def run(self, plan: StepPlan, next_token: Callable[[Work, SeatedRow], int]) -> Done:
        """Carry a plan out: compute all its work, and emit where a row has caught up."""
        emitted = []
        ended = []
        for work in self.apply(plan):
            token = next_token(work, self.rows[work.row])
            if work.samples:
                emitted.append((work.row, token))
                end = self.emit(work.row, token)
                if end is not None:
                    ended.append(end)
        pairs = np.array(emitted, dtype=np.int32).reshape(-1, 2)
        return Done(StepResult(plan.step, pairs[:, 0], pairs[:, 1], tuple(ended)))

    def apply(self, plan: StepPlan) -> list[Work]:
        """Follow the differences; what is to be computed now. Cruising rows first, then chunks."""
        assert plan.step == self._next_step, f"plan {plan.step} came, {self._next_step} was due"
        self._next_step += 1
        for row in plan.leaves:
            del self.rows[row]
        for seat in plan.seats:
            assert seat.row not in self.rows, f"row {seat.row} is taken"
            self.rows[seat.row] = SeatedRow(seat, seat.tokens.tolist())
        for grant in plan.grants:
            self.rows[grant.row].blocks.append(grant.block)
        paused = set(plan.pauses)
        work = [
            Work(row, len(seated.tokens) - 1, len(seated.tokens), samples=True)
            for row, seated in self.rows.items()
            if seated.cruising and not seated.ended and row not in paused
        ]
        assert len(work) <= plan.num_cruising, f"{len(work)} rows cruise, the plan says {plan.num_cruising}"
        for chunk in plan.chunks:
            stop = chunk.start + chunk.length
            samples = Output.SAMPLE in chunk.output
            seated = self.rows[chunk.row]
            assert not seated.cruising and samples == (stop == len(seated.tokens)), chunk
            seated.cruising = samples
            work.append(Work(chunk.row, chunk.start, stop, samples))
        return work

    def emit(self, row: Row, token: int) -> Ended | None:
        """A row gains a token; how it ended, if it did."""
        seated = self.rows[row]
        seated.tokens.append(token)
        generated = len(seated.tokens) - seated.seat.num_prompt
        if token in seated.seat.sampling.end_ids and generated >= seated.seat.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(seated.tokens) == seated.seat.max_length:
            reason = FinishReason.LENGTH
        else:
            return None
        seated.ended = True
        return Ended(row, reason)
