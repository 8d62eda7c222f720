"""Decode attention: one query per row, or a few, over paged keys, split-KV, online softmax. Bound by reading keys.

One program: all queries of a row with all heads of one key head, so every key is read once, and one split of a row's
keys, found in the list that was made at the start of the step. A row with drafts has several queries, the last of which
sees all keys: with four heads per key head, four queries fill the tile that one query pads. Does not depend on chunks
or on how rows are split; does not write keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.decode_schedule import BEGIN, COUNT, END, FIRST, NUM_FIELDS, ROW
from quire.kernels.gpu.attention.softmax_tile import (
    LOWEST,
    SoftmaxScale,
    block_ids,
    block_start,
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
    merge_splits,
    shared_memory_budget,
    store_partial,
)
from quire.kernels.gpu.launch import launch, launch_with_pdl, next_power_of_2, pdl_wait
from quire.kernels.interface import AttentionRule

_SMALLEST_DOT = 16  # minimum rows of a tensor-core matmul
_MEASURED_SMS = 132
_FEW = 1.46  # (row, key head) pairs per SM
_TILE_BYTES = 16384  # of keys, and as many of values
_QUERY_BYTES = 65536  # of all query heads of one key head
_MERGED_AT_ONCE = 8192  # float32 values held by the merging program
_MERGING_WARPS = 4  # of rows with several queries: measured on an H200 (docs/performance/ledger, section 60)
_WARP_VALUES = 4096  # float32 accumulator values that fit in the registers of a warp
_MAX_WARPS = 8


class DecodeTiles(NamedTuple):
    """Tile sizes. The defaults come from `decode_tiles`; others are for measuring and testing."""

    keys: int  # per tile
    warps: int
    stages: int  # software-pipeline stages
    slots: int  # programs that run at the same time
    overhead: float  # cost of a program besides its tiles, in tiles


def _tiles(pairs: int, dim: int, element_bytes: int, num_sms: int) -> DecodeTiles:
    """`pairs`: rows times key heads. Measured on an H200 (docs/performance/ledger, section 29).

    With four stages two programs fit on an SM, with three stages three: unsplit rows then fill the GPU once or twice,
    and each program has many loads in flight.
    """
    keys = _tile_keys(dim, element_bytes)
    two, three = 2 * num_sms, 3 * num_sms
    few = pairs <= _FEW * num_sms
    if element_bytes > 2:  # no tensor cores: correct, not fast
        return DecodeTiles(keys, 8, 2, two, 3.0)
    if few and dim <= 128:
        return DecodeTiles(keys, 2, 3, three, 3.0)
    if (dim > 64 and not few and pairs <= two) or three < pairs <= 2 * two:
        return DecodeTiles(keys, 4, 4, two, 5.5)
    return DecodeTiles(keys, 4, 3, three, 4.0)


def _tile_keys(dim: int, element_bytes: int) -> int:
    return _TILE_BYTES // (next_power_of_2(dim) * element_bytes) if element_bytes <= 2 else _SMALLEST_DOT


def max_query_heads(dim: int, element_bytes: int) -> int:
    """The most query heads per key head, of all queries of a row: one program has all of them, in decodes and prefills,
    in shared memory beside tiles of keys."""
    dim_padded = max(_SMALLEST_DOT, next_power_of_2(dim))
    keys, most = _tile_keys(dim, element_bytes), _QUERY_BYTES // (dim_padded * element_bytes)
    while most and attention_bytes(most, keys, dim_padded, element_bytes, MIN_STAGES) > shared_memory_budget():
        most //= 2
    return most


def _fitting_stages(tiles: DecodeTiles, rows: int, dim: int, element_bytes: int, budget: int) -> int:
    """As many as were measured, or as fit in shared memory."""
    stages = tiles.stages
    while stages > MIN_STAGES and attention_bytes(rows, tiles.keys, dim, element_bytes, stages) > budget:
        stages -= 1
    return stages


@triton.jit
def _attend_split(
    query, keys, table, blocks, start, begin, end, seen_from, seen_to, dims,
    rate, cap_rate, block_stride, side_stride, slot_stride,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """query: [queries * heads, dims] over the keys from begin to end, in tiles from start on; blocks: of the first
    tile. Several queries see different keys: each those from seen_from to seen_to.

    Returns (acc, running maximum, running sum).
    """
    running_max = tl.full([query.shape[0]], LOWEST, tl.float32)
    running_sum = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros([query.shape[0], dims.shape[0]], tl.float32)
    in_tile = tl.arange(0, TILE)
    for place in range(start, end, TILE):
        positions = place + in_tile
        inside = (positions >= begin) & (positions < end)
        offsets = key_offsets(blocks, place, in_tile, block_stride, slot_stride, BLOCK_SIZE)
        blocks = block_ids(table, place + TILE, in_tile, end, BLOCK_SIZE)  # prefetched: keys wait for no table
        scores = qk_scores(query, load_rows(keys, offsets, inside, dims, DIM, True), cap_rate, CAPPED)
        visible = inside[None, :]
        if SEVERAL:
            visible = visible & (positions[None, :] >= seen_from[:, None]) & (positions[None, :] < seen_to[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        values = load_rows(keys + side_stride, offsets, inside, dims, DIM, True).to(query.dtype)
        acc, running_max, running_sum = online_softmax_update(scores, values, rate, acc, running_max, running_sum)
    return acc, running_max, running_sum


@triton.jit
def _tile_places(kv_head, tile_rows, token_stride, head_stride, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Of each row of the tile, its place behind the first query of the row."""
    if QUERIES > 1:
        places = (tile_rows // GROUP) * token_stride + (kv_head * GROUP + tile_rows % GROUP) * head_stride
    else:
        places = (kv_head * GROUP + tile_rows) * head_stride
    return places


@triton.jit(
    do_not_specialize=["table_stride", "window"],  # one compilation serves every batch
    do_not_specialize_on_alignment=["tables", "query_starts", "lengths"],
)
def _decode_kernel(
    query, store, tables, splits, query_starts, lengths, output, partials, maxima, sums, arrivals,
    query_row_stride, query_head_stride, block_stride, side_stride, slot_stride, head_stride,
    table_stride, output_stride, window, rate, cap_rate,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_FIELDS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    ROWS_PADDED: tl.constexpr, ROWS_TIGHT: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a key head with its GROUP of query heads for up to QUERIES queries, and one split of a row.

    The list of splits was written at the start of the step and is read before `pdl_wait`: dependent loads.
    """
    kv_head, number = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    split = splits + number * NUM_FIELDS
    row, begin, end = tl.load(split + ROW), tl.load(split + BEGIN), tl.load(split + END)
    first, count = tl.load(split + FIRST), tl.load(split + COUNT)
    if row < 0:
        return
    start = block_start(begin, TILE, BLOCK_SIZE)
    table = tables + row * table_stride
    blocks = block_ids(table, start, tl.arange(0, TILE), end, BLOCK_SIZE)
    pdl_wait(PDL)

    ROWS: tl.constexpr = QUERIES * GROUP  # of the tile: the heads of the first query, then those of the second, …
    tile_rows = tl.arange(0, ROWS_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    first_query, num_queries, seen_from, seen_to = row, 1, tile_rows, tile_rows
    if QUERIES > 1:
        first_query = tl.load(query_starts + row)
        num_queries = tl.load(query_starts + row + 1) - first_query
        seen_to = tl.load(lengths + row) - (num_queries - 1 - tile_rows // GROUP)
        seen_from = tl.where(window > 0, seen_to - window, 0)
    present = (tile_rows < num_queries * GROUP)[:, None] & (dims < DIM)[None, :]
    places = _tile_places(kv_head, tile_rows, query_row_stride, query_head_stride, GROUP, QUERIES)
    first_place = query + first_query.to(tl.int64) * query_row_stride
    queries = tl.load(first_place + places[:, None] + dims[None, :], mask=present, other=0.0)
    acc, running_max, running_sum = _attend_split(
        queries, store + kv_head * head_stride, table, blocks, start, begin, end, seen_from, seen_to, dims,
        rate, cap_rate, block_stride, side_stride, slot_stride, TILE, BLOCK_SIZE, DIM, CAPPED, QUERIES > 1,
    )  # fmt: skip

    target = output + first_query.to(tl.int64) * output_stride
    if count == 1:
        answer = normalize(acc, running_sum).to(output.dtype.element_ty)
        output_places = _tile_places(kv_head, tile_rows, output_stride, DIM, GROUP, QUERIES)
        tl.store(target + output_places[:, None] + dims[None, :], answer, mask=present)
    else:
        first_partial = (kv_head * (tl.num_programs(0) // KV_HEADS) + first) * ROWS
        own_partial = first_partial + (number - first) * ROWS
        store_partial(partials, maxima, sums, own_partial, acc, running_max, running_sum, tile_rows, dims, ROWS, DIM)
        if is_last(arrivals + row * KV_HEADS + kv_head, count):
            tight = tl.arange(0, ROWS_TIGHT)
            merged = merge_splits(
                partials, maxima, sums, first_partial, count, tight, dims, AT_ONCE, ROWS, DIM, QUERIES > 1
            )
            merged_places = _tile_places(kv_head, tight, output_stride, DIM, GROUP, QUERIES)
            inside = (tight < num_queries * GROUP)[:, None] & (dims < DIM)[None, :]
            tl.store(target + merged_places[:, None] + dims[None, :], merged.to(output.dtype.element_ty), mask=inside)


class RowQueries(NamedTuple):
    """Rows with several queries: the last tokens of each row, of which the last sees all keys."""

    starts: Tensor  # [rows + 1] int32: row r has queries starts[r] to starts[r + 1], or none
    lengths: Tensor  # [rows] int32: keys that its last query sees
    most: int  # queries of any row


def decode_tiles(rows: int, kv_layer: Tensor) -> DecodeTiles:
    """Tile sizes for this number of rows; the split-KV schedule needs them too."""
    num_sms = _MEASURED_SMS  # for the interpreter
    if kv_layer.is_cuda:
        num_sms = torch.cuda.get_device_properties(kv_layer.device).multi_processor_count
    _, _, _, kv_heads, dim = kv_layer.shape
    return _tiles(rows * kv_heads, dim, kv_layer.element_size(), num_sms)


def decode_scratch(query: Tensor, kv_heads: int, splits: Tensor, max_queries: int = 1) -> SplitScratch:
    _, heads, dim = query.shape
    num_partials = len(splits) * heads * max_queries
    return SplitScratch.allocate(num_partials, len(splits) * kv_heads, dim, query.device)


def decode_attention(
    query: Tensor,  # [rows, heads, dim], strided; [tokens, heads, dim] if rows have several queries
    kv_layer: Tensor,  # [blocks, 2, block_size, kv_heads, dim], strided
    tables: Tensor,  # [rows, width] int32
    splits: Tensor,  # [splits, fields] int32, of `list_splits`: all visible keys of all rows
    tiles: DecodeTiles,  # those that the splits were made for
    rule: AttentionRule,
    output: Tensor,  # as query, [..., heads * dim]; a row without keys becomes zeros
    scratch: SplitScratch | None = None,
    *,
    queries: RowQueries | None = None,  # None: one of each row
    pdl: bool = False,  # tables and splits are older than the previous launch: it may be overlapped
) -> None:
    """Each row's queries over the keys of its row, into output."""
    _, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_layer.shape
    assert query.stride(2) == kv_layer.stride(4) == tables.stride(1) == output.stride(1) == 1
    most = 1 if queries is None else queries.most
    scratch = scratch or decode_scratch(query, kv_heads, splits, most)
    num_splits = splits.shape[0]
    assert scratch.holds(num_splits * heads * most, num_splits * kv_heads, dim), splits.shape
    group = heads // kv_heads
    rows_tight, dim_padded = next_power_of_2(group * most), max(_SMALLEST_DOT, next_power_of_2(dim))
    rows_padded = max(_SMALLEST_DOT, rows_tight)
    warps = max(tiles.warps, min(_MAX_WARPS, rows_padded * dim_padded // _WARP_VALUES))
    if most > 1:
        warps = max(warps, _MERGING_WARPS)
    stages = _fitting_stages(tiles, rows_padded, dim_padded, kv_layer.element_size(), shared_memory_budget())
    rates = SoftmaxScale.of(rule)
    begin, constants = (launch_with_pdl, {}) if pdl else (launch, {"PDL": False})
    begin(
        _decode_kernel, (num_splits * kv_heads,),
        query, kv_layer, tables, splits,
        None if queries is None else queries.starts, None if queries is None else queries.lengths, output,
        scratch.partials, scratch.maxima, scratch.sums, scratch.arrivals,
        query.stride(0), query.stride(1), *kv_layer.stride()[:4], tables.stride(0), output.stride(0),
        rule.window, rates.rate, rates.cap_rate,
        TILE=tiles.keys,
        AT_ONCE=max(1, _MERGED_AT_ONCE // (rows_tight * dim_padded)),
        BLOCK_SIZE=block_size, NUM_FIELDS=NUM_FIELDS.value,
        KV_HEADS=kv_heads, GROUP=group, QUERIES=most, ROWS_PADDED=rows_padded, ROWS_TIGHT=rows_tight,
        DIM=dim, DIM_PADDED=dim_padded, CAPPED=rule.softcap > 0,
        num_warps=warps, num_stages=stages, **constants,
    )  # fmt: skip
