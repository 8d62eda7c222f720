"""Masks that come with a step: what is not allowed has no chance. Knows nothing of who made them."""

import math

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Masks
from quire.kernels.host_copies import upload
from quire.sampling.rows import RowBatch

_WORD_BITS = 32


def apply_masks(
    logits: Tensor,  # [n, vocab] float32; changed in place
    batch: RowBatch,
    masks: Masks,
) -> None:
    """Forbid what the masks of these rows do not allow. Every masked row of the step is in the batch."""
    place_of = {row: place for place, row in enumerate(batch.host_rows.tolist())}
    at = upload(np.array([place_of[row] for row in masks.rows.tolist()]), logits.device)
    words = upload(masks.bits, logits.device)
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(~allowed, -math.inf))
