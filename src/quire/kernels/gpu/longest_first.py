"""In which order rows are taken: the longest first, so that the last programs of a launch are short. One launch a step.

Knows lengths and nothing of what is done with the rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.host_sizes import cdiv
from quire.kernels.gpu.launch import launch, to_be_filled

_ROWS = 16  # of a program
_AT_ONCE = 512  # that they are compared with
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lengths"])
def _rank(lengths, order, num_rows, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """A row's place is how many are longer, or as long and before it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(lengths + row, mask=row < num_rows, other=0)
    place = tl.zeros([ROWS], tl.int32)
    for start in range(0, num_rows, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        theirs = tl.load(lengths + others, mask=others < num_rows, other=-1)
        tied = (theirs[None, :] == own[:, None]) & (others[None, :] < row[:, None])
        place += tl.sum(((theirs[None, :] > own[:, None]) | tied).to(tl.int32), 1)
    tl.store(order + place, row, mask=row < num_rows)


def longest_first(lengths: Tensor) -> Tensor:
    """lengths: [rows] int32, none below 0. The rows, [rows] int32."""
    num_rows = len(lengths)
    order = to_be_filled((num_rows,), torch.int32, lengths.device)
    launch(
        _rank, (cdiv(num_rows, _ROWS),), lengths, order, num_rows,
        ROWS=_ROWS, AT_ONCE=_AT_ONCE, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return order
