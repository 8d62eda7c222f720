"""How rows of decodes are cut into pieces, beside the same arithmetic in Python."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.kernels.gpu.attention.decode import decode_tiles
from quire.kernels.gpu.attention.decode_schedule import list_pieces, longest_first
from tests.tiers import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE, BLOCK_SIZE, CHOICES = 64, 16, 64

Piece = tuple[int, ...]  # row, first key, behind the last key, first piece of the row, pieces of the row


def listed(lengths, order=None, window=0, *, kv_heads=8, slots=396, overhead=3.0, tile=TILE, block_size=BLOCK_SIZE):
    """(pieces, how many places are none); pieces are counted from the first that is one."""
    found = list_pieces(
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        None if order is None else torch.tensor(order, dtype=torch.int32, device=DEVICE),
        window, kv_heads=kv_heads, tile=tile, block_size=block_size, slots=slots, overhead=overhead,
    ).tolist()  # fmt: skip
    num_none = sum(piece[0] == -1 for piece in found)
    assert all(piece[0] >= 0 for piece in found[num_none:]), "a place that is none lies behind one that is"
    return [(row, begin, end, first - num_none, count) for row, begin, end, first, count in found[num_none:]], num_none


def plainly(lengths, order, window, *, kv_heads, slots, overhead) -> list[Piece]:
    """With TILE and BLOCK_SIZE."""
    firsts = [max(length - window, 0) if window else 0 for length in lengths]
    starts = [first // BLOCK_SIZE * BLOCK_SIZE for first in firsts]
    tiles = [-(-(length - start) // TILE) for length, start in zip(lengths, starts, strict=True)]
    room, work, longest = len(lengths) + -(-slots // kv_heads), sum(tiles) * kv_heads, max(1, *tiles)
    best_time, best_share = float("inf"), longest
    for number in range(1, CHOICES + 1):
        share = -(-longest // number)
        count = sum(max(1, -(-each // share)) for each in tiles)
        programs = count * kv_heads
        rounds = -(-programs // slots)
        time = max((work + overhead * programs) / slots, rounds * (work / programs + overhead), share + overhead)
        time += number / 16 + 2 * min(programs / slots, 1) if number > 1 else 0
        if time < best_time - 1e-4 and (count <= room or number == 1):
            best_time, best_share = time, share
    pieces: list[Piece] = []
    for row in order:
        num_tiles = max(1, tiles[row])
        share = -(-num_tiles // -(-num_tiles // best_share))
        begins = range(starts[row], starts[row] + num_tiles * TILE, share * TILE)
        first, length = len(pieces), lengths[row]
        pieces += [
            (row, max(begin, firsts[row]), min(begin + share * TILE, length), first, len(begins)) for begin in begins
        ]
    return pieces


lengths_of_rows = st.integers(0, 300) | st.integers(0, 20_000)


@settings(max_examples=examples(10, 40, gpu=True))
@given(
    lengths=st.lists(lengths_of_rows, min_size=1, max_size=40),
    window=st.sampled_from([0, 0, 1, 100, 1024]),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    slots=st.sampled_from([1, 264, 396]),
    data=st.data(),
)
@example(lengths=[300] * 300 + [12_000], window=0, kv_heads=8, slots=396, data=None)
def test_every_key_that_is_seen_lies_in_one_piece(lengths, window, kv_heads, slots, data):
    order = data.draw(st.permutations(range(len(lengths)))) if data else [*range(len(lengths))]
    pieces, num_none = listed(lengths, order, window, kv_heads=kv_heads, slots=slots)
    assert len(pieces) + num_none == len(lengths) + -(-slots // kv_heads)
    assert list(dict.fromkeys(piece[0] for piece in pieces)) == order
    for row, length in enumerate(lengths):
        numbers = [number for number, piece in enumerate(pieces) if piece[0] == row]
        own = [pieces[number] for number in numbers]
        assert {piece[3:] for piece in own} == {(numbers[0], len(numbers))} and numbers == [
            *range(numbers[0], numbers[0] + len(numbers))
        ]
        assert own[0][1] == (max(length - window, 0) if window else 0) and own[-1][2] == length
        assert all(before[2] == after[1] for before, after in pairwise(own))
        assert all(begin < end for _, begin, end, _, _ in own) or (length == 0 and len(own) == 1)


@settings(max_examples=examples(12, 60, gpu=True))
@given(
    lengths=st.lists(lengths_of_rows, min_size=1, max_size=40),
    window=st.sampled_from([0, 0, 500]),
    kv_heads=st.sampled_from([1, 4, 8, 32]),
    slots=st.sampled_from([264, 396]),
    overhead=st.sampled_from([0.0, 3.0, 5.5]),
)
def test_rows_are_cut_as_the_same_arithmetic_in_python_cuts_them(lengths, window, kv_heads, slots, overhead):
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    settings_ = {"kv_heads": kv_heads, "slots": slots, "overhead": overhead}
    assert listed(lengths, order, window, **settings_)[0] == plainly(lengths, order, window, **settings_)


@pytest.mark.parametrize(
    "rows, length, slots, num_pieces",
    [
        (48, 1024, 396, 48),  # 384 programs: the card is full
        (16, 16384, 396, 48),  # 128 would leave two thirds of it empty, 256 a third
        (64, 4096, 264, 64),  # 512 programs: twice
        (256, 1024, 396, 256),
        (1, 65536, 396, 49),
        (1, 64, 396, 1),
    ],
)
def test_equal_rows_fill_the_card_with_whole_rounds(rows, length, slots, num_pieces):
    assert len(listed([length] * rows, slots=slots)[0]) == num_pieces


def test_a_row_that_is_much_longer_than_the_others_is_cut_and_they_are_not():
    pieces, _ = listed([12_000] + [300] * 63)
    assert [piece[4] for piece in pieces[-63:]] == [1] * 63
    assert pieces[0][4] >= 6


def test_tiles_that_hold_no_whole_blocks_begin_where_the_window_does():
    pieces, _ = listed([500], window=101, kv_heads=1, slots=4, overhead=0.0, tile=16, block_size=24)
    assert pieces[0][1] == 399 and pieces[-1][2] == 500
    assert all((piece[1] - 399) % 16 == 0 for piece in pieces) and len(pieces) > 1


def test_more_rows_than_are_looked_at_at_once():
    lengths = [(37 * row) % 900 for row in range(700)]
    order = longest_first(torch.tensor(lengths, dtype=torch.int32, device=DEVICE)).tolist()
    pieces, _ = listed(lengths, order)
    assert pieces == plainly(lengths, order, 0, kv_heads=8, slots=396, overhead=3.0)


@pytest.mark.parametrize(
    "dtype, heads, dim", [(torch.bfloat16, 8, 128), (torch.float16, 4, 256), (torch.float16, 2, 80)]
)
def test_as_many_programs_as_are_said_to_run_fit_into_shared_memory(dtype, heads, dim):
    """Each holds tiles of keys and of values, all stages but the one that is computed on. A Hopper has 228 KiB."""
    kv_layer = torch.empty(1, 2, BLOCK_SIZE, heads, dim, dtype=dtype, device=DEVICE)
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE == "cuda" else 132
    for rows in (1, 8, 32, 48, 64, 256):
        tiles = decode_tiles(rows, kv_layer)
        tile_bytes = tiles.keys * (1 << (dim - 1).bit_length()) * dtype.itemsize
        assert tile_bytes == 16384
        held_bytes = 2 * tile_bytes * (tiles.stages - 1)
        assert tiles.slots == (228 * 1024 // held_bytes) * processors
