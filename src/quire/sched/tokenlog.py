"""The host's memory of emitted tokens, step by step, gathered per row when somebody leaves."""

from collections import deque

import numpy as np

from quire.core.ids import IntArray, Row

NO_TOKEN = -1
_NO_TOKEN = np.array(NO_TOKEN, dtype=np.int32)  # numpy compares with it in half the time
_PAGE = 64  # steps


class TokenLog:
    """Pages of [steps, rows]: a new one when the last is full; the oldest go when nobody will ask for them."""

    __slots__ = ("_first_step", "_max_rows", "_num_steps", "_pages", "_spare")

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._pages: deque[IntArray] = deque([self._blank()])
        self._spare: list[IntArray] = []
        self._first_step = 0
        self._num_steps = 0

    @property
    def full(self) -> bool:
        """Whether `make_room` must come before the next step."""
        return self._num_steps == len(self._pages) * _PAGE

    def append(self, step: int, rows: IntArray, tokens: IntArray) -> None:
        """Note one step's tokens."""
        assert step == self._first_step + self._num_steps, (step, self._first_step, self._num_steps)
        line = self._pages[-1][self._num_steps % _PAGE]
        line[:] = NO_TOKEN
        line[rows.astype(np.intp)] = tokens
        self._num_steps += 1

    def gather(self, row: Row, first_step: int) -> IntArray:
        """All tokens a row emitted since a step, in order."""
        start, stop = max(first_step - self._first_step, 0), self._num_steps
        columns = []
        while start < stop:
            page, line = divmod(start, _PAGE)
            columns.append(self._pages[page][line : line + stop - start, row])
            start += _PAGE - line
        column = columns[0] if len(columns) == 1 else np.concatenate(columns) if columns else np.empty(0, np.int32)
        emitted: IntArray = column[column != _NO_TOKEN]
        return emitted

    def restart(self, step: int) -> None:
        """Steps were lost: go on with this one, nothing noted in between."""
        while self._first_step + self._num_steps < step:
            if self.full:
                self.make_room(self._first_step)
            self._pages[-1][self._num_steps % _PAGE] = NO_TOKEN
            self._num_steps += 1

    def make_room(self, oldest_step: int) -> None:
        """Nobody will ask for steps before `oldest_step` any more: forget their pages; and begin a new one."""
        while self._pages and self._first_step + _PAGE <= oldest_step and self._num_steps >= _PAGE:
            self._spare = [self._pages.popleft()]
            self._first_step += _PAGE
            self._num_steps -= _PAGE
        self._pages.append(self._spare.pop() if self._spare else self._blank())

    def _blank(self) -> IntArray:
        return np.empty((_PAGE, self._max_rows), dtype=np.int32)
