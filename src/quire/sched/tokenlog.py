"""The host's memory of emitted tokens, step by step, gathered per row when somebody leaves."""

import numpy as np

from quire.core.ids import IntArray, Row

NO_TOKEN = -1


class TokenLog:
    """A matrix [steps, rows] that grows with the oldest seated row and forgets what lies before it."""

    __slots__ = ("_first_step", "_matrix", "_num_steps")

    def __init__(self, max_rows: int) -> None:
        self._matrix = np.full((64, max_rows), NO_TOKEN, dtype=np.int32)
        self._first_step = 0
        self._num_steps = 0

    @property
    def full(self) -> bool:
        """Whether `make_room` must come before the next step."""
        return self._num_steps == len(self._matrix)

    def append(self, step: int, rows: IntArray, tokens: IntArray) -> None:
        """Note one step's tokens."""
        assert step == self._first_step + self._num_steps, (step, self._first_step, self._num_steps)
        line = self._matrix[self._num_steps]
        line[:] = NO_TOKEN
        line[rows] = tokens
        self._num_steps += 1

    def gather(self, row: Row, first_step: int) -> IntArray:
        """All tokens a row emitted since a step, in order."""
        start = max(first_step - self._first_step, 0)
        column = self._matrix[start : self._num_steps, row]
        emitted: IntArray = column[column != NO_TOKEN]
        return emitted

    def restart(self, step: int) -> None:
        """Steps were lost: go on with this one, nothing noted in between."""
        while self._first_step + self._num_steps < step:
            if self.full:
                self.make_room(self._first_step)
            self._matrix[self._num_steps] = NO_TOKEN
            self._num_steps += 1

    def make_room(self, oldest_step: int) -> None:
        """Nobody will ask for steps before `oldest_step` any more: forget them, and grow if that is not enough."""
        forgotten = min(max(oldest_step - self._first_step, 0), self._num_steps)
        kept = self._matrix[forgotten : self._num_steps]
        if len(kept) > len(self._matrix) // 2:
            larger = np.full((2 * len(self._matrix), self._matrix.shape[1]), NO_TOKEN, dtype=np.int32)
            larger[: len(kept)] = kept
            self._matrix = larger
        else:
            self._matrix[: len(kept)] = kept
        self._first_step += forgotten
        self._num_steps -= forgotten
