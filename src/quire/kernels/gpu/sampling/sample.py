"""Samples a token for every row of a batch, without sorting: greedy in two launches, a draw in four.

    tile maximum   the largest key of every tile
    weigh          the row's largest, which is a greedy row's token; the weight of every tile and its histogram; the
                   last tile of a row finds the bins in which top-k and top-p end
    shortlist      the weight of tokens surely kept, by tile; the candidates among which top-k and top-p end
    draw           the last kept token; the tile of the random number, and the token in it
A program of a row that does not need a launch returns at once. Sums are integers, so no result depends on the tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.split_merge import is_last
from quire.kernels.gpu.launch import cdiv, launch, next_power_of_2
from quire.kernels.gpu.sampling.probabilities import (
    INDEX,
    IS_RANDOM,
    LOWEST_KEY,
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    exponents_of,
    id_of,
    is_finite,
    key_of,
    least_weight,
    logit_of,
    order_of,
    uniform,
    weights_of,
)
from quire.kernels.gpu.sampling.top_k_top_p import (
    BINS,
    bins_of,
    bins_per_exponent,
    find_bracket,
    find_last,
    measure,
)
from quire.kernels.row_interface import Sampled, SamplingStage, SamplingTable

_MAX_TOKENS = 2**22  # the sum of their weights, integers up to 2**40, fits an int64; ids have 24 bits
_MAX_CANDIDATES = 16384  # listed per row, 4 bytes each; of a row with more all logits are read
# Tokens per program, and its warps; one size for every batch, because compiling each takes a second or two.
_TILE, _WARPS = 4096, 8

# Columns of `stats`: the number of candidates, how many are listed, the range of their keys, the number of tokens
# surely kept, the first and last bin; and the number of counted tiles.
_COUNT, _LISTED, _LOW, _HIGH, _SURE, _FIRST, _LAST, _COUNTED = (tl.constexpr(column) for column in range(8))
_NUM_STATS = tl.constexpr(8)


class _Scratch(NamedTuple):
    """Data between the launches."""

    best_keys: Tensor  # [n, tiles] int64
    lowest: Tensor  # [n, tiles] float32: the lowest logit above -inf
    highest: Tensor  # [n] float32
    weights: Tensor  # [n, tiles] int64
    counts: Tensor  # [n, BINS] int32: tokens by bin
    sure_weights: Tensor  # [n, tiles] int64: of tokens that top-k and top-p surely keep
    stats: Tensor  # [n, _NUM_STATS] int64
    listed: Tensor  # [n, _MAX_CANDIDATES] int32: ids of candidates, unordered


def sample_tokens(
    logits: Tensor,  # [n, vocab] float32; not changed
    rows: Tensor,  # [n] int64; -1 is padding
    positions: Tensor,  # [n] int64
    table: SamplingTable,
    stages: SamplingStage,
) -> Sampled:
    """See `row_interface.SampleTokens`."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert vocab_size <= _MAX_TOKENS, vocab_size
    assert table.integers.stride(1) == table.floats.stride(1) == 1, "columns must be contiguous"
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return Sampled(tokens, finite)
    num_tiles = cdiv(vocab_size, _TILE)
    tiles = next_power_of_2(num_tiles)
    drawn = stages is SamplingStage.DRAWN
    scratch = _scratch(num_rows, num_tiles, drawn, logits.device)
    every = (num_rows, num_tiles)
    source = (logits, logits.stride(0), vocab_size, num_tiles, rows)
    params = (table.integers, table.integers.stride(0), table.floats, table.floats.stride(0))
    launch(_tile_maximum, every, *source, *scratch, TILE=_TILE, DRAWN=drawn, num_warps=_WARPS)
    launch(
        _weigh, every if drawn else (num_rows, 1),
        *source, *params, *scratch, tokens, finite,
        TILE=_TILE, TILES=tiles, DRAWN=drawn, num_warps=_WARPS,
    )  # fmt: skip
    if drawn:
        launch(
            _shortlist, every,
            *source, *params[2:], *scratch, TILE=_TILE, TILES=tiles, CAPACITY=_MAX_CANDIDATES, num_warps=_WARPS,
        )  # fmt: skip
        launch(
            _draw, (num_rows,),
            *source, *params, *scratch, positions, tokens, finite,
            TILE=_TILE, TILES=tiles, CAPACITY=_MAX_CANDIDATES, num_warps=2 * _WARPS,
        )  # fmt: skip
    return Sampled(tokens, finite)


