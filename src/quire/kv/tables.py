"""Block tables by row: which blocks hold a row's positions. Knows nothing of tokens or of who else holds a block."""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, IntArray, Row

_ONE = np.array(1)  # numpy adds it in half the time


class Tables:
    """One line of block ids per row, as wide as the longest has needed so far."""

    __slots__ = ("_blocks", "lengths")

    def __init__(self, max_rows: int) -> None:
        self._blocks: IntArray = np.zeros((max_rows, 8), dtype=np.int32)
        self.lengths: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)

    def of(self, row: Row) -> IntArray:
        """The row's blocks, in order: a view."""
        line: IntArray = self._blocks[row, : self.lengths.item(row)]
        return line

    def last(self, row: Row) -> int:
        return int(self._blocks[row, self.lengths[row] - 1])

    def append(self, row: Row, blocks: IntArray) -> None:
        """Several more blocks for one row."""
        start = self.lengths.item(row)
        stop = start + len(blocks)
        if stop > self._blocks.shape[1]:
            self._widen(stop)
        self._blocks[row, start:stop] = blocks
        self.lengths[row] = stop

    def append_each(self, rows: IndexArray, blocks: IntArray) -> None:
        """One more block for each of some distinct rows."""
        ends = self.lengths[rows]
        try:
            self._blocks[rows, ends] = blocks
        except IndexError:  # nothing was written yet; to look for the longest each time would cost more
            self._widen(int(ends.max()) + 1)
            self._blocks[rows, ends] = blocks
        self.lengths[rows] = ends + _ONE

    def clear(self, row: Row) -> None:
        self.lengths[row] = 0

    def _widen(self, width: int) -> None:
        more = max(width, 2 * self._blocks.shape[1]) - self._blocks.shape[1]
        self._blocks = np.pad(self._blocks, ((0, 0), (0, more)))
