"""Prefill attention: many new tokens per sequence over the paged store, causal, online softmax. Bound by tensor cores.

One program: some tokens of one sequence with all query heads of one key head. Packed like this they fill a tile of rows
even when tokens are few, and little is wasted on the diagonal. Where that makes too few programs for the GPU, several
share the keys of a tile (split-KV): how many depends on the tiles that the device finds, because a CUDA graph has less
tokens than its shape. The grid follows from host integers: every sequence has one tile more than its tokens could need,
and a program finds its sequence itself. Does not write keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.softmax_tile import (
    LOWEST,
    SoftmaxScale,
    block_ids,
    key_offsets,
    load_rows,
    normalize,
    online_softmax_update,
    qk_scores,
)
from quire.kernels.gpu.attention.split_merge import (
    MIN_STAGES,
    SplitScratch,
    attention_bytes,
    is_last,
    merge_partials,
    shared_memory_budget,
    store_partial,
)
from quire.kernels.gpu.launch import launch, next_power_of_2
from quire.kernels.interface import AttentionRule

_SMALLEST_DOT = 16  # minimum rows of a tensor-core matmul
_SEARCHED_AT_ONCE = 64  # sequences
_PROGRAMS_PER_SM = 2  # as many as fit
_MIN_SHARED = 256  # keys per split at least
_MAX_SPLITS = 16
_USUAL_ROWS = 64  # of a tile


class PrefillTiles(NamedTuple):
    """Tile sizes. The defaults come from `_tiles`; others are for measuring and testing."""

    rows: int  # (token, query head) pairs
    keys: int
    warps: int
    stages: int
    splits: int = 1  # the most split-KV programs of a tile; 1: tiles are not shared
    min_tiles: int = 1  # the fewest key tiles of a program
    slots: int = 1024  # programs that shared tiles are split for; with as many tiles, none is


def _tiles(num_tokens: int, group: int, dim: int, element_bytes: int, budget: int) -> PrefillTiles:
    """For `num_tokens` tokens per sequence. A tile has at least one token with all query heads of a key head.

    The measured tiles, or smaller ones where those exceed the shared-memory budget.
    """
    fewest = max(_SMALLEST_DOT, next_power_of_2(group))
    measured = _measured_tiles(num_tokens, group, fewest, dim, element_bytes)
    rows = max(fewest, min(_USUAL_ROWS, measured.rows))
    warps = measured.warps if rows == measured.rows else 4
    smaller = [PrefillTiles(rows, keys, warps, MIN_STAGES) for keys in (64, 32, 16) if keys <= measured.keys]
    fitting = (tiles for tiles in (measured, *smaller) if _shared_bytes(tiles, dim, element_bytes) <= budget)
    return next(fitting, smaller[-1])


def _shared_bytes(tiles: PrefillTiles, dim: int, element_bytes: int) -> int:
    dim_padded = max(_SMALLEST_DOT, next_power_of_2(dim))
    return attention_bytes(tiles.rows, tiles.keys, dim_padded, element_bytes, tiles.stages)


def _measured_tiles(num_tokens: int, group: int, fewest: int, dim: int, element_bytes: int) -> PrefillTiles:
    """`fewest`: rows. On an H200 with heads of 128 (docs/performance/ledger): two programs of 64 rows beat one of
    128."""
    rows = max(fewest, min(_USUAL_ROWS if dim <= 128 else 128, next_power_of_2(num_tokens * group)))
    if element_bytes > 2:  # no tensor cores: correct, not fast
        return PrefillTiles(max(fewest, min(rows, 32)), 32 if dim <= 128 else 16, 8, 2)
    if rows >= 128:
        return PrefillTiles(rows, 64, 8, 2)
    return PrefillTiles(rows, 64 if dim <= 128 else 32, 4, 3)


def batch_invariant_tiles(group: int, dim: int, element_bytes: int) -> PrefillTiles:
    """The same for any number of tokens and without split-KV: the keys of a query are added in one order."""
    return _tiles(_USUAL_ROWS, group, dim, element_bytes, shared_memory_budget())


@triton.jit
def _find_sequence(query_starts, first_token, num_sequences, tile, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The last sequence whose tiles start at or before this one. They start at start // TOKENS + sequence."""
    found = -1
    for start in range(0, num_sequences, AT_ONCE):
        sequences = start + tl.arange(0, AT_ONCE)
        starts = tl.load(query_starts + sequences, mask=sequences < num_sequences, other=0) - first_token
        begun = (starts // TOKENS + sequences <= tile) & (sequences < num_sequences)
        found += tl.sum(begun.to(tl.int32), 0)
    return found


@triton.jit
def _end_of_tiles(query_starts, first_token, num_sequences, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Behind the last tile that has tokens."""
    end = 0
    for start in range(0, num_sequences, AT_ONCE):
        sequences = start + tl.arange(0, AT_ONCE)
        present = sequences < num_sequences
        starts = tl.load(query_starts + sequences, mask=present, other=0)
        counts = tl.load(query_starts + sequences + 1, mask=present, other=0) - starts
        ends = (starts - first_token) // TOKENS + sequences + tl.cdiv(counts, TOKENS)
        end = tl.maximum(end, tl.max(tl.where(present & (counts > 0), ends, 0), 0))
    return end


@triton.jit
def _attend_keys(
    queries, places, keys, table, begin, end, lowest, num_keys, window, dims, rate, cap_rate,
    block_stride, side_stride, slot_stride, acc, running_max, running_sum,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Whole tiles from begin on; places: [rows], each query's position; lowest: the first key that any query sees;
    num_keys: visible to the last query. Unmasked if every query sees every key."""
    CHECKED: tl.constexpr = MASKED or dims.shape[0] != DIM
    in_tile = tl.arange(0, TILE)
    blocks = block_ids(table, begin, in_tile, num_keys, BLOCK_SIZE)
    for start in range(begin, end, TILE):
        positions = start + in_tile
        inside = positions < num_keys
        if MASKED and WINDOWED:
            inside = inside & (positions >= lowest)
        offsets = key_offsets(blocks, start, in_tile, block_stride, slot_stride, BLOCK_SIZE)
        blocks = block_ids(table, start + TILE, in_tile, num_keys, BLOCK_SIZE)  # prefetched: keys wait for no table
        scores = qk_scores(queries, load_rows(keys, offsets, inside, dims, DIM, CHECKED), cap_rate, CAPPED)
        if MASKED:
            visible = positions[None, :] <= places[:, None]
            if WINDOWED:
                visible = visible & (places[:, None] - positions[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        values = load_rows(keys + side_stride, offsets, inside, dims, DIM, CHECKED).to(queries.dtype)
        acc, running_max, running_sum = online_softmax_update(scores, values, rate, acc, running_max, running_sum)
    return acc, running_max, running_sum


@triton.jit
def _attend_tile(
    queries, places, first_place, last_place, begin, stop, keys, table, window, dims, rate, cap_rate,
    block_stride, side_stride, slot_stride,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Over the visible keys of [begin, stop): masked at the start of a window, unmasked, masked along the diagonal.
    Returns (acc, running maximum, running sum)."""
    running_max = tl.full([queries.shape[0]], LOWEST, tl.float32)
    running_sum = tl.zeros([queries.shape[0]], tl.float32)
    acc = tl.zeros([queries.shape[0], dims.shape[0]], tl.float32)
    num_keys = last_place + 1
    body, lowest = begin, 0
    if WINDOWED:  # no split-KV: all visible keys
        lowest = tl.maximum(first_place - window + 1, 0)
        first_key = lowest // TILE * TILE  # tiles begin at the same keys for every query
        hidden = tl.maximum(last_place - window + 1 - first_key, 0)  # keys outside the window of some query
        body = first_key + tl.cdiv(hidden, TILE) * TILE
        acc, running_max, running_sum = _attend_keys(
            queries, places, keys, table, first_key, tl.minimum(body, num_keys), lowest, num_keys, window, dims,
            rate, cap_rate, block_stride, side_stride, slot_stride, acc, running_max, running_sum,
            TILE, BLOCK_SIZE, DIM, True, True, CAPPED,
        )  # fmt: skip
    edge = tl.minimum(body + tl.maximum(first_place + 1 - body, 0) // TILE * TILE, stop)
    acc, running_max, running_sum = _attend_keys(
        queries, places, keys, table, body, edge, lowest, num_keys, window, dims, rate, cap_rate,
        block_stride, side_stride, slot_stride, acc, running_max, running_sum,
        TILE, BLOCK_SIZE, DIM, False, WINDOWED, CAPPED,
    )  # fmt: skip
    acc, running_max, running_sum = _attend_keys(
        queries, places, keys, table, edge, stop, lowest, num_keys, window, dims, rate, cap_rate,
        block_stride, side_stride, slot_stride, acc, running_max, running_sum,
        TILE, BLOCK_SIZE, DIM, True, WINDOWED, CAPPED,
    )  # fmt: skip
    return acc, running_max, running_sum


@triton.jit(
    do_not_specialize=["first_token", "num_sequences", "table_stride", "window", "min_tiles", "max_splits", "slots"],
    do_not_specialize_on_alignment=["tables", "query_starts", "context_lengths"],
)
def _prefill_kernel(
    query, store, tables, query_starts, context_lengths, output, partials, maxima, sums, arrivals,
    first_token, num_sequences, query_row_stride, query_head_stride, block_stride, side_stride, slot_stride,
    head_stride, table_stride, output_stride, window, rate, cap_rate, min_tiles, max_splits, slots,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One program: a tile with one key head, or a split of it."""
    end, splits = tl.num_programs(0) // KV_HEADS, 1
    if SHARED:
        end = _end_of_tiles(query_starts, first_token, num_sequences, TOKENS, AT_ONCE)
        splits = tl.minimum(tl.maximum(slots // tl.maximum(end * KV_HEADS, 1), 1), max_splits)
    tile = end - 1 - tl.program_id(0) // (KV_HEADS * splits)  # the last tokens have most keys: scheduled first
    if tile < 0:
        return
    kv_head, split = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS % splits
    sequence = _find_sequence(query_starts, first_token, num_sequences, tile, TOKENS, AT_ONCE)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    first_query = (tile - (start - first_token) // TOKENS - sequence) * TOKENS
    last_query = tl.minimum(first_query + TOKENS, num_queries) - 1
    num_before = tl.load(context_lengths + sequence) - num_queries
    begin, stop, num_splits = 0, num_before + last_query + 1, 1
    if SHARED:
        num_tiles = tl.cdiv(stop, TILE)
        share = tl.maximum(tl.cdiv(num_tiles, splits), min_tiles)
        num_splits = tl.cdiv(num_tiles, share)
        begin = split * share * TILE
        stop = tl.minimum(begin + share * TILE, stop)
    if (first_query >= num_queries) | (split >= num_splits):
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    queries_of_rows = tl.minimum(first_query + rows // GROUP, last_query)  # surplus rows repeat the last
    tokens = (start + queries_of_rows).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    query_offsets = tokens[:, None] * query_row_stride + heads[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(query + query_offsets, mask=dims[None, :] < DIM, other=0.0)
    acc, running_max, running_sum = _attend_tile(
        queries, num_before + queries_of_rows, num_before + first_query, num_before + last_query, begin, stop,
        store + kv_head * head_stride, tables + sequence * table_stride, window, dims, rate, cap_rate,
        block_stride, side_stride, slot_stride, TILE, BLOCK_SIZE, DIM, WINDOWED, CAPPED,
    )  # fmt: skip
    own = (first_query + rows // GROUP <= last_query)[:, None] & (dims[None, :] < DIM)
    targets = output + tokens[:, None] * output_stride + heads[:, None] * DIM + dims[None, :]
    if num_splits == 1:
        tl.store(targets, normalize(acc, running_sum).to(output.dtype.element_ty), mask=own)
    elif SHARED:
        pair = tile * KV_HEADS + kv_head
        first_partial = pair * splits * ROWS
        own_partial = first_partial + split * ROWS
        store_partial(partials, maxima, sums, own_partial, acc, running_max, running_sum, rows, dims, ROWS, DIM)
        if is_last(arrivals + pair, num_splits):
            merged = merge_partials(partials, maxima, sums, first_partial, num_splits, rows, dims, 1, ROWS, DIM)
            tl.store(targets, merged.to(output.dtype.element_ty), mask=own)


def prefill_tiles(
    query: Tensor, kv_layer: Tensor, tables: Tensor, rule: AttentionRule, first_token: int
) -> PrefillTiles:
    """Tile sizes for these chunks; the scratch is sized by them. One chunk may have all tokens."""
    num_tokens, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_layer.shape
    group, num_tokens = heads // kv_heads, num_tokens - first_token
    tiles = _tiles(num_tokens, group, dim, kv_layer.element_size(), shared_memory_budget())
    if rule.window or not query.is_cuda:  # a window bounds the keys; the interpreter runs one program at a time
        return tiles
    num_sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    slots = _PROGRAMS_PER_SM * num_sms
    if -(-num_tokens * group // tiles.rows) * kv_heads > slots:
        return tiles
    min_tiles = -(-_MIN_SHARED // tiles.keys)
    most = -(-tables.shape[1] * block_size // (min_tiles * tiles.keys))
    return tiles._replace(splits=max(min(most, _MAX_SPLITS), 1), min_tiles=min_tiles, slots=slots)


def prefill_scratch(
    query: Tensor, kv_heads: int, num_sequences: int, tiles: PrefillTiles, first_token: int
) -> SplitScratch:
    num_tokens, heads, dim = query.shape
    num_tiles = _num_tiles(num_tokens - first_token, num_sequences, tiles, heads // kv_heads)
    num_counters = num_tiles * kv_heads
    num_shares = min(num_counters * tiles.splits, max(num_counters, tiles.slots))
    return SplitScratch.allocate(num_shares * tiles.rows, num_counters, dim, query.device)


def _num_tiles(num_tokens: int, num_sequences: int, tiles: PrefillTiles, group: int) -> int:
    return num_tokens // (tiles.rows // group) + num_sequences


def prefill_attention(
    query: Tensor,  # [tokens, heads, dim], strided
    kv_layer: Tensor,  # [blocks, 2, block_size, kv_heads, dim], strided
    tables: Tensor,  # [sequences, width] int32
    query_starts: Tensor,  # [sequences + 1] int32: sequence s has tokens query_starts[s] to query_starts[s + 1]
    context_lengths: Tensor,  # [sequences] int32
    rule: AttentionRule,
    output: Tensor,  # [tokens, heads * dim]; tokens of no sequence are left as they are
    first_token: int = 0,  # query_starts[0], as the host knows it
    scratch: SplitScratch | None = None,  # for split-KV
    tiles: PrefillTiles | None = None,
) -> None:
    """Causal attention of each sequence's queries over its keys, into output."""
    num_tokens, heads, dim = query.shape
    num_sequences = len(context_lengths)
    _, _, block_size, kv_heads, _ = kv_layer.shape
    assert query.stride(2) == kv_layer.stride(4) == tables.stride(1) == output.stride(1) == 1
    group = heads // kv_heads
    tiles = tiles or prefill_tiles(query, kv_layer, tables, rule, first_token)
    tokens_per_tile = tiles.rows // group
    assert tokens_per_tile > 0 and (tiles.splits == 1 or not rule.window), (tiles, group)
    scratch_tensors = (output,) * 4  # not read
    if tiles.splits > 1:
        scratch = scratch or prefill_scratch(query, kv_heads, num_sequences, tiles, first_token)
        scratch_tensors = (scratch.partials, scratch.maxima, scratch.sums, scratch.arrivals)
    rates = SoftmaxScale.of(rule)
    num_programs = _num_tiles(num_tokens - first_token, num_sequences, tiles, group) * kv_heads
    if tiles.splits > 1:
        num_programs = min(num_programs * tiles.splits, max(num_programs, tiles.slots))
    launch(
        _prefill_kernel, (num_programs,),
        query, kv_layer, tables, query_starts, context_lengths, output, *scratch_tensors,
        first_token, num_sequences, query.stride(0), query.stride(1), *kv_layer.stride()[:4],
        tables.stride(0), output.stride(0), rule.window, rates.rate, rates.cap_rate, tiles.min_tiles, tiles.splits,
        tiles.slots,
        ROWS=tiles.rows, TOKENS=tokens_per_tile, TILE=tiles.keys, AT_ONCE=_SEARCHED_AT_ONCE,
        BLOCK_SIZE=block_size, GROUP=group, DIM=dim, DIM_PADDED=max(_SMALLEST_DOT, next_power_of_2(dim)),
        KV_HEADS=kv_heads, WINDOWED=rule.window > 0, CAPPED=rule.softcap > 0, SHARED=tiles.splits > 1,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