def _scratch(num_rows: int, num_tiles: int, drawn: bool, device: torch.device) -> _Scratch:
    """Greedy batches get empty tensors for what only draws need."""
    drawn_rows = num_rows if drawn else 0
    return _Scratch(
        best_keys=torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device),
        lowest=torch.empty(drawn_rows, num_tiles, dtype=torch.float32, device=device),
        highest=torch.empty(num_rows, dtype=torch.float32, device=device),
        weights=torch.empty(num_rows, num_tiles, dtype=torch.int64, device=device),
        counts=torch.empty(drawn_rows, BINS.value, dtype=torch.int32, device=device),
        sure_weights=torch.empty(drawn_rows, num_tiles, dtype=torch.int64, device=device),
        stats=torch.empty(drawn_rows, _NUM_STATS.value, dtype=torch.int64, device=device),
        listed=torch.empty(drawn_rows, _MAX_CANDIDATES, dtype=torch.int32, device=device),
    )


@triton.jit
def _tile_maximum(
    logits, logits_stride, vocab_size, num_tiles, rows,
    best_keys, lowest, highest, weights, counts, sure_weights, stats, listed,
    TILE: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """The largest key of a tile; also initialises the counters of later launches."""
    at = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tl.load(rows + at) < 0:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + at * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    order = order_of(values)
    best = tl.max(order)
    best_id = tl.min(tl.where(order == best, ids, vocab_size))
    tl.store(best_keys + at * num_tiles + tile, key_of(best, best_id))
    if DRAWN:
        above = tl.where(values > float("-inf"), values, float("inf"))
        tl.store(lowest + at * num_tiles + tile, tl.min(above))
        if tile == 0:
            tl.store(counts + at * BINS + tl.arange(0, BINS), tl.zeros([BINS], dtype=tl.int32))
            tl.store(stats + at * _NUM_STATS + _COUNT, 0)
            tl.store(stats + at * _NUM_STATS + _LISTED, 0)
            tl.store(stats + at * _NUM_STATS + _LOW, -(LOWEST_KEY + 1))
            tl.store(stats + at * _NUM_STATS + _HIGH, LOWEST_KEY)
            tl.store(stats + at * _NUM_STATS + _COUNTED, 0)


@triton.jit
def _is_filtered(integers, floats, vocab_size):
    """Whether top-k or top-p may drop tokens. `integers` and `floats` are the row's line in the table."""
    return (tl.load(integers + TOP_K) < vocab_size) | (tl.load(floats + TOP_P) < 1.0)


@triton.jit
def _scale(lowest, highest, temperature, num_tiles, TILES: tl.constexpr):
    """Bins per exponent. `lowest` is the row's line of tiles."""
    tiles = tl.arange(0, TILES)
    row_lowest = tl.min(tl.load(lowest + tiles, mask=tiles < num_tiles, other=float("inf")))
    return bins_per_exponent(highest, row_lowest, temperature)


@triton.jit
def _weigh(
    logits, logits_stride, vocab_size, num_tiles, rows,
    integers, integers_stride, floats, floats_stride,
    best_keys, lowest, highest, weights, counts, sure_weights, stats, listed,
    tokens, finite,
    TILE: tl.constexpr, TILES: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """The row's most likely token; then, of a random row, the weight of one tile and its histogram."""
    at = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(rows + at)
    if row < 0:  # every tile writes the same
        tl.store(tokens + at, 0)
        tl.store(finite + at, False)
        return
    tiles = tl.arange(0, TILES)
    best = tl.max(tl.load(best_keys + at * num_tiles + tiles, mask=tiles < num_tiles, other=LOWEST_KEY))
    row_finite = is_finite(best)
    row_highest = logit_of(best)
    if tile == 0:
        tl.store(tokens + at, tl.where(row_finite, id_of(best), 0))
        tl.store(finite + at, row_finite)
        tl.store(highest + at, row_highest)
    if DRAWN:
        integers += row * integers_stride
        floats += row * floats_stride
        if row_finite & (tl.load(integers + IS_RANDOM) != 0):
            temperature = tl.load(floats + TEMPERATURE).to(tl.float32)
            least = least_weight(tl.load(floats + MIN_P))
            ids = tile * TILE + tl.arange(0, TILE)
            values = tl.load(logits + at * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
            exponents = exponents_of(values, row_highest, temperature)
            tl.store(weights + at * num_tiles + tile, tl.sum(weights_of(exponents, least)))
            if _is_filtered(integers, floats, vocab_size):
                scale = _scale(lowest + at * num_tiles, row_highest, temperature, num_tiles, TILES)
                found = tl.histogram(bins_of(exponents, scale), BINS)
                tl.atomic_add(counts + at * BINS + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")
                stats += at * _NUM_STATS
                if is_last(stats + _COUNTED, num_tiles):
                    _store_bracket(
                        counts + at * BINS, weights + at * num_tiles, num_tiles, stats, scale,
                        tl.load(integers + TOP_K), tl.load(floats + TOP_P), least, vocab_size, TILES,
                    )  # fmt: skip


@triton.jit
def _store_bracket(
    counts, weights, num_tiles, stats, scale, top_k, top_p, least, vocab_size, TILES: tl.constexpr
):  # fmt: skip
    """The bins in which top-k and top-p end, once all tiles are counted. `counts`, `weights`, `stats`: of the row."""
    tiles, bins = tl.arange(0, TILES), tl.arange(0, BINS)
    total = tl.sum(tl.load(weights + tiles, mask=tiles < num_tiles, other=0, cache_modifier=".cg"))
    by_bin = tl.load(counts + bins, cache_modifier=".cg")  # written by other programs of this launch
    first, last = find_bracket(by_bin, scale, total, top_k, top_p, least, vocab_size)
    among = (bins >= first) & (bins <= last)
    tl.store(stats + _FIRST, first.to(tl.int64))
    tl.store(stats + _LAST, last.to(tl.int64))
    tl.store(stats + _COUNT, tl.sum(tl.where(among, by_bin, 0)).to(tl.int64))
    tl.store(stats + _SURE, tl.sum(tl.where(bins < first, by_bin, 0)).to(tl.int64))


@triton.jit
def _shortlist(
    logits, logits_stride, vocab_size, num_tiles, rows,
    floats, floats_stride,
    best_keys, lowest, highest, weights, counts, sure_weights, stats, listed,
    TILE: tl.constexpr, TILES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Of one tile of a filtered row: the weight of the tokens surely kept, and the candidates onto the list."""
    at = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(rows + at)
    if row < 0:
        return
    stats += at * _NUM_STATS
    if tl.load(stats + _COUNT) == 0:  # an unfiltered row
        return
    floats += row * floats_stride
    row_highest = tl.load(highest + at)
    temperature = tl.load(floats + TEMPERATURE).to(tl.float32)
    scale = _scale(lowest + at * num_tiles, row_highest, temperature, num_tiles, TILES)
    first, last = tl.load(stats + _FIRST).to(tl.int32), tl.load(stats + _LAST).to(tl.int32)

    ids = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + at * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    exponents = exponents_of(values, row_highest, temperature)
    bins = bins_of(exponents, scale)
    weight = weights_of(exponents, least_weight(tl.load(floats + MIN_P)))
    tl.store(sure_weights + at * num_tiles + tile, tl.sum(tl.where(bins < first, weight, 0)))

    among = (bins >= first) & (bins <= last) & (ids < vocab_size)
    num_among = tl.sum(among.to(tl.int64))
    if num_among > 0:
        start = tl.atomic_add(stats + _LISTED, num_among, sem="relaxed")
        places = start + tl.cumsum(among.to(tl.int32), 0) - 1
        tl.store(listed + at * CAPACITY + places, ids, mask=among & (places < CAPACITY))
        keys = key_of(order_of(values), ids)
        tl.atomic_min(stats + _LOW, tl.min(tl.where(among, keys, -(LOWEST_KEY + 1))), sem="relaxed")
        tl.atomic_max(stats + _HIGH, tl.max(tl.where(among, keys, LOWEST_KEY)), sem="relaxed")


@triton.jit(do_not_specialize=["num_tiles"])  # Triton 3.6 fails on a search over one tile
def _draw(
    logits, logits_stride, vocab_size, num_tiles, rows,
    integers, integers_stride, floats, floats_stride,
    best_keys, lowest, highest, weights, counts, sure_weights, stats, listed,
    positions, tokens, finite,
    TILE: tl.constexpr, TILES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """One random row: its random number, the tile it falls into, and the token in that tile."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    if row < 0:
        return
    integers += row * integers_stride
    floats += row * floats_stride
    if tl.load(finite + at) == 0:
        return
    if tl.load(integers + IS_RANDOM) == 0:
        return
    logits += at * logits_stride
    listed += at * CAPACITY
    row_highest = tl.load(highest + at)
    temperature = tl.load(floats + TEMPERATURE).to(tl.float32)
    least = least_weight(tl.load(floats + MIN_P))
    tiles = tl.arange(0, TILES)
    by_tile = tl.load(weights + at * num_tiles + tiles, mask=tiles < num_tiles, other=0)
    total = tl.sum(by_tile)
    last_key = tl.full([], LOWEST_KEY, dtype=tl.int64)
    top_key = tl.full([], LOWEST_KEY, dtype=tl.int64)
    count = tl.zeros([], dtype=tl.int64)
    num_listed = tl.zeros([], dtype=tl.int64)
    stats += at * _NUM_STATS
    num_candidates = tl.load(stats + _COUNT)
    if num_candidates > 0:
        by_tile = tl.load(sure_weights + at * num_tiles + tiles, mask=tiles < num_tiles, other=0)
        num_listed = tl.where(num_candidates <= CAPACITY, num_candidates, 0)
        count = tl.where(num_candidates <= CAPACITY, num_candidates, vocab_size)
        top_key = tl.load(stats + _HIGH) + 1
        last_key, total = _last_kept(
            logits, listed, count, num_listed, row_highest, temperature, least,
            tl.load(stats + _LOW), top_key, num_candidates, tl.load(stats + _SURE), tl.sum(by_tile), total,
            tl.load(integers + TOP_K), tl.load(floats + TOP_P), vocab_size,
        )  # fmt: skip
    chance = uniform(tl.load(integers + SEED), tl.load(integers + INDEX), tl.load(positions + at))
    goal = tl.minimum((chance * total.to(tl.float64)).to(tl.int64), total - 1)
    tile, before = _find_tile(
        logits, listed, count, num_listed, row_highest, temperature, least,
        last_key, top_key, goal, by_tile, num_tiles, TILE, TILES,
    )  # fmt: skip
    ids = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    kept = (ids < vocab_size) & (key_of(order_of(values), ids) >= last_key)
    inside = tl.where(kept, weights_of(exponents_of(values, row_highest, temperature), least), 0)
    passed = tl.sum((before + tl.cumsum(inside, 0) <= goal).to(tl.int32))
    tl.store(tokens + at, tl.minimum(tile * TILE + passed, vocab_size - 1))


@triton.jit
def _find_tile(
    logits, listed, count, num_listed, highest, temperature, least,
    last_key, top_key, goal, by_tile, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """(the first tile whose cumulative weight exceeds the goal, the weight of all tiles before it).

    by_tile: [TILES] int64, the weights of tokens surely kept; the candidates from `last_key` up are added.
    """
    tiles = tl.arange(0, TILES)
    low = tl.zeros([], dtype=tl.int32)
    high = low + num_tiles - 1
    before = tl.zeros([], dtype=tl.int64)
    while low < high:
        middle = (low + high) // 2
        _, among = measure(
            logits, listed, count, num_listed, highest, temperature, least, last_key, top_key, (middle + 1) * TILE
        )
        reached = among + tl.sum(tl.where(tiles <= middle, by_tile, 0))
        beyond = reached > goal
        high = tl.where(beyond, middle, high)
        low = tl.where(beyond, low, middle + 1)
        before = tl.where(beyond, before, reached)
    return low, before


@triton.jit
def _last_kept(
    logits, listed, count, num_listed, highest, temperature, least,
    low, high, num_candidates, num_sure, sure_weight, total, top_k, top_p, vocab_size,
):  # fmt: skip
    """(last key that may be drawn, weight of all such keys): top-k first, then top-p of the remaining tokens."""
    number = num_candidates
    if top_k < num_sure + num_candidates:
        low, number = find_last(
            logits, listed, count, num_listed, highest, temperature, least,
            low, high, number, top_k - num_sure, vocab_size, BY_NUMBER=True,
        )  # fmt: skip
    _, weight = measure(logits, listed, count, num_listed, highest, temperature, least, low, high, vocab_size)
    left = tl.where(top_k <= num_sure + num_candidates, sure_weight + weight, total)
    if top_p < 1.0:
        goal = tl.minimum(tl.ceil(left.to(tl.float64) * top_p).to(tl.int64), left)
        low, number = find_last(
            logits, listed, count, num_listed, highest, temperature, least,
            low, high, number, goal - sure_weight, vocab_size, BY_NUMBER=False,
        )  # fmt: skip
        _, weight = measure(logits, listed, count, num_listed, highest, temperature, least, low, high, vocab_size)
    return low, sure_weight + weight
