"""Attention of single queries over their block tables, compiled by numba: what decoding spends its time on.

Reads keys and values where they lie, in bfloat16 or float32, and gathers nothing. Knows arrays, not torch.
Indices are unsigned, which tells the compiler that none counts from the end: only then does it vectorize.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy import uintp
from numpy.typing import NDArray

from quire.core.ids import FloatArray, IntArray

# No "nnan" or "ninf": the running maximum of the scores starts at minus infinity.
_OPTIONS = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp", "afn"},
}

Words = NDArray[np.uint16] | NDArray[np.uint32]  # the store's numbers as bits


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(typing_context: object, bits: object) -> tuple[object, Callable[..., object]]:
    """The float32 of these 32 bits; bfloat16 is float32 without its lower 16."""

    def generate(context: object, builder: Any, signature: object, arguments: Any) -> object:
        return builder.bitcast(arguments[0], ir.FloatType())  # type: ignore[no-untyped-call]

    return numba.types.float32(numba.types.uint32), generate


def _score_block(
    words: Words,
    base: np.uintp,  # of the block's first key to be scored, first head
    strides: NDArray[np.uintp],  # of block, key-or-value, token, head, in numbers
    count: np.uintp,
    queries: FloatArray,  # [heads, dim]
    group: np.uintp,
    scores: FloatArray,  # [heads, keys]
    start: np.uintp,
    shift: np.uint32,
) -> None:
    for i in range(count):
        for k in range(uintp(queries.shape[0]) // group):
            key = base + i * strides[2] + k * strides[3]
            for h in range(k * group, (k + uintp(1)) * group):
                total = np.float32(0)
                for d in range(uintp(queries.shape[1])):
                    total += queries[h, d] * _as_float(np.uint32(np.uint32(words[key + d]) << shift))
                scores[h, start + i] = total


def _add_block(
    words: Words,
    base: np.uintp,
    strides: NDArray[np.uintp],
    count: np.uintp,
    result: FloatArray,  # [heads, dim]
    group: np.uintp,
    scores: FloatArray,
    start: np.uintp,
    shift: np.uint32,
) -> None:
    for i in range(count):
        for k in range(uintp(result.shape[0]) // group):
            value = base + i * strides[2] + k * strides[3]
            for h in range(k * group, (k + uintp(1)) * group):
                weight = scores[h, start + i]
                for d in range(uintp(result.shape[1])):
                    result[h, d] += weight * _as_float(np.uint32(np.uint32(words[value + d]) << shift))


def _softmax(scores: FloatArray, softcap: np.float32) -> None:
    """In place, each row by itself. scores: [heads, keys]."""
    for h in range(scores.shape[0]):
        highest = np.float32(-np.inf)
        for i in range(scores.shape[1]):
            if softcap > 0:
                scores[h, i] = softcap * np.tanh(scores[h, i] / softcap)
            highest = max(highest, scores[h, i])
        total = np.float32(0)
        for i in range(scores.shape[1]):
            scores[h, i] = np.exp(scores[h, i] - highest)
            total += scores[h, i]
        for i in range(scores.shape[1]):
            scores[h, i] /= total


def _attend_rows(
    query: FloatArray,  # [rows, heads, dim], already scaled
    words: Words,  # flat, from the layer's first number on
    strides: NDArray[np.uintp],  # of block, key-or-value, token, head, in numbers
    block_size: int,
    group: int,  # query heads for each key head
    parts: int,  # each row's heads are divided among so many threads
    tables: IntArray,  # [rows, width]
    lengths: IntArray,  # [rows]: keys each query sees, before the window is applied
    window: int,
    softcap: np.float32,
    output: FloatArray,  # [rows, heads, dim]
) -> None:
    rows, heads, dim = query.shape
    share = heads // parts
    shift = np.uint32(32 - 8 * words.itemsize)
    for unit in numba.prange(rows * parts):
        row = unit // parts
        head = unit % parts * share
        length = int(lengths[row])
        first = max(0, length - window) if window > 0 else 0
        queries = query[row, head : head + share].copy()
        result = np.zeros((share, dim), np.float32)
        scores = np.empty((share, length - first), np.float32)
        for values in range(2):
            if values:
                _softmax(scores, softcap)
            for index in range(first // block_size, (length + block_size - 1) // block_size):
                low = max(first - index * block_size, 0)
                count = uintp(min(length - index * block_size, block_size) - low)
                base = uintp(tables[row, index]) * strides[0] + uintp(values) * strides[1]
                base += uintp(low) * strides[2] + uintp(head // group) * strides[3]
                start = uintp(index * block_size + low - first)
                if values:
                    _add_block(words, base, strides, count, result, uintp(group), scores, start, shift)
                else:
                    _score_block(words, base, strides, count, queries, uintp(group), scores, start, shift)
        output[row, head : head + share] = result


_score_block = numba.njit(**_OPTIONS)(_score_block)
_add_block = numba.njit(**_OPTIONS)(_add_block)
_softmax = numba.njit(**_OPTIONS)(_softmax)
attend_rows = numba.njit(parallel=True, **_OPTIONS)(_attend_rows)


def use_threads(count: int) -> None:
    """As many threads as torch uses: both share one OpenMP pool, and more would only wait."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
