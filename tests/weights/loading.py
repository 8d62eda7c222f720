"""Loading as the composition root does it, whatever the checkpoint holds."""

from collections.abc import Callable

import torch

from quire.formats.checkpoint import Checkpoint
from quire.models.parameters import DecoderWeights
from quire.weights.load import load_weights
from quire.weights.packed import GgufUnpacker


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Callable[[int, int], None] | None = None
) -> DecoderWeights:
    return load_weights(checkpoint, dtype, "cpu", progress, GgufUnpacker())
