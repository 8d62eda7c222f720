"""The split-KV schedule of decodes, beside the same arithmetic in Python."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.kernels.gpu.attention.decode import decode_tiles
from quire.kernels.gpu.attention.decode_schedule import list_splits, longest_first
from tests.tiers import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE, BLOCK_SIZE, CHOICES = 64, 16, 64

Split = tuple[int, ...]  # row, first key, behind the last key, first split of the row, splits of the row


def listed(lengths, order=None, window=0, *, kv_heads=8, slots=396, overhead=3.0, tile=TILE, block_size=BLOCK_SIZE):
    """(splits, how many places are none); splits are counted from the first that is one."""
    found = list_splits(
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        None if order is None else torch.tensor(order, dtype=torch.int32, device=DEVICE),
        window, kv_heads=kv_heads, tile=tile, block_size=block_size, slots=slots, overhead=overhead,
    ).tolist()  # fmt: skip
    num_none = sum(split[0] == -1 for split in found)
    assert all(split[0] >= 0 for split in found[num_none:]), "a place that is none lies behind one that is"
    return [(row, begin, end, first - num_none, count) for row, begin, end, first, count in found[num_none:]], num_none


def reference(lengths, order, window, *, kv_heads, slots, overhead) -> list[Split]:
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
    splits: list[Split] = []
    for row in order:
        num_tiles = max(1, tiles[row])
        share = -(-num_tiles // -(-num_tiles // best_share))
        begins = range(starts[row], starts[row] + num_tiles * TILE, share * TILE)
        first, length = len(splits), lengths[row]
        splits += [
            (row, max(begin, firsts[row]), min(begin + share * TILE, length), first, len(begins)) for begin in begins
        ]
    return splits


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
def test_every_visible_key_is_in_one_split(lengths, window, kv_heads, slots, data):
    order = data.draw(st.permutations(range(len(lengths)))) if data else [*range(len(lengths))]
    splits, num_none = listed(lengths, order, window, kv_heads=kv_heads, slots=slots)
    assert len(splits) + num_none == len(lengths) + -(-slots // kv_heads)
    assert list(dict.fromkeys(split[0] for split in splits)) == order
    for row, length in enumerate(lengths):
        numbers = [number for number, split in enumerate(splits) if split[0] == row]
        own = [splits[number] for number in numbers]
        assert {split[3:] for split in own} == {(numbers[0], len(numbers))} and numbers == [
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
def test_splits_agree_with_the_reference_in_python(lengths, window, kv_heads, slots, overhead):
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    settings_ = {"kv_heads": kv_heads, "slots": slots, "overhead": overhead}
    assert listed(lengths, order, window, **settings_)[0] == reference(lengths, order, window, **settings_)


@pytest.mark.parametrize(
    "rows, length, slots, num_splits",
    [
        (48, 1024, 396, 48),  # 384 programs: the GPU is full
        (16, 16384, 396, 48),  # 128 would leave two thirds of it empty, 256 a third
        (64, 4096, 264, 64),  # 512 programs: twice
        (256, 1024, 396, 256),
        (1, 65536, 396, 49),
        (1, 64, 396, 1),
    ],
)
def test_equal_rows_fill_the_gpu_in_whole_waves(rows, length, slots, num_splits):
    assert len(listed([length] * rows, slots=slots)[0]) == num_splits


def test_only_a_much_longer_row_is_split():
    splits, _ = listed([12_000] + [300] * 63)
    assert [split[4] for split in splits[-63:]] == [1] * 63
    assert splits[0][4] >= 6


def test_tiles_of_partial_blocks_start_at_the_window():
    splits, _ = listed([500], window=101, kv_heads=1, slots=4, overhead=0.0, tile=16, block_size=24)
    assert splits[0][1] == 399 and splits[-1][2] == 500
    assert all((split[1] - 399) % 16 == 0 for split in splits) and len(splits) > 1


def test_more_rows_than_one_iteration_handles():
    lengths = [(37 * row) % 900 for row in range(700)]
    order = longest_first(torch.tensor(lengths, dtype=torch.int32, device=DEVICE)).tolist()
    splits, _ = listed(lengths, order)
    assert splits == reference(lengths, order, 0, kv_heads=8, slots=396, overhead=3.0)


@pytest.mark.parametrize(
    "dtype, heads, dim", [(torch.bfloat16, 8, 128), (torch.float16, 4, 256), (torch.float16, 2, 80)]
)
def test_the_assumed_number_of_programs_fits_in_shared_memory(dtype, heads, dim):
    """Each holds tiles of keys and of values, all stages but the one that is computed on. A Hopper has 228 KiB."""
    kv_layer = torch.empty(1, 2, BLOCK_SIZE, heads, dim, dtype=dtype, device=DEVICE)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE == "cuda" else 132
    for rows in (1, 8, 32, 48, 64, 256):
        tiles = decode_tiles(rows, kv_layer)
        tile_bytes = tiles.keys * (1 << (dim - 1).bit_length()) * dtype.itemsize
        assert tile_bytes == 16384
        held_bytes = 2 * tile_bytes * (tiles.stages - 1)
        assert tiles.slots == (228 * 1024 // held_bytes) * num_sms
