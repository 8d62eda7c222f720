"""Memory for packed weights, in huge pages where the system has them.

A step of one row reads every weight once. In pages of 4 KiB the processor looks up a page, and its prefetching begins
anew, for every 4 KiB.
"""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

_REGION_BYTES = 32 * 2**20  # only what is written becomes resident
_ALIGNMENT = 64  # of a cache line


class WeightMemory:
    """Takes pieces from regions. A region ends with the last array of it."""

    __slots__ = ("_region", "_used")

    def __init__(self) -> None:
        self._region: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeros."""
        if self._used + num_bytes > len(self._region):
            self._region, self._used = _map(max(num_bytes, _REGION_BYTES)), 0
        piece = self._region[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def _map(num_bytes: int) -> NDArray[np.uint8]:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return np.zeros(num_bytes, np.uint8)
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)
