"""Kernels that draft and verify against their definitions by tensor operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.draft_interface import (
    LENGTH_SHIFT,
    MAX_NGRAM,
    PLANTED_UNIT,
    VerifyInputs,
    match_suffix_reference,
    verify_inputs_reference,
    verify_rows_reference,
)
from quire.kernels.gpu import drafts
from quire.kernels.row_interface import EndColumns, RowColumns, RowState, Sampled

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, WIDTH, MAX_ROWS = 4, 9, 12


class Dice:
    """Random tensors on the device."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=self._generator).to(DEVICE)

    def chances(self, share: float, *size: int) -> torch.Tensor:
        return (torch.rand(size, generator=self._generator) < share).to(DEVICE)

    def rows(self, count: int) -> torch.Tensor:
        """Distinct rows, then the padding row twice."""
        found = torch.randperm(MAX_ROWS, generator=self._generator)[:count]
        return torch.cat([found, torch.full((2,), MAX_ROWS)]).to(DEVICE)

    def starts(self, count: int, queries: int) -> torch.Tensor:
        counts = torch.cat([self.integers(1, queries + 1, count), torch.zeros(2, dtype=torch.int64, device=DEVICE)])
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(1, MAX_ROWS), st.integers(2, 8))
def test_the_lines_of_a_verifying_step(seed: int, count: int, queries: int) -> None:
    dice = Dice(seed)
    alive = dice.chances(0.7, MAX_ROWS + 1)
    alive[MAX_ROWS] = False
    max_lengths = dice.integers(1, WIDTH * BLOCK_SIZE + 1, MAX_ROWS + 1)
    columns = RowColumns(
        tables=dice.integers(0, 99, MAX_ROWS + 1, WIDTH).int(),
        lengths=torch.minimum(dice.integers(1, WIDTH * BLOCK_SIZE + 1, MAX_ROWS + 1), max_lengths),
        max_lengths=max_lengths,
        last_tokens=dice.integers(0, 1000, MAX_ROWS + 1),
        alive=alive,
    )
    columns.last_tokens[MAX_ROWS], columns.lengths[MAX_ROWS], columns.max_lengths[MAX_ROWS] = 0, 1, 1
    rows, starts, proposed = (
        dice.rows(count),
        dice.starts(count, queries),
        dice.integers(0, 1000, count + 2, queries - 1),
    )
    num_lines = int(starts[-1]) + 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "_COLUMNS", 4)
        found = drafts.verify_inputs(rows, starts, proposed, columns, BLOCK_SIZE, num_lines)
    expected = verify_inputs_reference(rows, starts, proposed, columns, BLOCK_SIZE, num_lines)
    for name, mine, theirs in zip(VerifyInputs._fields, found, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, MAX_ROWS), st.integers(2, 8), st.booleans())
def test_what_is_accepted(seed: int, count: int, queries: int, planted: bool) -> None:
    """Right drafts, wrong ones, ends in the middle, logits that are not finite, rows that have ended."""
    dice = Dice(seed)
    rows, starts = dice.rows(count), dice.starts(count, queries)
    num_lines = int(starts[-1]) + 2
    sampled = Sampled(dice.integers(0, 4, num_lines), dice.chances(0.95, num_lines))
    tokens = torch.where(dice.chances(0.8, num_lines), sampled.tokens.roll(1), dice.integers(0, 4, num_lines))
    positions = dice.integers(1, 40, num_lines)
    ends = EndColumns(dice.integers(30, 45, MAX_ROWS + 1), dice.integers(-1, 40, MAX_ROWS + 1, 3))
    alive = dice.chances(0.9, MAX_ROWS + 1)
    alive[MAX_ROWS] = False
    state = RowState(
        dice.integers(0, 9, MAX_ROWS + 1), dice.integers(1, 40, MAX_ROWS + 1), alive,
        dice.integers(0, 9, MAX_ROWS + 1, 16).int(),
    )  # fmt: skip
    chance = torch.tensor(PLANTED_UNIT * 3 // 4, device=DEVICE) if planted else None
    theirs = RowState(*(column.clone() for column in state if column is not None))
    expected = verify_rows_reference(sampled, tokens, rows, starts, positions, ends, theirs, queries, chance)
    found = drafts.verify_rows(sampled, tokens, rows, starts, positions, ends, state, queries, chance)
    reached = expected[1].bool()
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found.masked_fill(~reached, 0), expected.masked_fill(~reached, 0))
    for name, mine, other in zip(RowState._fields, state, theirs, strict=True):
        assert mine is not None and other is not None
        assert torch.equal(mine[:MAX_ROWS], other[:MAX_ROWS]), name


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(0, 100))
def test_suffixes_in_rings(seed: int, length: int, begin: int) -> None:
    dice = Dice(seed)
    texts, rows = dice.integers(0, 2, MAX_ROWS, 50).int(), dice.rows(4)[:4]
    begins = torch.full((4,), begin, device=DEVICE)
    tails = torch.where(dice.chances(0.95, 4, MAX_NGRAM), dice.integers(0, 2, 4, MAX_NGRAM).int(), -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "_TEXT_TILE", 16)
        found = drafts.match_suffix(texts, rows, begins, begins + length, tails)
    assert torch.equal(found, match_suffix_reference(texts, rows, begins, begins + length, tails))


def test_the_last_of_the_longest_matches_is_found() -> None:
    text = torch.tensor([[7, 1, 2, 3, 4, 1, 2, 3, 5, 2, 3, 4, 6, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    rows, begins, ends = (torch.tensor([each], device=DEVICE) for each in (0, 0, 13))
    for last, place, length in (([3, 2, 1, 9], 8, 3), ([4, 3, 2, 1], 5, 4), ([4, 3, 2], 12, 3), ([3, 2, 9], 0, 0)):
        tail = torch.tensor([[*last, *[-1] * (MAX_NGRAM - len(last))]], dtype=torch.int32, device=DEVICE)
        for find in (match_suffix_reference, drafts.match_suffix):
            assert find(text, rows, begins, ends, tail).item() == (length << LENGTH_SHIFT) | place


def test_the_last_place_of_a_full_ring_is_searched() -> None:
    text = torch.tensor([[7, 1, 2, 3, 4, 1, 2, 3, 5, 2, 3, 4, 6, 0, 0, 8]], dtype=torch.int32, device=DEVICE)
    rows, begins, ends = (torch.tensor([each], device=DEVICE) for each in (0, 5, 21))
    tail = torch.tensor([[8, 0, 0, 6, *[-1] * (MAX_NGRAM - 4)]], dtype=torch.int32, device=DEVICE)
    for find in (match_suffix_reference, drafts.match_suffix):
        assert find(text.roll(5, 1), rows, begins, ends, tail).item() == (4 << LENGTH_SHIFT) | 21
