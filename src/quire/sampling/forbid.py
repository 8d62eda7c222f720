"""How tokens are ruled out in the logits of some rows. Knows nothing of why."""

import math

import torch
from torch import Tensor

from quire.sampling.rows import Part


def forbid(
    logits: Tensor,  # [n, vocab] float32
    part: Part,
    ids: Tensor,  # [m, width] int64
    when: Tensor,  # [m, width] bool; ids where it is False may be anything inside the vocabulary
) -> None:
    """Set tokens of some rows to -inf, in place. An id may come twice: minima do not mind the order."""
    limits = torch.where(when, -math.inf, math.inf).to(logits.dtype)
    logits.index_copy_(0, part.at, part.of(logits).scatter_reduce(1, ids, limits, "amin"))
