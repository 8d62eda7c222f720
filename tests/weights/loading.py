"""Loading as the composition root does it, whatever the checkpoint holds."""

from collections.abc import Callable

import torch

from quire.formats.checkpoint import Checkpoint
from quire.models.parameters import DecoderWeights
from quire.weights.gguf_dequantize import GgufDequantizer
from quire.weights.load import unfilled_weights


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Callable[[int, int], None] | None = None
) -> DecoderWeights:
    return unfilled_weights(checkpoint, dtype, "cpu", progress, GgufDequantizer()).filled()
