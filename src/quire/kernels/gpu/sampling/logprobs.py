"""Log-probabilities of given tokens, their ranks and the top alternatives, in two launches and without sorting.

tile    its largest logit, the sum of its exponentials, the number of tokens above the given one, its top few
row     the same of all tiles together
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch, next_power_of_2
from quire.kernels.gpu.sampling.probabilities import LOWEST_KEY, id_of, key_of, logit_of, order_of

_TILE, _WARPS = 4096, 8


def token_logprobs(
    logits: Tensor,  # [m, vocab] float32
    tokens: Tensor,  # [m] int64
    num_top: int,
) -> Tensor:  # [m, 3 + 2 * num_top] int32
    """See `row_interface.TokenLogprobs`."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert num_top <= vocab_size and tokens.is_contiguous(), (num_top, vocab_size, tokens.stride())
    packed = torch.empty(num_rows, 3 + 2 * num_top, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return packed
    num_tiles = cdiv(vocab_size, _TILE)
    highest, total = (torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device) for _ in range(2))
    above = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    top_keys = torch.empty(num_rows, num_tiles, num_top, dtype=torch.int64, device=logits.device)
    source = (logits, logits.stride(0), vocab_size, num_tiles, tokens, num_top)
    found = (highest, total, above, top_keys)
    launch(_tile_logprobs, (num_rows, num_tiles), *source, *found, TILE=_TILE, num_warps=_WARPS)
    launch(_row_logprobs, (num_rows,), *source, *found, packed, TILES=next_power_of_2(num_tiles))
    return packed


@triton.jit(do_not_specialize=["num_top"])  # one compilation serves every number of alternatives
def _tile_logprobs(
    logits, logits_stride, vocab_size, num_tiles, tokens, num_top,
    highest, total, above, top_keys,
    TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    place = at * num_tiles + tile
    logits += at * logits_stride
    ids = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    order = order_of(values)
    best = logit_of(key_of(tl.max(order), 0))
    shares = tl.where(values == float("-inf"), 0.0, tl.exp(values - best))
    tl.store(highest + place, best)
    tl.store(total + place, tl.sum(shares))
    tl.store(above + place, tl.sum((values > tl.load(logits + tl.load(tokens + at))).to(tl.int32)))
    keys = tl.where(ids < vocab_size, key_of(order, ids), LOWEST_KEY)
    for rank in range(num_top):
        best_key = tl.max(keys)
        tl.store(top_keys + place * num_top + rank, best_key)
        keys = tl.where(keys == best_key, LOWEST_KEY, keys)


@triton.jit(do_not_specialize=["num_top"])
def _row_logprobs(
    logits, logits_stride, vocab_size, num_tiles, tokens, num_top,
    highest, total, above, top_keys, packed,
    TILES: tl.constexpr,
):  # fmt: skip
    """Merges the sorted top lists of the tiles: each rank is the largest unused key of all tiles."""
    at = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    tile_highest = tl.load(highest + at * num_tiles + tiles, mask=inside, other=float("-inf"))
    tile_total = tl.load(total + at * num_tiles + tiles, mask=inside, other=0.0)
    row_highest = tl.max(tile_highest)
    # A NaN spreads to the whole row.
    shares = tl.where(tile_total == 0.0, 0.0, tile_total * tl.exp(tile_highest - row_highest))
    log_total = tl.log(tl.sum(shares))

    packed += at * (3 + 2 * num_top)
    token = tl.load(tokens + at)
    num_above = tl.sum(tl.load(above + at * num_tiles + tiles, mask=inside, other=0))
    logprob = tl.load(logits + at * logits_stride + token) - row_highest - log_total
    tl.store(packed, token.to(tl.int32))
    tl.store(packed + 1, num_above + 1)
    tl.store(packed + 2, logprob.to(tl.int32, bitcast=True))

    lines = top_keys + (at * num_tiles + tiles) * num_top
    num_used = tl.zeros([TILES], dtype=tl.int32)
    for rank in range(num_top):
        keys = tl.load(lines + num_used, mask=inside & (num_used < num_top), other=LOWEST_KEY)
        best_key = tl.max(keys)
        logprob = logit_of(best_key) - row_highest - log_total
        tl.store(packed + 3 + rank, id_of(best_key).to(tl.int32))
        tl.store(packed + 3 + num_top + rank, logprob.to(tl.int32, bitcast=True))
        num_used += (inside & (keys == best_key)).to(tl.int32)
