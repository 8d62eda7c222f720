"""Masks that come with a step: what is not allowed has no chance. Knows nothing of who made them."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import Masks
from quire.kernels.host_copies import upload
from quire.sampling.rows import RowBatch

MASK_BITS = 32  # of a word


def mask_places(batch: RowBatch, masks: Masks | None) -> NDArray[np.int64]:  # [n]; -1 for rows without
    """Which of the masks is whose. Every masked row of the step is in the batch."""
    places = np.full(len(batch.host_rows), -1)
    if masks is not None:
        places[_in_batch(batch, masks)] = np.arange(len(masks.rows))
    return places


def apply_masks(
    logits: Tensor,  # [n, vocab] float32; changed in place
    batch: RowBatch,
    masks: Masks,
) -> None:
    """Forbid what the masks of these rows do not allow."""
    at = upload(_in_batch(batch, masks), logits.device)
    words = upload(masks.bits, logits.device)
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(~allowed, -math.inf))


def _in_batch(batch: RowBatch, masks: Masks) -> NDArray[np.int64]:
    """Where in the batch the masked rows are."""
    place_of = {row: place for place, row in enumerate(batch.host_rows.tolist())}
    return np.array([place_of[row] for row in masks.rows.tolist()], dtype=np.int64)
