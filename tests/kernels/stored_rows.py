"""Rows as a GGUF file stores them, in every encoding: random codes under scales of usual size."""

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.interface import QuantizedWeight, StoredRows

PLAIN = ("F32", "F16", "BF16")
# Where a block has its half-precision numbers; gguf can quantize only some of these encodings, but decodes all.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "IQ4_XS": (0,), "Q2_K": (80, 82),
}  # fmt: skip
# Whose scales are a product, rounded to half precision when packed.
SUPER_BLOCKS = ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS")
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", *SUPER_BLOCKS)
ENCODINGS = (*PLAIN, *QUANTIZED)


def row_bytes(encoding: str, width: int) -> int:
    per_block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    assert width % per_block == 0
    return width // per_block * num_bytes


def drawn_rows(encoding: str, num_rows: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """[rows, bytes]"""
    random = np.random.default_rng(seed)
    if encoding in PLAIN:
        values = torch.from_numpy(random.normal(0, 0.05, (num_rows, width)).astype(np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[encoding]
        return values.to(dtype).view(torch.uint8).numpy()
    rows = random.integers(0, 256, (num_rows, row_bytes(encoding, width)), dtype=np.uint8)
    blocks = rows.reshape(num_rows, -1, GGML_QUANT_SIZES[GGMLQuantizationType[encoding]][1])
    for place in HALVES[encoding]:
        scales = random.normal(0, 2e-3, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return rows


def decoded(encoding: str, rows: NDArray[np.uint8]) -> Tensor:
    """[rows, width] float32, by the gguf package."""
    return torch.from_numpy(np.array(quants.dequantize(rows, GGMLQuantizationType[encoding]), dtype=np.float32))


def stored(encoding: str, rows: NDArray[np.uint8], order: list[int] | None = None) -> StoredRows:
    places = None if order is None else np.array(order, np.int32)
    return StoredRows(encoding, len(rows) if order is None else len(order), rows.shape[1], lambda: rows, places)


def weight_of(width: int, *parts: StoredRows) -> QuantizedWeight:
    return QuantizedWeight(parts, (sum(part.num_rows for part in parts), width))
