"""A body for measuring: all rows at once in a few numpy calls, texts of a known length, no model and no cache.

Its model ends every text as soon as it may: a row with end tokens stops with its `min_tokens`-th token. So whoever
makes a request decides how long its answer is, and the scheduler does not know it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray, Row
from quire.core.step import Ended, FinishReason, Masks, Output, Seat, StepPlan, StepResult
from quire.sched.cost import StepShape
from quire.sim.rows import Done

_UNENDING = 1 << 40
_VOCAB_SIZE = 1 << 15


class _Worked(NamedTuple):
    """Rows that computed, and those of them that emit."""

    cruised: NDArray[np.int64]
    emitters: IntArray


class BulkRunner:
    """Counts the tokens of every row, and gives each that must speak a token that tells nothing."""

    def __init__(self, max_rows: int) -> None:
        self.num_computed: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # by row, kept until the next sits
        self.shape = StepShape()  # of the last step; padding counts as tokens that read nothing
        self._num_known: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._stop: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # known tokens at which it stops by itself
        self._full: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # known tokens at which it is cut off
        self._cruising: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> Done:
        if plan.reset:
            self._cruising[:] = False
        self._cruising[list(plan.leaves)] = False
        for seat in plan.seats:
            self._sit(seat)
        assert not plan.tells, "this body knows no beams"
        emitters = self._work(plan).emitters
        known = self._num_known[emitters] + 1
        self._num_known[emitters] = known
        stopped, full = known >= self._stop[emitters], known >= self._full[emitters]
        ended = stopped | full
        self._cruising[emitters[ended]] = False
        outcomes = tuple(
            Ended(Row(row), FinishReason.STOP if stops else FinishReason.LENGTH)
            for row, stops in zip(emitters[ended].tolist(), stopped[ended].tolist(), strict=True)
        )
        tokens: IntArray = ((emitters * 7919 + known) % _VOCAB_SIZE).astype(np.int32)
        return Done(StepResult(plan.step, emitters, tokens, outcomes))

    def _sit(self, seat: Seat) -> None:
        sampling = seat.sampling
        self.num_computed[seat.row] = 0
        self._num_known[seat.row] = len(seat.tokens)
        self._full[seat.row] = seat.max_length
        self._stop[seat.row] = seat.num_prompt + max(sampling.min_tokens, 1) if sampling.end_ids else _UNENDING

    def _work(self, plan: StepPlan) -> _Worked:
        moving = self._cruising
        if plan.pauses:
            moving = moving.copy()
            moving[list(plan.pauses)] = False
        cruised = np.flatnonzero(moving)
        self.num_computed[cruised] += 1
        shape = StepShape(len(cruised), int(self.num_computed[cruised].sum()), plan.num_padding)
        emitters = [cruised.astype(np.int32)]
        for chunk in plan.chunks:
            self.num_computed[chunk.row] = chunk.start + chunk.length
            shape = shape.with_chunk(chunk.start, chunk.length)
            if Output.SAMPLE in chunk.output:
                emitters.append(np.array([chunk.row], dtype=np.int32))
                self._cruising[chunk.row] = True
        self.shape = shape
        return _Worked(cruised, np.concatenate(emitters))
