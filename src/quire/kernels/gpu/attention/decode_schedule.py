"""Which pieces of rows the programs of a decode take. One launch a step, for all layers with the same window.

A row is one piece, or several that are as equal as can be. Pieces should be many enough to fill the card and few enough
to cost little, and what is left when the last of them begin should be short. So how long a piece may be follows from
the lengths of all rows, which only the device knows; how many there may be at the most follows from host integers, and
one captured launch serves every length. Knows nothing of keys or queries.

In which order rows are taken: the longest first, so that the last programs of a launch are short. One launch a step.

Knows lengths and nothing of what is done with the rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.softmax_tile import block_start
from quire.kernels.gpu.launch import cdiv, launch, launch_early, to_be_filled, wait_for_others

# Of a piece, int32 each:
ROW = tl.constexpr(0)  # -1: no piece
BEGIN = tl.constexpr(1)  # the first key
END = tl.constexpr(2)  # behind the last
FIRST = tl.constexpr(3)  # which piece has the row's first keys; the others follow it
COUNT = tl.constexpr(4)  # pieces of the row
NUM_FIELDS = tl.constexpr(5)

# What putting a row together takes, in tiles; fitted, with the overheads of `decode_attention`, to what was measured on
# an H200 (docs/performance/ledger, section 29).
MERGING_EACH = tl.constexpr(1 / 16)  # piece of the longest row
MERGING_BESIDE = tl.constexpr(2.0)  # others, if they fill the card

_AT_ONCE = 256  # rows, or places
_COMPARED_AT_ONCE = 32  # rows
_CHOICES = 64  # the most pieces of a row
_NUM_WARPS = 8


@triton.jit
def _extents(
    rows, present, lengths, order, window, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ORDERED: tl.constexpr
):
    """Of rows by their place in the order: (row, first key that is seen, where tiles begin, length, tiles)."""
    if ORDERED:
        rows = tl.load(order + rows, mask=present, other=0)
    length = tl.load(lengths + rows, mask=present, other=0)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    start = block_start(first, TILE, BLOCK_SIZE)
    return rows, first, start, length, tl.cdiv(length - start, TILE)


@triton.jit
def _best_share(
    lengths, order, num_rows, room, window, kv_heads, slots, overhead, longest,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ORDERED: tl.constexpr,
    CHOICES: tl.constexpr, COMPARED_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The most tiles of a piece with which all would be done first: of so many programs, `slots` run at a time.

    In tiles: as long as it takes to go through all pieces and what each costs besides, but no less than whole rounds
    of pieces of the mean length, and no less than the longest. Then there is what it takes to put rows together.
    """
    numbers = 1 + tl.arange(0, CHOICES)  # of pieces that the longest row is cut into
    shares = tl.cdiv(longest, numbers)
    counts = tl.zeros([CHOICES], tl.int32)
    num_tiles = 0
    for start in range(0, num_rows, COMPARED_AT_ONCE):
        rows = start + tl.arange(0, COMPARED_AT_ONCE)
        present = rows < num_rows
        _, _, _, _, tiles = _extents(rows, present, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        pieces = tl.maximum(tl.cdiv(tiles[:, None], shares[None, :]), 1)
        counts += tl.sum(tl.where(present[:, None], pieces, 0), 0)
        num_tiles += tl.sum(tiles, 0)
    programs = counts * kv_heads
    work = (num_tiles * kv_heads).to(tl.float32)
    rounds = tl.cdiv(programs, slots).to(tl.float32)
    flowing = (work + overhead * programs) / slots
    waiting = rounds * (work / programs + overhead)
    merging = tl.where(numbers > 1, numbers * MERGING_EACH + tl.minimum(programs / slots, 1.0) * MERGING_BESIDE, 0.0)
    times = tl.maximum(tl.maximum(flowing, waiting), shares + overhead) + merging
    times = tl.where((counts <= room) | (numbers == 1), times, float("inf"))
    return tl.sum(tl.where(tl.arange(0, CHOICES) == tl.argmin(times, 0), shares, 0), 0)


@triton.jit
def _cut(tiles, share):
    """Of rows with so many tiles: (tiles of a piece, pieces). A row of padding is a piece without keys."""
    tiles = tl.maximum(tiles, 1)
    shares = tl.cdiv(tiles, tl.cdiv(tiles, share))
    return shares, tl.cdiv(tiles, shares)


@triton.jit(
    do_not_specialize=["num_rows", "room", "window", "kv_heads", "slots", "overhead"],
    do_not_specialize_on_alignment=["lengths", "order"],
)
def _list_pieces(
    lengths, order, pieces, num_rows, room, window, kv_heads, slots, overhead,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ORDERED: tl.constexpr,
    CHOICES: tl.constexpr, AT_ONCE: tl.constexpr, COMPARED_AT_ONCE: tl.constexpr, NUM_FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """pieces: [room, NUM_FIELDS]."""
    wait_for_others(EARLY)
    in_turn = tl.arange(0, AT_ONCE)
    longest = 1
    for start in range(0, num_rows, AT_ONCE):
        rows = start + in_turn
        _, _, _, _, tiles = _extents(rows, rows < num_rows, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    share = _best_share(
        lengths, order, num_rows, room, window, kv_heads, slots, overhead, longest,
        TILE, BLOCK_SIZE, ORDERED, CHOICES, COMPARED_AT_ONCE,
    )  # fmt: skip
    num_pieces = 0
    for start in range(0, num_rows, AT_ONCE):
        rows = start + in_turn
        present = rows < num_rows
        _, _, _, _, tiles = _extents(rows, present, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        _, counts = _cut(tiles, share)
        num_pieces += tl.sum(tl.where(present, counts, 0), 0)
    place = room - num_pieces
    for start in range(0, place, AT_ONCE):
        tl.store(pieces + (start + in_turn) * NUM_FIELDS + ROW, -1, mask=start + in_turn < place)
    for start in range(0, num_rows, AT_ONCE):
        rows = start + in_turn
        present = rows < num_rows
        rows, firsts, starts, ends, tiles = _extents(rows, present, lengths, order, window, TILE, BLOCK_SIZE, ORDERED)
        shares, counts = _cut(tiles, share)
        counts = tl.where(present, counts, 0)
        places = place + tl.cumsum(counts, 0) - counts
        for number in range(tl.max(counts, 0)):
            piece = pieces + (places + number) * NUM_FIELDS
            begin = starts + number * shares * TILE
            inside = number < counts
            tl.store(piece + ROW, rows, mask=inside)
            tl.store(piece + BEGIN, tl.maximum(begin, firsts), mask=inside)
            tl.store(piece + END, tl.minimum(begin + shares * TILE, ends), mask=inside)
            tl.store(piece + FIRST, places, mask=inside)
            tl.store(piece + COUNT, counts, mask=inside)
        place += tl.sum(counts, 0)


def list_pieces(
    lengths: Tensor,  # [rows] int32: 0 for a row of padding, which is a piece without keys
    order: Tensor | None,  # [rows] int32: which row is taken first, second, ...
    window: int,  # keys that are seen, the last ones; 0: all
    *,
    kv_heads: int,
    tile: int,  # keys of a tile
    block_size: int,
    slots: int,  # programs that run at the same time
    overhead: float,  # what a piece costs besides its tiles, in tiles
) -> Tensor:
    """[places, fields] int32. There are more places than pieces; those that are none lie before the others: their
    programs have ended when the last of the others begin, and then what is launched next may begin as well."""
    num_rows = len(lengths)
    room = num_rows + cdiv(slots, kv_heads)
    pieces = to_be_filled((room, NUM_FIELDS.value), torch.int32, lengths.device)
    launch_early(
        _list_pieces, (1,), lengths, order, pieces, num_rows, room, window, kv_heads, slots, overhead,
        TILE=tile, BLOCK_SIZE=block_size, ORDERED=order is not None,
        CHOICES=_CHOICES, AT_ONCE=_AT_ONCE, COMPARED_AT_ONCE=_COMPARED_AT_ONCE, NUM_FIELDS=NUM_FIELDS.value,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return pieces


_ROWS = 16  # of a program
_RANKS_AT_ONCE = 512  # that they are compared with
_RANK_WARPS = 8


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lengths"])
def _rank(lengths, order, num_rows, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """A row's place is how many are longer, or as long and before it."""
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
    """lengths: [rows] int32, none below 0. The rows, [rows] int32."""
    num_rows = len(lengths)
    order = to_be_filled((num_rows,), torch.int32, lengths.device)
    launch(
        _rank, (cdiv(num_rows, _ROWS),), lengths, order, num_rows,
        ROWS=_ROWS, AT_ONCE=_RANKS_AT_ONCE, num_warps=_RANK_WARPS,
    )  # fmt: skip
    return order
