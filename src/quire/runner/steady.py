"""Steady steps: every row cruises and asks for nothing unusual. Recorded by size; the host says who takes part.

A step of 37 rows runs as the next recorded size, the places that are left filled with nobody. A size that is not
recorded yet is no steady step: whoever asks runs it in the plain way.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.kernels.host_copies import upload
from quire.runner.replay import Recorder, Replay

Step = Callable[[Tensor], Tensor]  # rows [n] int64 in, outcome [5, n] int64 out


def steady_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, then by sixteens from 32 and by thirty-twos from 128: never a third more than is needed."""
    sizes = {1, 2, 4, 8, 16, *range(32, 128, 16), *range(128, max_rows, 32)}
    return (*sorted(size for size in sizes if size < max_rows), max_rows)


def by_use(sizes: tuple[int, ...]) -> list[int]:
    """The largest can stand in for every other and the smallest is what one user sees; then by halves between them."""
    first = [sizes[-1], sizes[0]]
    rest = [size for size in sizes if size not in first]
    ordered: list[int] = []
    spans = [rest]
    while spans:
        span = spans.pop(0)
        if span:
            middle = len(span) // 2
            ordered.append(span[middle])
            spans += [span[middle + 1 :], span[:middle]]
    return list(dict.fromkeys(first)) + ordered


class SteadySteps:
    """The recorded sizes of one step."""

    __slots__ = ("_device", "_here", "_missing", "_nobody", "_recorded", "_recorder", "_rows", "_step")

    def __init__(self, step: Step, max_rows: int, nobody: Row, device: torch.device) -> None:
        self._step = step
        self._nobody = nobody
        self._device = device
        self._recorder = Recorder(device)
        self._rows = torch.full((max_rows,), nobody, dtype=torch.int64, device=device)
        self._here: NDArray[np.int64] = np.full(max_rows, nobody, dtype=np.int64)  # what `_rows` holds
        self._missing = by_use(steady_sizes(max_rows))
        self._recorded: dict[int, Replay] = {}

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def record_next(self) -> int | None:
        """Record the most useful size that is missing; which, or None if none is. To be called between steps."""
        if not self._missing:
            return None
        size = self._missing.pop(0)
        self._place(np.empty(0, dtype=np.int32))
        rows = self._rows[:size]
        self._recorded[size] = self._recorder.record(lambda: self._step(rows))
        return size

    def forget(self) -> None:
        """What was recorded reads tensors that are out of use."""
        self._missing = by_use(tuple(sorted([*self._missing, *self._recorded])))
        self._recorded.clear()

    def launch(self, rows: IntArray) -> Tensor | None:
        """The outcome of these rows, [5, rows] int64, which the next launch overwrites; None if no size fits."""
        size = min((size for size in self._recorded if size >= len(rows)), default=None)
        if size is None:
            return None
        self._place(rows)
        return self._recorded[size]()[:, : len(rows)]

    def _place(self, rows: IntArray) -> None:
        """Nothing is sent if the same rows took part in the last step, which is usual."""
        wanted = np.full_like(self._here, self._nobody)
        wanted[: len(rows)] = rows
        if not np.array_equal(wanted, self._here):
            self._here = wanted
            self._rows.copy_(upload(wanted, self._device), non_blocking=True)
