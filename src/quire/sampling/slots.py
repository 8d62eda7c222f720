"""Slots for state that only some rows need, so that vocabulary-wide tables hold no more rows than necessary.

Owns slot numbers. Does not depend on the contents of slots; the tables grow with `grown`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.kernels.transfers import upload


class SlotPool:
    """The slot of each row. The number of slots doubles on demand, up to one per row."""

    __slots__ = ("_device", "_free", "_slot_of", "capacity")

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self.capacity = 0
        self._free: list[int] = []
        self._slot_of: NDArray[np.int64] = np.full(max_rows, -1, dtype=np.int64)

    def take(self, row: Row) -> int:
        assert self._slot_of[row] < 0, f"row {row} already holds slot {self._slot_of[row]}"
        if not self._free:
            capacity = min(max(1, 2 * self.capacity), len(self._slot_of))
            assert capacity > self.capacity, "more slots taken than there are rows"
            self._free.extend(reversed(range(self.capacity, capacity)))
            self.capacity = capacity
        slot = self._free.pop()
        self._slot_of[row] = slot
        return slot

    def release(self, row: Row) -> None:
        """Release a row's slot, if it has one."""
        if self._slot_of[row] >= 0:
            self._free.append(int(self._slot_of[row]))
            self._slot_of[row] = -1

    def places(self, rows: IntArray) -> NDArray[np.int64]:  # [n]; -1 for rows without one
        found: NDArray[np.int64] = self._slot_of[rows]
        return found

    def of(self, rows: IntArray) -> Tensor:  # [n] int64, on the device
        slots = self.places(rows)
        assert (slots >= 0).all(), f"rows without a slot among {rows}"
        return upload(slots, self._device)


def grown(table: Tensor, sizes: tuple[int, ...], fill: float = 0) -> Tensor:
    """The table with at least these sizes; what is new holds `fill`."""
    sizes = tuple(max(old, new) for old, new in zip(table.shape, sizes, strict=True))
    if sizes == tuple(table.shape):
        return table
    larger = torch.full(sizes, fill, dtype=table.dtype, device=table.device)
    larger[tuple(slice(0, old) for old in table.shape)] = table
    return larger
