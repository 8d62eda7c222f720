"""Copies whole KV blocks to other blocks, of the same store or of another, in one launch. Does not depend on their
contents."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest that divides a block is used
_NUM_WORDS = 4_096  # per program: eight copies of 16 bytes for each of 256 threads
_NUM_WARPS = 8


@triton.jit
def _copy(
    origin,  # [blocks, words]
    store,  # [blocks, words]
    sources,  # [pairs] int64
    targets,  # [pairs] int64
    words_per_block,
    WORDS: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(sources + pair)  # int64, as the products below must be: a store has more than 2^31 words
    target = tl.load(targets + pair)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < words_per_block
    words = tl.load(origin + source * words_per_block + word, mask=inside)
    tl.store(store + target * words_per_block + word, words, mask=inside)


def copy_blocks(origin: Tensor, store: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Block sources[i] of one store to block targets[i] of another, or of the same. No target is a source, and none
    occurs twice.

    origin, store: [blocks, ...] with blocks of the same size, contiguous; sources, targets: [pairs] int64, on the
    store's device.
    """
    assert origin.is_contiguous() and store.is_contiguous() and sources.is_contiguous() and targets.is_contiguous()
    assert sources.dtype is targets.dtype is torch.int64 and len(sources) == len(targets)
    block_bytes = store[0].numel() * store.itemsize
    word = next(word for word in _WORDS if block_bytes % word.itemsize == 0)
    read, written = (each.view(len(each), -1).view(word) for each in (origin, store))
    words_per_block = written.shape[1]
    assert read.shape[1] == words_per_block, (origin.shape, store.shape)
    grid = (len(sources), cdiv(words_per_block, _NUM_WORDS))
    launch(_copy, grid, read, written, sources, targets, words_per_block, WORDS=_NUM_WORDS, num_warps=_NUM_WARPS)
