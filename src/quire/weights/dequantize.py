"""Decodes stored tensors: plain floats directly, quantized ones with a `Dequantizer`."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import UnsupportedModel
from quire.formats.checkpoint import StoredTensor

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Bytes = NDArray[np.uint8]


class Dequantizer(Protocol):
    """Decodes quantized encodings (`weights.gguf_dequantize.GgufDequantizer`). Thread-safe."""

    def knows(self, encoding: str) -> bool: ...

    def group_size(self, encoding: str) -> int:
        """Values that share a scale: rows are cut between groups only. 1: plain floats."""

    def dequantize(self, data: Bytes, encoding: str) -> Tensor:
        """Flat float32 values."""


class FloatsOnly:
    """The dequantizer of unquantized checkpoints."""

    def knows(self, encoding: str) -> bool:
        return False

    def group_size(self, encoding: str) -> int:
        return 1

    def dequantize(self, data: Bytes, encoding: str) -> Tensor:
        raise AssertionError(f"{encoding} was not refused")


def refuse_unreadable(tensors: Iterable[StoredTensor], dequantizer: Dequantizer) -> None:
    """Reject unsupported encodings before allocating memory."""
    for stored in tensors:
        encoding = stored.encoding
        if encoding not in PLAIN and not dequantizer.knows(encoding):
            raise UnsupportedModel(
                f"Tensor {stored.name} in {stored.path} is stored as {encoding}, which quire cannot decode. "
                f"Use another quantization of the model, or its F16 or BF16 weights."
            )
