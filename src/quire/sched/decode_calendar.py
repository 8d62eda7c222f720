"""Decode calendar: the position of every decoding row, and the step in which it needs its next block.

A decoding row is not scanned in between. Its position follows from the step number, and the calendar has the step
in which it needs a block or has computed its last position. All operations work on many rows at once.

A drafting row (it verifies drafts in a step planned or in flight) may advance by more than one position a step. Its
position here is the lowest it can have: one per step in flight, corrected when a step is absorbed; its reach is the
highest. It has no bookings: all drafting rows are compared with their tables in every step.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, IntArray, Row

_NEVER = -1
_DRAFTING = 1 << 60  # in the place of a booking
_NO_ROWS: IndexArray = np.empty(0, dtype=np.intp)


class DecodeCalendar:
    """Positions of decoding rows, and the steps of their next block allocations (bookings).

    A finishing row has its last step planned and not absorbed.
    """

    __slots__ = (
        "_ahead",
        "_block_size",
        "_drafting",
        "_due",
        "_end",
        "_end_bookings",
        "_group_bookings",
        "_last",
        "_offset",
        "_row_bookings",
        "_sum_of_offsets",
        "num_decoding",
        "num_finishing",
    )  # fmt: skip

    def __init__(self, max_rows: int, block_size: int) -> None:
        self.num_decoding = 0
        self.num_finishing = 0  # their last step is in flight: they end by length when it is absorbed
        self._block_size = block_size
        self._offset: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # in step s a row computes offset + s
        self._end: NDArray[np.int64] = np.full(max_rows, _NEVER, dtype=np.int64)  # the step after its last one
        self._due: NDArray[np.int64] = np.full(max_rows, _NEVER, dtype=np.int64)  # the step of its booking
        self._group_bookings: dict[int, list[IndexArray]] = {}  # bookings by step, of many rows together
        self._row_bookings: dict[int, list[Row]] = {}  # of single rows
        self._end_bookings: dict[int, list[Row]] = {}  # of rows that finish from then on
        self._sum_of_offsets = 0  # of decoding rows
        self._last: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # the last position a row may compute
        self._ahead: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # drafts of the steps in flight
        self._drafting: IndexArray = _NO_ROWS  # ascending; all are decoding

    def start(self, row: Row, step: int, position: int, last_position: int, capacity: int) -> None:
        """Compute `position` in `step`, and so on to `last_position`; the table holds `capacity` positions."""
        offset = position - step
        end = last_position + 1 - offset
        self._offset[row] = offset
        self._end[row] = end
        self._last[row] = last_position
        if position > last_position:
            self.num_finishing += 1
        else:
            self.num_decoding += 1
            self._sum_of_offsets += offset
            self._book(row, min(capacity - offset, end))

    def stop(self, row: Row) -> None:
        """The row is released. It need not be decoding."""
        if self._due.item(row) != _NEVER:
            self.num_decoding -= 1
            self._sum_of_offsets -= self._offset.item(row)
        elif self._end.item(row) != _NEVER:
            self.num_finishing -= 1
        self._leave_drafting(row)
        self._ahead[row] = 0
        self._due[row] = _NEVER
        self._end[row] = _NEVER

    def is_booked(self, step: int) -> bool:
        """Whether a row may need a block for this step, or be at its end."""
        return step in self._group_bookings or step in self._row_bookings or step in self._end_bookings

    def due(self, step: int) -> IndexArray:
        """The rows that need one more block for this step. Rows at their end finish from now on."""
        parts, singles = self._group_bookings.pop(step, ()), self._row_bookings.pop(step, ())
        ending = self._end_bookings.pop(step, ())
        for row in ending:
            if self._due.item(row) == step == self._end.item(row):
                self._finish_later(row)
        if not parts and not singles:
            return _NO_ROWS
        if len(parts) == 1 and not singles and not ending:
            rows: IndexArray = parts[0]
        else:  # mostly few: a set is faster than sorting in numpy
            rows = np.array(sorted(set(singles).union(*[part.tolist() for part in parts])), dtype=np.intp)
        due: IndexArray = rows[self._due[rows] == step]
        return due

    def _finish_later(self, row: Row) -> None:
        """Its last step is planned."""
        self._leave_drafting(row)
        self._due[row] = _NEVER
        self.num_decoding -= 1
        self.num_finishing += 1
        self._sum_of_offsets -= self._offset.item(row)

    def book_granted(self, rows: IndexArray, step: int) -> None:
        """Each row was granted the block it needed in this step."""
        following = step + self._block_size
        ending = self._last[rows] - self._offset[rows] < following  # its table holds all it may compute
        self._due[rows] = following
        if np.count_nonzero(ending):
            for row in rows[ending].tolist():
                self._book(Row(row), self._end.item(row))
            rows = rows[~ending]
        self._group_bookings.setdefault(following, []).append(rows)

    def book_paused(self, row: Row) -> None:
        """The row skips the step being planned: all that it computes comes one step later."""
        self._offset[row] -= 1
        self._sum_of_offsets -= 1
        self._end[row] += 1
        if self._due.item(row) != _DRAFTING:
            self._book(row, self._due.item(row) + 1)

    def book_again(self, row: Row, step: int) -> None:
        """The step was not taken: a row that needs a block in it needs it in the same one."""
        if self._due.item(row) == step:
            self._book(row, step)

    def _book(self, row: Row, step: int) -> None:
        self._due[row] = step
        bookings = self._end_bookings if step == self._end.item(row) else self._row_bookings
        bookings.setdefault(step, []).append(row)

    # Drafting rows.

    @property
    def has_drafting(self) -> bool:
        return len(self._drafting) > 0

    def short(self, step: int, num_blocks: NDArray[np.int64]) -> IndexArray:
        """The drafting rows whose tables, of this many blocks by row, end before where they may be in this step.
        Rows at their end finish from now on."""
        for row in self._drafting[self._end[self._drafting] <= step].tolist():
            self._finish_later(row)
        rows = self._drafting
        short: IndexArray = rows[self.reaches(rows, step) >= num_blocks[rows] * self._block_size]
        return short

    def is_drafting(self, row: Row) -> bool:
        return self._due.item(row) == _DRAFTING

    def is_ahead(self, row: Row) -> bool:
        """Whether the row may be further than its position: drafts are in flight."""
        return self._ahead.item(row) > 0

    def reach(self, row: Row, step: int) -> int:
        """The last position that a row can compute in a step without drafts."""
        return min(self._offset.item(row) + step + self._ahead.item(row), self._last.item(row))

    def reaches(self, rows: IndexArray, step: int) -> NDArray[np.int64]:
        """`reach` of many rows."""
        reach: NDArray[np.int64] = np.minimum(self._offset[rows] + step + self._ahead[rows], self._last[rows])
        return reach

    def num_left(self, rows: IndexArray, step: int) -> NDArray[np.int64]:
        """How many positions each row can compute after that of this step, wherever it is now; 0 or less: none."""
        left: NDArray[np.int64] = self._last[rows] - self._offset[rows] - step - self._ahead[rows]
        return left

    def book_drafts(self, rows: IndexArray, counts: IntArray, num_blocks: NDArray[np.int64]) -> None:
        """In the step being planned these rows, and no others, verify this many drafts. Rows whose drafts are all
        absorbed have bookings again; their tables have this many blocks, by row."""
        self._ahead[rows] += counts
        drafting = self._drafting
        idle: IndexArray = drafting[self._ahead[drafting] == 0] if len(drafting) else _NO_ROWS
        if len(rows):
            self._due[rows] = _DRAFTING
            drafting = np.union1d(drafting, rows)
        self._drafting = drafting[self._ahead[drafting] > 0] if len(idle) else drafting
        for row in idle.tolist():
            capacity = num_blocks.item(row) * self._block_size
            full = capacity > self._last.item(row)
            self._book(Row(row), self._end.item(row) if full else capacity - self._offset.item(row))

    def absorb_drafts(self, rows: IndexArray, counts: IntArray, accepted: IntArray) -> None:
        """A step in which these rows were to verify this many drafts is absorbed: they gained what was accepted."""
        active = self._end[rows] != _NEVER
        rows, counts, accepted = rows[active], counts[active], accepted[active]
        self._ahead[rows] -= counts
        self._offset[rows] += accepted
        self._sum_of_offsets += int(accepted[self._due[rows] != _NEVER].sum())

    def _leave_drafting(self, row: int) -> None:
        if self._due.item(row) == _DRAFTING:
            self._drafting = self._drafting[self._drafting != row]

    def decoding_rows(self) -> IndexArray:
        """Ascending."""
        return np.flatnonzero(self._due != _NEVER)

    def is_decoding(self, row: Row) -> bool:
        return bool(self._due[row] != _NEVER)

    def is_finishing(self, row: Row) -> bool:
        return bool(self._due[row] == _NEVER and self._end[row] != _NEVER)

    def is_active(self, row: Row) -> bool:
        """Whether it is decoding or finishing."""
        return self._end.item(row) != _NEVER

    def position_at(self, row: Row, step: int) -> int:
        """The position a row computes in a step; of a finishing row, at most its last."""
        return min(self._offset.item(row) + min(step, self._end.item(row) - 1), self._last.item(row))

    def positions_at(self, rows: IndexArray, step: int) -> NDArray[np.int64]:
        """The positions that decoding rows compute in a step."""
        positions: NDArray[np.int64] = self._offset[rows] + step
        return positions

    def positions_reached(self, rows: IndexArray, step: int) -> NDArray[np.int64]:
        """The positions that these rows have computed before a step, one per step in flight: at most all they may."""
        reached: NDArray[np.int64] = np.minimum(self._offset[rows] + step, self._last[rows] + 1)
        return reached

    def num_computed(self, step: int) -> NDArray[np.int64]:
        """By row, the positions computed up to a step; -1 for rows that are not active."""
        computed = np.minimum(np.minimum(step, self._end - 1) + self._offset, self._last) + 1
        return np.where(self._end == _NEVER, -1, computed)

    def num_context(self, step: int) -> int:
        """KV positions that all decoding rows together read in a step."""
        return self._sum_of_offsets + step * self.num_decoding
