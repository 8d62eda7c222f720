"""The numbers that decide draws: exact against plain integers, and as good as chance."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.filters import uniform

WORD = (1 << 64) - 1
INT64 = st.integers(-(2**63) + 1, 2**63 - 1)


def mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def plain_uniform(seed: int, index: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    stream = mix((mix((seed + golden) & WORD) + (index + 1) * golden) & WORD)
    return (mix((stream + (position + 1) * golden) & WORD) >> 11) / 2**53


def numbers(seeds: torch.Tensor, indexes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    seeds, indexes, positions = torch.broadcast_tensors(seeds, indexes, positions)
    return uniform(seeds, indexes, positions)


@given(st.lists(st.tuples(INT64, st.integers(0, 127), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_equals_the_plain_integers_wherever_it_stands_in_a_batch(triples: list[tuple[int, int, int]]) -> None:
    drawn = uniform(*torch.tensor(triples).unbind(1))
    assert drawn.tolist() == [plain_uniform(*triple) for triple in triples]
    assert (drawn >= 0).all() and (drawn < 1).all()


def chi_square(values: torch.Tensor, bins: int) -> float:
    counts = torch.bincount((values * bins).long(), minlength=bins).double()
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_every_axis_alone_is_uniform() -> None:
    many, zero = torch.arange(100_000), torch.tensor(0)
    for triple in ((many, zero, zero), (zero, many, zero), (zero, zero, many)):
        # 255 degrees of freedom: mean 255, standard deviation 22.6; 5 of them away would be no chance.
        assert 142 < chi_square(numbers(*triple), 256) < 368


def test_neighbours_are_unrelated() -> None:
    seeds, indexes, positions = torch.arange(40)[:, None, None], torch.arange(8)[:, None], torch.arange(300)
    grid = numbers(seeds, indexes, positions)
    for axis, size in enumerate(grid.shape):
        here, there = grid.narrow(axis, 0, size - 1).flatten(), grid.narrow(axis, 1, size - 1).flatten()
        correlation = torch.corrcoef(torch.stack([here, there]))[0, 1]
        assert abs(float(correlation)) < 5 / len(here) ** 0.5
        pairs = (here * 16).long() * 16 + (there * 16).long()
        assert 142 < chi_square((pairs.double() + 0.5) / 256, 256) < 368
    assert len(grid.unique()) == grid.numel()
