"""How rows end on the device."""

import torch

from quire.core.sampling import RowSampling
from tests.sampling.reference import Case, batch_of, sampler_of


def test_rows_end_by_their_own_tokens_and_lengths() -> None:
    assigned = [
        Case(RowSampling(end_ids=(7,)), max_length=10),
        Case(RowSampling(end_ids=(7, 8, 9)), max_length=10),
        Case(RowSampling(), max_length=10),
        Case(RowSampling(end_ids=(7,)), max_length=6),
        Case(RowSampling(end_ids=(7,)), max_length=6),
        Case(RowSampling(end_ids=(7,)), max_length=7),
    ]
    sampler, _ = sampler_of(assigned, 16)
    ends = sampler.ends(batch_of(list(range(6)), [5] * 6), torch.tensor([9, 9, 9, 9, 7, 9]))
    assert ends.stop.tolist() == [False, True, False, False, True, False]
    assert ends.length.tolist() == [False, False, False, True, False, False]
