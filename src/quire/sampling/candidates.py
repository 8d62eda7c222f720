"""The likeliest next tokens of tethered rows, with their log-probabilities, for those who choose on the host.

The device's share (`likeliest`) does not wait; `RowCandidates.wait` brings the result over in one transfer.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.step import Candidates
from quire.kernels.host_copies import Landing
from quire.sampling.filters import ids_of, ordering_keys


class RowCandidates(NamedTuple):
    """What some rows could say next, on its way to the host: integers, and floats by their bits."""

    host_rows: IntArray
    counts: NDArray[np.int64]
    finite: Tensor  # [n] bool: a row that is not has failed
    packed: Landing  # [n, 1 + 2 * most] int32: finite, ids, logprobs

    def wait(self) -> dict[Row, Candidates | None]:
        """By row; None for one that failed."""
        integers: NDArray[np.int32] = self.packed.wait()
        floats = integers.view(np.float32)
        first_logprob = 1 + (integers.shape[1] - 1) // 2
        found: dict[Row, Candidates | None] = {}
        for i, (row, count) in enumerate(zip(self.host_rows.tolist(), self.counts.tolist(), strict=True)):
            best = Candidates(integers[i, 1 : 1 + count], floats[i, first_logprob : first_logprob + count])
            found[Row(row)] = best if integers[i, 0] else None
        return found


def likeliest(
    logprobs: Tensor,  # [n, vocab] float32, after all that forbids, favours or penalizes
    finite: Tensor,  # [n] bool
    host_rows: IntArray,
    counts: NDArray[np.int64],  # [n], each at most vocab
) -> RowCandidates:
    """Of equals the lowest id comes first. A token that is forbidden has -inf, and comes after all others."""
    ids = ids_of(ordering_keys(logprobs).topk(int(counts.max()), dim=-1).values)
    packed = torch.cat([finite.int()[:, None], ids.int(), logprobs.gather(-1, ids).view(torch.int32)], dim=-1)
    return RowCandidates(host_rows, counts, finite, Landing(packed))
