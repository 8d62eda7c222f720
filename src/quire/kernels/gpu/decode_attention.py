"""Attention of one query per row over its pages: what decoding spends its time on. Bound by reading keys and values.

A program takes all query heads of one key head, so every key is read once. When rows alone cannot fill the device, a
row's keys are split among several programs. How many there may be follows from host integers, which keys each takes
from the length on the device: one captured launch serves every length. Knows nothing of chunks or of writing keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.contract import AttentionRule
from quire.kernels.gpu.host_sizes import next_power_of_2
from quire.kernels.gpu.key_tile import (
    LOWEST,
    Rates,
    block_ids,
    block_start,
    divided,
    fold,
    key_offsets,
    load_rows,
    score,
)
from quire.kernels.gpu.launch import launch_early
from quire.kernels.gpu.overlap import wait_for_others
from quire.kernels.gpu.split_merge import SplitScratch, is_last, merge_parts, store_part

_SMALLEST_DOT = 16  # rows a tensor core takes

# Measured on an H200 (docs/performance/gpu.md): with up to so many pairs of a row and a key head, a row is shared by up
# to so many programs, each of which takes at least so many keys. More programs than the best for rows of one length:
# where lengths differ, the others wait for the longest. Many rows are taken longest first, which leaves little to wait.
_SPLITS = ((16, 64, 64), (32, 32, 128), (64, 16, 256), (256, 8, 512), (512, 4, 1024), (1024, 4, 2048))
_FEWEST_SPLITS = (2, 4096)
_MEASURED_PROCESSORS = 132
_TILE_BYTES = 16384  # of keys, and as many of values
_MERGED_AT_ONCE = 8192  # float32 values the merging program holds


class DecodeTiles(NamedTuple):
    """How the work is cut. The defaults come from `_tiles`; others are for measuring and testing."""

    keys: int  # a tile
    warps: int
    stages: int  # tiles in flight, one more than are waited for
    splits: int  # the most programs that share a row
    min_tiles: int  # the least that a program takes before a row is split


def _tiles(pairs: int, dim: int, element_bytes: int, max_keys: int, processors: int) -> DecodeTiles:
    """`pairs`: rows times key heads."""
    keys, warps, stages = _TILE_BYTES // (next_power_of_2(dim) * element_bytes), 2, 3
    if element_bytes > 2:  # no tensor cores: only right, not fast
        keys, warps, stages = 16, 8, 2
    fullness = pairs * _MEASURED_PROCESSORS / processors
    splits, min_keys = next((cut[1:] for cut in _SPLITS if fullness <= cut[0]), _FEWEST_SPLITS)
    useful = -(-max_keys // min_keys)
    return DecodeTiles(keys, warps, stages, min(splits, useful), -(-min_keys // keys))


@triton.jit
def _gather_keys(
    query, keys, table, blocks, first, begin, end, dims, rate, cap_rate, block_stride, side_stride, slot_stride,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """query: [members, dims] over the keys from begin to end, none before first; blocks: those of the first tile.

    Returns (gathered, maximum, sum).
    """
    running_max = tl.full([query.shape[0]], LOWEST, tl.float32)
    running_sum = tl.zeros([query.shape[0]], tl.float32)
    gathered = tl.zeros([query.shape[0], dims.shape[0]], tl.float32)
    in_tile = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        positions = start + in_tile
        inside = (positions >= first) & (positions < end)
        offsets = key_offsets(blocks, start, in_tile, block_stride, slot_stride, BLOCK_SIZE)
        blocks = block_ids(table, start + TILE, in_tile, end, BLOCK_SIZE)  # one tile ahead: keys wait for no table
        scores = score(query, load_rows(keys, offsets, inside, dims, DIM, True), cap_rate, CAPPED)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        values = load_rows(keys + side_stride, offsets, inside, dims, DIM, True).to(query.dtype)
        gathered, running_max, running_sum = fold(scores, values, rate, gathered, running_max, running_sum)
    return gathered, running_max, running_sum


@triton.jit(
    do_not_specialize=["table_stride", "window", "max_splits", "min_tiles"],  # one compilation serves every batch
    do_not_specialize_on_alignment=["tables", "context_lengths", "order"],
)
def _decode_kernel(
    query, store, tables, context_lengths, order, output, parts, maxima, sums, arrivals,
    query_row_stride, query_head_stride, block_stride, side_stride, slot_stride, head_stride,
    table_stride, output_stride, window, rate, cap_rate, max_splits, min_tiles,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, GROUP_TIGHT: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, ORDERED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a row, a key head with its GROUP of query heads, and one share of the row's keys.

    Which keys those are was written when the step began, and is read before the wait: one load after the other.
    """
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ORDERED:
        row = tl.load(order + row)
    length = tl.load(context_lengths + row)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    first_tile = block_start(first, TILE, BLOCK_SIZE)
    num_tiles = tl.cdiv(length - first_tile, TILE)
    share = tl.maximum(tl.cdiv(num_tiles, max_splits), min_tiles)
    num_splits = tl.cdiv(num_tiles, share)
    if split >= tl.maximum(num_splits, 1):  # a row of padding still gets its zeros
        return
    begin = first_tile + split * share * TILE
    end = tl.minimum(begin + share * TILE, length)
    table = tables + row * table_stride
    blocks = block_ids(table, begin, tl.arange(0, TILE), end, BLOCK_SIZE)
    wait_for_others(EARLY)

    members = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    present = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    places = (kv_head * GROUP + members)[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(query + row.to(tl.int64) * query_row_stride + places, mask=present, other=0.0)
    gathered, running_max, running_sum = _gather_keys(
        queries, store + kv_head * head_stride, table, blocks, first, begin, end, dims,
        rate, cap_rate, block_stride, side_stride, slot_stride, TILE, BLOCK_SIZE, DIM, CAPPED,
    )  # fmt: skip

    target = output + row.to(tl.int64) * output_stride + kv_head * GROUP * DIM
    if num_splits <= 1:
        answer = divided(gathered, running_sum).to(output.dtype.element_ty)
        tl.store(target + members[:, None] * DIM + dims[None, :], answer, mask=present)
    else:
        pair = row * tl.num_programs(0) + kv_head
        first_part = pair * max_splits * GROUP
        own_part = first_part + split * GROUP
        store_part(parts, maxima, sums, own_part, gathered, running_max, running_sum, members, dims, GROUP, DIM)
        if is_last(arrivals + pair, num_splits):
            heads = tl.arange(0, GROUP_TIGHT)
            merged = merge_parts(parts, maxima, sums, first_part, num_splits, heads, dims, AT_ONCE, GROUP, DIM)
            inside = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
            tl.store(target + heads[:, None] * DIM + dims[None, :], merged.to(output.dtype.element_ty), mask=inside)


def decode_tiles(query: Tensor, kv_layer: Tensor, tables: Tensor) -> DecodeTiles:
    """How these rows would be cut: for whoever provides the scratch."""
    rows, _, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_layer.shape
    processors = _MEASURED_PROCESSORS  # what the interpreter pretends
    if query.is_cuda:
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return _tiles(rows * kv_heads, dim, kv_layer.element_size(), tables.shape[1] * block_size, processors)


def decode_attention(
    query: Tensor,  # [rows, heads, dim], strided
    kv_layer: Tensor,  # [blocks, 2, block_size, kv_heads, dim], strided
    tables: Tensor,  # [rows, width] int32
    context_lengths: Tensor,  # [rows] int32: 0 for a row of padding, which becomes zeros
    rule: AttentionRule,
    output: Tensor,  # [rows, heads * dim]
    scratch: SplitScratch | None = None,
    tiles: DecodeTiles | None = None,
    order: Tensor | None = None,  # [rows] int32: which row is taken first, second, ...
) -> None:
    """The query of each row over the keys of its row, into output.

    Tables, lengths and order must be older than the launch before this one.
    """
    rows, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_layer.shape
    assert query.stride(2) == kv_layer.stride(4) == tables.stride(1) == output.stride(1) == 1
    tiles = tiles or decode_tiles(query, kv_layer, tables)
    scratch = scratch or SplitScratch.allocate(rows, heads, kv_heads, dim, tiles.splits, query.device)
    assert scratch.holds(rows, heads, kv_heads, dim, tiles.splits), (rows, tiles)
    group = heads // kv_heads
    group_tight, dim_padded = next_power_of_2(group), max(_SMALLEST_DOT, next_power_of_2(dim))
    rates = Rates.of(rule)
    launch_early(
        _decode_kernel, (kv_heads, tiles.splits, rows),
        query, kv_layer, tables, context_lengths, order, output,
        scratch.parts, scratch.maxima, scratch.sums, scratch.arrivals,
        query.stride(0), query.stride(1), *kv_layer.stride()[:4], tables.stride(0), output.stride(0),
        rule.window, rates.rate, rates.cap_rate, tiles.splits, tiles.min_tiles,
        TILE=tiles.keys,
        AT_ONCE=max(1, _MERGED_AT_ONCE // (group_tight * dim_padded)),
        BLOCK_SIZE=block_size, GROUP=group, GROUP_PADDED=max(_SMALLEST_DOT, group_tight), GROUP_TIGHT=group_tight,
        DIM=dim, DIM_PADDED=dim_padded, WINDOWED=rule.window > 0, CAPPED=rule.softcap > 0,
        ORDERED=order is not None,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
