"""Attention of one query per row over its pages: what decoding spends its time on. Bound by reading keys and values.

A program takes all query heads of one key head, so every key is read once, and a piece of a row's keys: which, it finds
in a list that was made when the step began. Knows nothing of chunks, of writing keys, or of how rows are cut.
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
    divided,
    fold,
    key_offsets,
    load_rows,
    score,
)
from quire.kernels.gpu.attention.split_merge import (
    FEWEST_STAGES,
    SplitScratch,
    attention_bytes,
    is_last,
    merge_parts,
    shared_room,
    store_part,
)
from quire.kernels.gpu.launch import launch, launch_early, next_power_of_2, wait_for_others
from quire.kernels.interface import AttentionRule

_SMALLEST_DOT = 16  # rows a tensor core takes
_MEASURED_PROCESSORS = 132
_FEW = 1.46  # pairs of a row and a key head for each processor
_TILE_BYTES = 16384  # of keys, and as many of values
_QUERY_BYTES = 65536  # of all query heads of a key head
_MERGED_AT_ONCE = 8192  # float32 values the merging program holds
_WARP_VALUES = 4096  # float32 values of the sums that a warp has registers for
_MOST_WARPS = 8


class DecodeTiles(NamedTuple):
    """How keys are read. The defaults come from `decode_tiles`; others are for measuring and testing."""

    keys: int  # a tile
    warps: int
    stages: int  # tiles in flight, one more than are waited for
    slots: int  # programs that run at the same time
    overhead: float  # what a program costs besides its tiles, in tiles


def _tiles(pairs: int, dim: int, element_bytes: int, processors: int) -> DecodeTiles:
    """`pairs`: rows times key heads. Measured on an H200 (docs/performance/ledger, section 29).

    With four stages two programs fit on a processor, with three there are three: so that rows which are not cut fill
    the card once or twice, and each program asks for much at once.
    """
    keys = _tile_keys(dim, element_bytes)
    two, three = 2 * processors, 3 * processors
    few = pairs <= _FEW * processors
    if element_bytes > 2:  # no tensor cores: only right, not fast
        return DecodeTiles(keys, 8, 2, two, 3.0)
    if few and dim <= 128:
        return DecodeTiles(keys, 2, 3, three, 3.0)
    if (dim > 64 and not few and pairs <= two) or three < pairs <= 2 * two:
        return DecodeTiles(keys, 4, 4, two, 5.5)
    return DecodeTiles(keys, 4, 3, three, 4.0)


def _tile_keys(dim: int, element_bytes: int) -> int:
    return _TILE_BYTES // (next_power_of_2(dim) * element_bytes) if element_bytes <= 2 else _SMALLEST_DOT


def most_query_heads(dim: int, element_bytes: int) -> int:
    """That a key head may have: all are one program's, here and for chunks, and lie in shared memory beside tiles of
    keys."""
    dim_padded = max(_SMALLEST_DOT, next_power_of_2(dim))
    keys, most = _tile_keys(dim, element_bytes), _QUERY_BYTES // (dim_padded * element_bytes)
    while most and attention_bytes(most, keys, dim_padded, element_bytes, FEWEST_STAGES) > shared_room():
        most //= 2
    return most


def _fitting_stages(tiles: DecodeTiles, rows: int, dim: int, element_bytes: int, room: int) -> int:
    """As many as were measured, or as this card has room for."""
    stages = tiles.stages
    while stages > FEWEST_STAGES and attention_bytes(rows, tiles.keys, dim, element_bytes, stages) > room:
        stages -= 1
    return stages


@triton.jit
def _gather_keys(
    query, keys, table, blocks, start, begin, end, dims, rate, cap_rate, block_stride, side_stride, slot_stride,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """query: [members, dims] over the keys from begin to end, in tiles from start on; blocks: those of the first tile.

    Returns (gathered, maximum, sum).
    """
    running_max = tl.full([query.shape[0]], LOWEST, tl.float32)
    running_sum = tl.zeros([query.shape[0]], tl.float32)
    gathered = tl.zeros([query.shape[0], dims.shape[0]], tl.float32)
    in_tile = tl.arange(0, TILE)
    for place in range(start, end, TILE):
        positions = place + in_tile
        inside = (positions >= begin) & (positions < end)
        offsets = key_offsets(blocks, place, in_tile, block_stride, slot_stride, BLOCK_SIZE)
        blocks = block_ids(table, place + TILE, in_tile, end, BLOCK_SIZE)  # one tile ahead: keys wait for no table
        scores = score(query, load_rows(keys, offsets, inside, dims, DIM, True), cap_rate, CAPPED)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        values = load_rows(keys + side_stride, offsets, inside, dims, DIM, True).to(query.dtype)
        gathered, running_max, running_sum = fold(scores, values, rate, gathered, running_max, running_sum)
    return gathered, running_max, running_sum


@triton.jit(
    do_not_specialize=["table_stride"],  # one compilation serves every batch
    do_not_specialize_on_alignment=["tables"],
)
def _decode_kernel(
    query, store, tables, pieces, output, parts, maxima, sums, arrivals,
    query_row_stride, query_head_stride, block_stride, side_stride, slot_stride, head_stride,
    table_stride, output_stride, rate, cap_rate,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_FIELDS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, GROUP_TIGHT: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, CAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a key head with its GROUP of query heads, and a piece of a row.

    Which keys those are was written when the step began, and is read before the wait: one load after the other.
    """
    kv_head, number = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    piece = pieces + number * NUM_FIELDS
    row, begin, end = tl.load(piece + ROW), tl.load(piece + BEGIN), tl.load(piece + END)
    first, count = tl.load(piece + FIRST), tl.load(piece + COUNT)
    if row < 0:
        return
    start = block_start(begin, TILE, BLOCK_SIZE)
    table = tables + row * table_stride
    blocks = block_ids(table, start, tl.arange(0, TILE), end, BLOCK_SIZE)
    wait_for_others(EARLY)

    sequences = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    present = (sequences < GROUP)[:, None] & (dims < DIM)[None, :]
    places = (kv_head * GROUP + sequences)[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(query + row.to(tl.int64) * query_row_stride + places, mask=present, other=0.0)
    gathered, running_max, running_sum = _gather_keys(
        queries, store + kv_head * head_stride, table, blocks, start, begin, end, dims,
        rate, cap_rate, block_stride, side_stride, slot_stride, TILE, BLOCK_SIZE, DIM, CAPPED,
    )  # fmt: skip

    target = output + row.to(tl.int64) * output_stride + kv_head * GROUP * DIM
    if count == 1:
        answer = divided(gathered, running_sum).to(output.dtype.element_ty)
        tl.store(target + sequences[:, None] * DIM + dims[None, :], answer, mask=present)
    else:
        first_part = (kv_head * (tl.num_programs(0) // KV_HEADS) + first) * GROUP
        own_part = first_part + (number - first) * GROUP
        store_part(parts, maxima, sums, own_part, gathered, running_max, running_sum, sequences, dims, GROUP, DIM)
        if is_last(arrivals + row * KV_HEADS + kv_head, count):
            heads = tl.arange(0, GROUP_TIGHT)
            merged = merge_parts(parts, maxima, sums, first_part, count, heads, dims, AT_ONCE, GROUP, DIM)
            inside = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
            tl.store(target + heads[:, None] * DIM + dims[None, :], merged.to(output.dtype.element_ty), mask=inside)


def decode_tiles(rows: int, kv_layer: Tensor) -> DecodeTiles:
    """How the keys of so many rows are read: for whoever cuts the rows."""
    processors = _MEASURED_PROCESSORS  # what the interpreter pretends
    if kv_layer.is_cuda:
        processors = torch.cuda.get_device_properties(kv_layer.device).multi_processor_count
    _, _, _, kv_heads, dim = kv_layer.shape
    return _tiles(rows * kv_heads, dim, kv_layer.element_size(), processors)


def decode_scratch(query: Tensor, kv_heads: int, pieces: Tensor) -> SplitScratch:
    _, heads, dim = query.shape
    return SplitScratch.allocate(len(pieces) * heads, len(pieces) * kv_heads, dim, query.device)


def decode_attention(
    query: Tensor,  # [rows, heads, dim], strided
    kv_layer: Tensor,  # [blocks, 2, block_size, kv_heads, dim], strided
    tables: Tensor,  # [rows, width] int32
    pieces: Tensor,  # [pieces, fields] int32: all keys of all rows that the rule lets them see
    tiles: DecodeTiles,  # those that the pieces were made for
    rule: AttentionRule,
    output: Tensor,  # [rows, heads * dim]; a row without keys becomes zeros
    scratch: SplitScratch | None = None,
    *,
    early: bool = False,  # tables and pieces are older than the launch before this one
) -> None:
    """The query of each row over the keys of its row, into output."""
    _, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_layer.shape
    assert query.stride(2) == kv_layer.stride(4) == tables.stride(1) == output.stride(1) == 1
    scratch = scratch or decode_scratch(query, kv_heads, pieces)
    assert scratch.holds(len(pieces) * heads, len(pieces) * kv_heads, dim), pieces.shape
    group = heads // kv_heads
    group_tight, dim_padded = next_power_of_2(group), max(_SMALLEST_DOT, next_power_of_2(dim))
    group_padded = max(_SMALLEST_DOT, group_tight)
    warps = max(tiles.warps, min(_MOST_WARPS, group_padded * dim_padded // _WARP_VALUES))
    stages = _fitting_stages(tiles, group_padded, dim_padded, kv_layer.element_size(), shared_room())
    rates = SoftmaxScale.of(rule)
    begin, constants = (launch_early, {}) if early else (launch, {"EARLY": False})
    begin(
        _decode_kernel, (len(pieces) * kv_heads,),
        query, kv_layer, tables, pieces, output,
        scratch.parts, scratch.maxima, scratch.sums, scratch.arrivals,
        query.stride(0), query.stride(1), *kv_layer.stride()[:4], tables.stride(0), output.stride(0),
        rates.rate, rates.cap_rate,
        TILE=tiles.keys,
        AT_ONCE=max(1, _MERGED_AT_ONCE // (group_tight * dim_padded)),
        BLOCK_SIZE=block_size, NUM_FIELDS=NUM_FIELDS.value,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PADDED=group_padded, GROUP_TIGHT=group_tight,
        DIM=dim, DIM_PADDED=dim_padded, CAPPED=rule.softcap > 0,
        num_warps=warps, num_stages=stages, **constants,
    )  # fmt: skip
