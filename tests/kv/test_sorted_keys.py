"""Keys in pieces against one sorted list."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.radix_node import SortedKeys

KEYS = st.binary(max_size=2)


@given(st.lists(KEYS), st.lists(KEYS, min_size=1), st.integers(2, 4))
def test_neighbours_of_a_run_after_adds_and_removes(turns: list[bytes], runs: list[bytes], most: int) -> None:
    """A key that is present is removed, another is added."""
    keys, model = SortedKeys(most), list[bytes]()
    for key in turns:
        if key in model:
            keys.remove(key)
            model.remove(key)
        else:
            keys.add(key)
            model = sorted([*model, key])
        assert list(keys) == model and len(keys) == len(model)
        for run in [*runs, key]:
            at = bisect_left(model, run)
            assert keys.around(run) == model[max(at - 1, 0) : at + 1]


@pytest.mark.parametrize("most", [2, 3, 4])
def test_neighbours_at_the_ends_of_pieces(most: int) -> None:
    keys, model = SortedKeys(most), [bytes((number,)) for number in range(1, 40, 2)]
    for key in model:
        keys.add(key)
    assert len(keys._pieces) > 4
    for number in range(41):
        at = bisect_left(model, bytes((number,)))
        assert keys.around(bytes((number,))) == model[max(at - 1, 0) : at + 1]


def test_a_piece_never_exceeds_its_limit() -> None:
    keys = SortedKeys(4)
    for number in range(100):
        keys.add(bytes((number * 37 % 101,)))
    assert max(len(piece) for piece in keys._pieces) <= 4
    for number in range(100):
        keys.remove(bytes((number * 37 % 101,)))
    assert keys._pieces == [[]] and not keys._bounds
