"""A step's masks: what they forbid is never chosen, what they allow keeps its chances, and other rows see nothing."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import Masks, RowStart
from quire.sampling.row_params import SamplingBatch
from quire.sampling.sampler import Sampler

VOCAB = 70


def bits_of(allowed: set[int]) -> np.ndarray:
    flags = np.zeros(96, dtype=np.uint8)
    flags[list(allowed)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def sampler_with(rows: dict[int, RowSampling]) -> Sampler:
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    for row, sampling in rows.items():
        sampler.assign([RowStart(Row(row), SequenceId(row), 0, np.array([1, 2], dtype=np.int32), 2, 100, sampling)])
    return sampler


def batch_of(rows: list[int]) -> SamplingBatch:
    places = torch.tensor(rows)
    return SamplingBatch(places, np.array(rows, dtype=np.int32), torch.full((len(rows),), 2))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True),
    st.data(),
    st.integers(0, 2**32 - 1),
)
def test_masked_rows_choose_what_is_allowed_and_the_others_what_they_would_have(rows, data, seed):
    masked = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
    allowed = {row: data.draw(st.sets(st.integers(0, VOCAB - 1), min_size=1)) for row in masked}
    hot = data.draw(st.booleans())
    sampling = {
        row: RowSampling(temperature=1.0 if hot else 0.0, seed=row, masked=row in masked, repetition_penalty=1.3)
        for row in rows
    }
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    kept = logits.clone()
    masks = Masks(np.array(masked, dtype=np.int32), np.stack([bits_of(allowed[row]) for row in masked]))
    chosen = sampler_with(sampling).sample(logits, batch_of(rows), masks)
    freely = sampler_with(sampling).sample(logits, batch_of(rows))
    assert torch.equal(logits, kept) and chosen.finite.all()
    for place, row in enumerate(rows):
        token = int(chosen.tokens[place])
        if row in masked:
            assert token in allowed[row]
            if not hot and set(range(VOCAB)) == allowed[row]:
                assert token == int(freely.tokens[place])
        else:
            assert token == int(freely.tokens[place])


def test_a_mask_that_allows_nothing_fails_its_row_alone():
    sampler = sampler_with({0: RowSampling(masked=True), 1: RowSampling()})
    masks = Masks(np.array([0], dtype=np.int32), bits_of(set())[None])
    chosen = sampler.sample(torch.randn(2, VOCAB), batch_of([0, 1]), masks)
    assert chosen.finite.tolist() == [False, True]


def test_greedy_takes_the_likeliest_that_is_allowed():
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    masks = Masks(np.array([3], dtype=np.int32), bits_of({5, 31, 32, 40})[None])
    assert sampler_with({3: RowSampling(masked=True)}).sample(logits, batch_of([3]), masks).tokens.tolist() == [40]
