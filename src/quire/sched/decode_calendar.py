"""The rows that compute one token in every step, and which of them needs attention in which step.

Whoever cruises is never looked at in between: a row's position follows from the step's number, and a calendar knows
when it needs its next block or has no more to compute. Everything is done for many rows at once.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, Row

_NEVER = -1
_NOBODY: IndexArray = np.empty(0, dtype=np.intp)


class DecodeCalendar:
    """Positions and appointments of cruising rows."""

    __slots__ = (
        "_block_size",
        "_days",
        "_due",
        "_end",
        "_last_days",
        "_offset",
        "_single_days",
        "_sum_of_offsets",
        "num_decoding",
        "num_finishing",
    )  # fmt: skip

    def __init__(self, max_rows: int, block_size: int) -> None:
        self.num_decoding = 0
        self.num_finishing = 0  # rows whose last step is in flight: they end by length when it is absorbed
        self._block_size = block_size
        self._offset: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # in step s a row computes offset + s
        self._end: NDArray[np.int64] = np.full(max_rows, _NEVER, dtype=np.int64)  # the step after its last one
        self._due: NDArray[np.int64] = np.full(max_rows, _NEVER, dtype=np.int64)  # the step of its appointment
        self._days: dict[int, list[IndexArray]] = {}  # appointments that many made together
        self._single_days: dict[int, list[Row]] = {}  # those that one row made
        self._last_days: dict[int, list[Row]] = {}  # and those to coast from then on
        self._sum_of_offsets = 0  # of the rows that cruise

    def start(self, row: Row, step: int, position: int, last_position: int, capacity: int) -> None:
        """Compute `position` in `step`, and so on to `last_position`; the table holds `capacity` positions."""
        offset = position - step
        end = last_position + 1 - offset
        self._offset[row] = offset
        self._end[row] = end
        if position > last_position:
            self.num_finishing += 1
        else:
            self.num_decoding += 1
            self._sum_of_offsets += offset
            self._book(row, min(capacity - offset, end))

    def stop(self, row: Row) -> None:
        """The row leaves. It may not have cruised at all."""
        if self._due.item(row) != _NEVER:
            self.num_decoding -= 1
            self._sum_of_offsets -= self._offset.item(row)
        elif self._end.item(row) != _NEVER:
            self.num_finishing -= 1
        self._due[row] = _NEVER
        self._end[row] = _NEVER

    def due(self, step: int) -> IndexArray:
        """The rows that cannot take this step without one more block. Those at their end coast from now on."""
        parts, singles = self._days.pop(step, ()), self._single_days.pop(step, ())
        ending = self._last_days.pop(step, ())
        for row in ending:
            if self._due.item(row) == step == self._end.item(row):
                self._finish_later(row)
        if not parts and not singles:
            return _NOBODY
        if len(parts) == 1 and not singles and not ending:
            rows: IndexArray = parts[0]
        else:  # mostly few: a set is there before numpy has begun to sort
            rows = np.array(sorted(set(singles).union(*[part.tolist() for part in parts])), dtype=np.intp)
        due: IndexArray = rows[self._due[rows] == step]
        return due

    def _finish_later(self, row: Row) -> None:
        """Its last step is planned."""
        self._due[row] = _NEVER
        self.num_decoding -= 1
        self.num_finishing += 1
        self._sum_of_offsets -= self._offset.item(row)

    def book_granted(self, rows: IndexArray, step: int) -> None:
        """Each has got the block that it needed in this step."""
        following = step + self._block_size
        ends = self._end[rows]
        ending = ends <= following
        self._due[rows] = following
        if np.count_nonzero(ending):
            for row, day in zip(rows[ending].tolist(), ends[ending].tolist(), strict=True):
                self._book(Row(row), day)
            rows = rows[~ending]
        self._days.setdefault(following, []).append(rows)

    def book_paused(self, row: Row, step: int) -> None:
        """It sits this step out and asks again in the next."""
        self._offset[row] -= 1
        self._sum_of_offsets -= 1
        self._end[row] += 1
        self._book(row, step + 1)

    def book_again(self, row: Row, step: int) -> None:
        """The step was not taken: it asks again in the same one."""
        self._book(row, step)

    def hold(self, row: Row) -> None:
        """It sits a step out before anybody has asked whether it needs a block for it."""
        self._shift(row, 1)

    def let_go(self, row: Row) -> None:
        """The step was not taken: it did not sit it out after all."""
        self._shift(row, -1)

    def _shift(self, row: Row, num_steps: int) -> None:
        self._offset[row] -= num_steps
        self._sum_of_offsets -= num_steps
        self._end[row] += num_steps
        self._book(row, int(self._due[row]) + num_steps)

    def _book(self, row: Row, day: int) -> None:
        self._due[row] = day
        days = self._last_days if day == self._end.item(row) else self._single_days
        days.setdefault(day, []).append(row)

    def is_decoding(self, row: Row) -> bool:
        return bool(self._due[row] != _NEVER)

    def is_finishing(self, row: Row) -> bool:
        return bool(self._due[row] == _NEVER and self._end[row] != _NEVER)

    def under_way(self, row: Row) -> bool:
        """Whether it cruises or coasts."""
        return self._end.item(row) != _NEVER

    def position_at(self, row: Row, step: int) -> int:
        """The position a row computes in a step; of one that coasts, never more than its last."""
        return self._offset.item(row) + min(step, self._end.item(row) - 1)

    def positions_at(self, rows: IndexArray, step: int) -> NDArray[np.int64]:
        """The positions that cruising rows compute in a step."""
        positions: NDArray[np.int64] = self._offset[rows] + step
        return positions

    def num_computed(self, step: int) -> NDArray[np.int64]:
        """By row, the positions computed up to a step; -1 for rows that neither cruise nor coast."""
        computed = np.minimum(step, self._end - 1) + self._offset + 1
        return np.where(self._end == _NEVER, -1, computed)

    def num_context(self, step: int) -> int:
        """Positions that all cruising rows together read in a step."""
        return self._sum_of_offsets + step * self.num_decoding
