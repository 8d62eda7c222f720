"""Split-KV schedule of decodes: which keys of which row each program takes. One launch per step and window.

A row is one split, or several of nearly equal length. There should be enough splits to fill the GPU and few enough to
cost little, and the tail of the launch should be short; so rows are scheduled longest first. The length of a split
depends on the lengths of all rows, which only the device knows. The capacity of the list depends on host integers only,
so one captured launch serves every length. Does not depend on keys or queries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.softmax_tile import block_start
from quire.kernels.gpu.launch import cdiv, launch, launch_with_pdl, new_index_tensor, pdl_wait

# Fields of a split, int32 each:
ROW = tl.constexpr(0)  # -1: unused entry
BEGIN = tl.constexpr(1)  # the first key
END = tl.constexpr(2)  # behind the last
FIRST = tl.constexpr(3)  # index of the row's first split; the others follow it
COUNT = tl.constexpr(4)  # splits of the row
NUM_FIELDS = tl.constexpr(5)

# Cost of merging a row, in tiles; fitted, with the overheads of `decode_attention`, to measurements on an H200
# (docs/performance/ledger, section 29).
MERGING_EACH = tl.constexpr(1 / 16)  # per split of the longest row
MERGING_BESIDE = tl.constexpr(2.0)  # while other programs fill the GPU

_AT_ONCE = 256  # rows, or entries of the list
_COMPARED_AT_ONCE = 32  # rows
_CHOICES = 64  # the most splits of a row
_NUM_WARPS = 8


@triton.jit
def _extents(
    rows, present, lengths, order, window, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ORDERED: tl.constexpr
):
    """Of rows by their rank: (row, first visible key, first key of the first tile, length, tiles)."""
    if ORDERED:
        rows = tl.load(order + rows, mask=present, other=0)
    length = tl.load(lengths + rows, mask=present, other=0)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    start = block_start(first, TILE, BLOCK_SIZE)
    return rows, first, start, length, tl.cdiv(length - start, TILE)


@triton.jit
def _best_split_tiles(
    lengths, order, num_rows, capacity, window, kv_heads, slots, overhead, longest,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ORDERED: tl.constexpr,
    CHOICES: tl.constexpr, COMPARED_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Tiles per split that minimise the estimated time, when `slots` programs run at a time.

    The estimate, in tiles: the work of all splits with their overhead, but at least whole waves of splits of mean
    length, and at least the longest split; plus the cost of merging.
    """
    numbers = 1 + tl.arange(0, CHOICES)  # of splits of the longest row
    shares = tl.cdiv(longest, numbers)
    counts = tl.zeros([CHOICES], tl.int32)
    num_tiles = 0
    for start in range(0, num_rows, COMPARED_AT_ONCE):
        rows = start + tl.arange(0, COMPARED_AT_ONCE)
        present = rows < num_rows
        _, _, _, _, tiles = _extents(rows, present, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        splits = tl.maximum(tl.cdiv(tiles[:, None], shares[None, :]), 1)
        counts += tl.sum(tl.where(present[:, None], splits, 0), 0)
        num_tiles += tl.sum(tiles, 0)
    programs = counts * kv_heads
    work = (num_tiles * kv_heads).to(tl.float32)
    rounds = tl.cdiv(programs, slots).to(tl.float32)
    flowing = (work + overhead * programs) / slots
    waiting = rounds * (work / programs + overhead)
    merging = tl.where(numbers > 1, numbers * MERGING_EACH + tl.minimum(programs / slots, 1.0) * MERGING_BESIDE, 0.0)
    times = tl.maximum(tl.maximum(flowing, waiting), shares + overhead) + merging
    times = tl.where((counts <= capacity) | (numbers == 1), times, float("inf"))
    return tl.sum(tl.where(tl.arange(0, CHOICES) == tl.argmin(times, 0), shares, 0), 0)


@triton.jit
def _split_rows(tiles, share):
    """(tiles per split, splits) of rows with these numbers of tiles. A padding row is one split without keys."""
    tiles = tl.maximum(tiles, 1)
    shares = tl.cdiv(tiles, tl.cdiv(tiles, share))
    return shares, tl.cdiv(tiles, shares)


@triton.jit(
    do_not_specialize=["num_rows", "capacity", "window", "kv_heads", "slots", "overhead"],
    do_not_specialize_on_alignment=["lengths", "order"],
)
def _list_splits(
    lengths, order, splits, num_rows, capacity, window, kv_heads, slots, overhead,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ORDERED: tl.constexpr,
    CHOICES: tl.constexpr, AT_ONCE: tl.constexpr, COMPARED_AT_ONCE: tl.constexpr, NUM_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """splits: [capacity, NUM_FIELDS]."""
    pdl_wait(PDL)
    lanes = tl.arange(0, AT_ONCE)
    longest = 1
    for start in range(0, num_rows, AT_ONCE):
        rows = start + lanes
        _, _, _, _, tiles = _extents(rows, rows < num_rows, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    share = _best_split_tiles(
        lengths, order, num_rows, capacity, window, kv_heads, slots, overhead, longest,
        TILE, BLOCK_SIZE, ORDERED, CHOICES, COMPARED_AT_ONCE,
    )  # fmt: skip
    num_splits = 0
    for start in range(0, num_rows, AT_ONCE):
        rows = start + lanes
        present = rows < num_rows
        _, _, _, _, tiles = _extents(rows, present, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        _, counts = _split_rows(tiles, share)
        num_splits += tl.sum(tl.where(present, counts, 0), 0)
    place = capacity - num_splits
    for start in range(0, place, AT_ONCE):
        tl.store(splits + (start + lanes) * NUM_FIELDS + ROW, -1, mask=start + lanes < place)
    for start in range(0, num_rows, AT_ONCE):
        rows = start + lanes
        present = rows < num_rows
        rows, firsts, starts, ends, tiles = _extents(rows, present, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        shares, counts = _split_rows(tiles, share)
        counts = tl.where(present, counts, 0)
        places = place + tl.cumsum(counts, 0) - counts
        for number in range(tl.max(counts, 0)):
            split = splits + (places + number) * NUM_FIELDS
            begin = starts + number * shares * TILE
            inside = number < counts
            tl.store(split + ROW, rows, mask=inside)
            tl.store(split + BEGIN, tl.maximum(begin, firsts), mask=inside)
            tl.store(split + END, tl.minimum(begin + shares * TILE, ends), mask=inside)
            tl.store(split + FIRST, places, mask=inside)
            tl.store(split + COUNT, counts, mask=inside)
        place += tl.sum(counts, 0)


def list_splits(
    lengths: Tensor,  # [rows] int32: 0 for a padding row, which is one split without keys
    order: Tensor | None,  # [rows] int32: rows in scheduling order
    window: int,  # number of last keys that are visible; 0: all
    *,
    kv_heads: int,
    tile: int,  # keys per tile
    block_size: int,
    slots: int,  # programs that run at the same time
    overhead: float,  # cost of a split besides its tiles, in tiles
) -> Tensor:
    """[capacity, fields] int32. Unused entries come first: their programs have ended when the last real ones start, and
    the next kernel may start too (PDL)."""
    num_rows = len(lengths)
    capacity = num_rows + cdiv(slots, kv_heads)
    splits = new_index_tensor((capacity, NUM_FIELDS.value), torch.int32, lengths.device)
    launch_with_pdl(
        _list_splits, (1,), lengths, order, splits, num_rows, capacity, window, kv_heads, slots, overhead,
        TILE=tile, BLOCK_SIZE=block_size, ORDERED=order is not None,
        CHOICES=_CHOICES, AT_ONCE=_AT_ONCE, COMPARED_AT_ONCE=_COMPARED_AT_ONCE, NUM_FIELDS=NUM_FIELDS.value,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return splits


_ROWS = 16  # per program
_RANKS_AT_ONCE = 512  # rows they are compared with
_RANK_WARPS = 8


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lengths"])
def _rank(lengths, order, num_rows, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """A row's rank is the number of rows that are longer, or as long and before it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(lengths + row, mask=row < num_rows, other=0)
    place = tl.zeros([ROWS], tl.int32)
    for start in range(0, num_rows, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        theirs = tl.load(lengths + others, mask=others < num_rows, other=-1)
        tied = (theirs[None, :] == own[:, None]) & (others[None, :] < row[:, None])
        place += tl.sum(((theirs[None, :] > own[:, None]) | tied).to(tl.int32), 1)
    tl.store(order + place, row, mask=row < num_rows)


def longest_first(lengths: Tensor) -> Tensor:
    """Rows in order of decreasing length, [rows] int32, so that the last programs of a launch are short.

    lengths: [rows] int32, >= 0. One launch per step.
    """
    num_rows = len(lengths)
    order = new_index_tensor((num_rows,), torch.int32, lengths.device)
    launch(
        _rank, (cdiv(num_rows, _ROWS),), lengths, order, num_rows,
        ROWS=_ROWS, AT_ONCE=_RANKS_AT_ONCE, num_warps=_RANK_WARPS,
    )  # fmt: skip
    return order
