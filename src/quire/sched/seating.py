"""Who sits in which row, who is on the way out, and what each row has emitted.

Law (a) of run-ahead lives here: a row, and with it the sequence's blocks, is given back only when the last step
that touched it has been absorbed. Knows nothing of blocks, budgets or queues.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import Row
from quire.core.request import Sequence, State
from quire.core.step import FinishReason, StepResult
from quire.sched.tokenlog import TokenLog

NOBODY = -1


class Seating:
    """The rows of the persistent batch, seen from the host."""

    __slots__ = ("_free", "_leaves", "_log", "leaving", "row_sequence", "seated")

    def __init__(self, max_rows: int) -> None:
        self.seated: dict[Row, Sequence] = {}
        self.leaving: deque[Sequence] = deque()  # in order of release_step
        self.row_sequence: NDArray[np.int64] = np.full(max_rows, NOBODY, dtype=np.int64)  # whose tokens are heard
        self._free = [Row(row) for row in range(max_rows - 1, -1, -1)]
        self._leaves: list[Row] = []  # what the runner has not been told yet
        self._log = TokenLog(max_rows)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def sit(self, sequence: Sequence, step: int) -> Row:
        row = self._free.pop()
        sequence.seat(row, step)
        self.seated[row] = sequence
        self.row_sequence[row] = sequence.id
        return row

    def note(self, result: StepResult) -> None:
        """Remember what the rows emitted."""
        if self._log.full:
            self._log.make_room(min((s.seated_step for s in self.seated.values()), default=result.step))
        self._log.append(result.step, result.rows, result.tokens)

    def rise(self, sequence: Sequence, reason: FinishReason | None, last_planned: int) -> None:
        """Stop computing: finished for a reason, or preempted for none."""
        assert sequence.row is not None, sequence
        sequence.leave(last_planned, reason)
        self._leaves.append(sequence.row)
        self.leaving.append(sequence)
        if reason is not None:
            self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Fix the tokens of a sequence whose outcome is decided; what its row emits later is not heard."""
        if sequence.row is not None:
            generated = self._log.gather(sequence.row, sequence.seated_step)
            sequence.tokens = np.concatenate([sequence.tokens, generated])
            self.row_sequence[sequence.row] = NOBODY

    def release_up_to(self, step: int) -> list[Sequence]:
        """Those whom no step in flight touches any more. Their rows are free; their blocks are the caller's duty."""
        released = []
        while self.leaving and self.leaving[0].release_step <= step:
            sequence = self.leaving.popleft()
            row = sequence.row
            assert row is not None, sequence
            del self.seated[row]
            self.row_sequence[row] = NOBODY
            self._free.append(row)
            sequence.release(self._log.gather(row, sequence.seated_step))
            released.append(sequence)
        return released

    def take_leaves(self) -> tuple[Row, ...]:
        """The rows to unseat in the next plan."""
        leaves, self._leaves = tuple(self._leaves), []
        return leaves

    def audit(self) -> None:
        assert len(self.seated) + len(self._free) == len(self.row_sequence), "a row is lost"
        assert len(set(self._free)) == len(self._free), "a row is twice free"
        assert not self.seated.keys() & set(self._free), "a seated row is free"
        leaving = sum(sequence.state is State.LEAVING for sequence in self.seated.values())
        assert leaving == len(self.leaving), "the way out is miscounted"
        for row, sequence in self.seated.items():
            assert sequence.row == row, sequence
            heard = self.row_sequence[row] != NOBODY
            assert heard != sequence.finished, f"{sequence}: heard is {heard}"
