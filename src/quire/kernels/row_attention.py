"""Attention of single queries over their block tables, compiled by numba: what decoding spends its time on.

Reads keys and values where they lie, in bfloat16 or float32, and gathers nothing. Knows arrays, not torch.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from quire.core.ids import FloatArray, IntArray

# No "nnan" or "ninf": freed blocks may hold anything, and what is compared must stay ordered.
_OPTIONS = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp", "afn"},
}

Words = NDArray[np.uint16] | NDArray[np.uint32]  # the store's numbers as bits


def _widen(words: Words, offset: int, shift: np.uint32, bits: NDArray[np.uint32]) -> None:
    """One head's key or value as float32 bits: bfloat16 is float32 without its lower 16 bits."""
    row = words[offset : offset + bits.size]
    for i in range(bits.size):
        bits[i] = np.uint32(row[i]) << shift


def _dot(left: FloatArray, right: FloatArray) -> np.float32:
    total = np.float32(0)
    for i in range(left.size):
        total += left[i] * right[i]
    return total


def _add_scaled(total: FloatArray, weight: np.float32, row: FloatArray) -> None:
    for i in range(total.size):
        total[i] += weight * row[i]


def _softmax(scores: FloatArray, softcap: np.float32) -> None:
    if softcap > 0:
        for i in range(scores.size):
            scores[i] = softcap * np.tanh(scores[i] / softcap)
    highest = scores.max()
    total = np.float32(0)
    for i in range(scores.size):
        scores[i] = np.exp(scores[i] - highest)
        total += scores[i]
    for i in range(scores.size):
        scores[i] /= total


def _attend_rows(
    query: FloatArray,  # [rows, heads, dim], already scaled
    words: Words,  # flat, from the layer's first number on
    strides: NDArray[np.int64],  # of block, key-or-value, token, head, in numbers
    block_size: int,
    kv_heads: int,
    tables: IntArray,  # [rows, width]
    lengths: IntArray,  # [rows]: keys each query sees, before the window is applied
    window: int,
    softcap: np.float32,
    output: FloatArray,  # [rows, heads, dim]
) -> None:
    rows, heads, dim = query.shape
    group = heads // kv_heads
    shift = np.uint32(32 - 8 * words.itemsize)
    for unit in numba.prange(rows * kv_heads):
        row = unit // kv_heads
        head = unit % kv_heads
        first = max(0, lengths[row] - window) if window > 0 else 0
        count = lengths[row] - first
        queries = query[row, head * group : (head + 1) * group]
        result = output[row, head * group : (head + 1) * group]
        scores = np.empty((group, count), np.float32)
        bits = np.empty(dim, np.uint32)
        wide = bits.view(np.float32)
        for i in range(count):
            block = np.int64(tables[row, (first + i) // block_size])
            offset = block * strides[0] + (first + i) % block_size * strides[2] + head * strides[3]
            _widen(words, offset, shift, bits)
            for g in range(group):
                scores[g, i] = _dot(queries[g], wide)
        for g in range(group):
            _softmax(scores[g], softcap)
        result[:] = 0
        for i in range(count):
            block = np.int64(tables[row, (first + i) // block_size])
            offset = (
                block * strides[0] + strides[1] + (first + i) % block_size * strides[2] + head * strides[3]
            )
            _widen(words, offset, shift, bits)
            for g in range(group):
                _add_scaled(result[g], scores[g, i], wide)


_widen = numba.njit(**_OPTIONS)(_widen)
_dot = numba.njit(**_OPTIONS)(_dot)
_add_scaled = numba.njit(**_OPTIONS)(_add_scaled)
_softmax = numba.njit(**_OPTIONS)(_softmax)
attend_rows = numba.njit(parallel=True, **_OPTIONS)(_attend_rows)


def use_threads(count: int) -> None:
    """As many threads as torch uses: both share one OpenMP pool, and more would only wait."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
