"""Pieces for packed weights: zeros, apart from each other, at cache lines, and freed with their last array."""

import gc
import itertools
import weakref

from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cpu.weight_memory import WeightMemory


@given(sizes=st.lists(st.integers(0, 2**16) | st.integers(30 * 2**20, 40 * 2**20), min_size=1, max_size=6))
def test_pieces_are_zeros_at_cache_lines_and_do_not_overlap(sizes: list[int]) -> None:
    memory = WeightMemory()
    pieces = [memory.take(size) for size in sizes]
    spans = sorted((piece.ctypes.data, piece.ctypes.data + len(piece)) for piece in pieces if len(piece))
    assert [len(piece) for piece in pieces] == sizes
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for number, piece in enumerate(pieces, 1):
        assert not piece[:4096].any() and not piece[-4096:].any()
        piece[:4096] = number
        piece[-4096:] = number
    assert all((piece[:1] == number).all() for number, piece in enumerate(pieces, 1))


def test_a_region_ends_with_its_last_piece() -> None:
    memory = WeightMemory()
    piece = memory.take(100)
    assert piece.base is not None
    region = weakref.ref(piece.base)
    memory.take(64 * 2**20)  # a region of its own
    gc.collect()
    assert region() is not None
    del piece
    gc.collect()
    assert region() is None
