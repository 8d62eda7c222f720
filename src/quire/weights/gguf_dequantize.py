"""Dequantizes GGUF tensors with the gguf package. Imported only where a GGUF file is read."""

from functools import cache

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from quire.weights.dequantize import Bytes


class GgufDequantizer:
    """Every encoding that the installed gguf can decode."""

    def knows(self, encoding: str) -> bool:
        return _can_decode(encoding)

    def group_size(self, encoding: str) -> int:
        return int(GGML_QUANT_SIZES[GGMLQuantizationType[encoding]][0])

    def dequantize(self, data: Bytes, encoding: str) -> Tensor:
        kind = GGMLQuantizationType[encoding]
        return torch.from_numpy(quants.dequantize(data.reshape(1, -1), kind)).view(-1)


@cache
def _can_decode(encoding: str) -> bool:
    """Tried on one block of zeros: the package does not say what it can decode."""
    kind = GGMLQuantizationType.__members__.get(encoding)
    if kind is None:
        return False
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
