"""Online softmax over tiles of a paged KV store: addresses of a tile's keys, scores, and the softmax update.

Compiled into the attention kernels. Does not depend on queries or masks. Weights are powers of two: a score times
`rate` is the exponent, so the rate includes log2(e) and the rule's scale.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.interface import AttentionRule

TWICE_LOG2E = tl.constexpr(2 * math.log2(math.e))  # tanh x = 1 - 2 / (1 + 2 ** (x * this))
LOWEST = tl.constexpr(-1.0e30)  # initial running maximum: finite, because -inf - -inf is NaN


class SoftmaxScale(NamedTuple):
    """Factors from q·k to the exponent of its softmax weight."""

    rate: float  # exponent per score
    cap_rate: float  # with a soft cap: factor on q·k before the tanh

    @staticmethod
    def of(rule: AttentionRule) -> "SoftmaxScale":
        assert rule.scale > 0, rule
        if rule.softcap:
            return SoftmaxScale(rule.softcap * math.log2(math.e), rule.scale / rule.softcap)
        return SoftmaxScale(rule.scale * math.log2(math.e), 0.0)


@triton.jit
def block_start(position, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """First key of the tile with this position: its block's first key, so that every tile has whole blocks."""
    start = position
    if TILE % BLOCK_SIZE == 0:
        start = position // BLOCK_SIZE * BLOCK_SIZE
    return start


@triton.jit
def block_ids(table, start, in_tile, end, BLOCK_SIZE: tl.constexpr):
    """The block of each key of the tile at `start`; from `end` on 0, which is always a valid block."""
    if in_tile.shape[0] % BLOCK_SIZE == 0:
        pointers = table + start // BLOCK_SIZE + in_tile // BLOCK_SIZE
    else:
        pointers = table + (start + in_tile) // BLOCK_SIZE
    return tl.load(pointers, mask=start + in_tile < end, other=0)


@triton.jit
def key_offsets(blocks, start, in_tile, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    """Offset of each key in the store, in elements. 64 bits: a store has more than 2**31 elements."""
    if in_tile.shape[0] % BLOCK_SIZE == 0:
        slots = in_tile % BLOCK_SIZE  # the same for every tile
    else:
        slots = (start + in_tile) % BLOCK_SIZE
    return blocks.to(tl.int64) * block_stride + slots * slot_stride


@triton.jit
def load_rows(base, offsets, inside, dims, DIM: tl.constexpr, CHECKED: tl.constexpr):
    """[keys, dims]: rows at these offsets; if checked, zeros outside and beyond the head's dim."""
    pointers = base + offsets[:, None] + dims[None, :]
    if CHECKED:
        rows = tl.load(pointers, mask=inside[:, None] & (dims[None, :] < DIM), other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def qk_scores(query, keys, cap_rate, CAPPED: tl.constexpr):
    """[queries, keys] float32: q·k, or its tanh if soft-capped; `rate` scales either to exponents."""
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
    if CAPPED:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (cap_rate * TWICE_LOG2E)))
    return scores


@triton.jit
def online_softmax_update(scores, values, rate, acc, running_max, running_sum):
    """Online softmax: fold the scores and values [keys, dims] of one more tile into (acc [queries, dims], running
    maximum, running sum)."""
    new_max = tl.maximum(running_max, tl.max(scores, 1) * rate)
    weights = tl.exp2(scores * rate - new_max[:, None])
    rescale = tl.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, new_max, running_sum


@triton.jit
def normalize(acc, running_sum):
    """acc / sum; zeros where no key was visible."""
    return acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
