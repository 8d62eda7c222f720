"""Sums of hidden states by row, on the device, chunk by chunk. Knows nothing of what they are for.

Whatever precision the states have, their sum has float32's; the oracle's integers stay integers until the end, and so
its sums are exact.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.ids import FloatArray, Row
from quire.core.step import Chunk
from quire.kernels.host_copies import Landing


class Pooling(NamedTuple):
    """A chunk whose hidden states, from `first` on in the flat batch, are summed; the last gives the sum back."""

    chunk: Chunk
    first: int
    last: bool


class PooledRows(NamedTuple):
    """The sums that a step completed, on their way to the host."""

    rows: tuple[Row, ...]
    sums: Landing  # [rows, hidden] float32

    def wait(self) -> dict[Row, FloatArray | None]:
        """None where it is not finite."""
        sums = self.sums.wait()
        finite = np.isfinite(sums).all(axis=1)
        return {row: sums[i] if finite[i] else None for i, row in enumerate(self.rows)}


class Pools:
    """The sums of prompts that are not computed to their end."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[Row, Tensor] = {}  # [hidden]

    def add(
        self,
        parts: tuple[Pooling, ...],
        hidden: Tensor,  # [tokens, hidden]
    ) -> PooledRows | None:
        """Take in a step's chunks; the sums that are complete, if any are."""
        precision = torch.float32 if hidden.is_floating_point() else hidden.dtype
        complete: dict[Row, Tensor] = {}
        for chunk, first, last in parts:
            total = hidden[first : first + chunk.length].sum(dim=0, dtype=precision)
            if chunk.start > 0:
                total += self._sums.pop(chunk.row)
            (complete if last else self._sums)[chunk.row] = total
        if not complete:
            return None
        return PooledRows(tuple(complete), Landing(torch.stack(tuple(complete.values())).float()))

    def leave(self, row: Row) -> None:
        """The row is empty; it may never have been pooled."""
        self._sums.pop(row, None)

    def clear(self) -> None:
        self._sums.clear()
