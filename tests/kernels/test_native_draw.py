"""Tokens drawn by the native kernels: those of the chain of tensor operations, whatever the rows ask for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.sampling import RowSampling
from quire.sampling.sampler import Sampler
from tests.kernels.cpu_kernels import native_kernels, needs_native
from tests.sampling.reference import CPU, Case, batch_of, row_start
from tests.sampling.strategies import cases, logits_of
from tests.tiers import examples

pytestmark = needs_native

MIXTURE = (
    RowSampling(),
    RowSampling(temperature=1.0),
    RowSampling(temperature=0.6, min_p=0.05),
    RowSampling(temperature=0.7, top_k=1),
    RowSampling(temperature=1.3, top_k=40),
    RowSampling(temperature=0.8, top_p=0.9),
    RowSampling(temperature=2.0, top_p=0.999),
    RowSampling(temperature=1.0, top_p=1e-9),
    RowSampling(temperature=1.0, top_k=20, top_p=0.6),
    RowSampling(temperature=1.5, top_k=300, top_p=0.95, min_p=0.002),
    RowSampling(temperature=1e-9, top_p=0.5),
)


def agree(drawn: list[Case], logits: Tensor, positions: list[int]) -> list[int]:
    """The tokens of both, at each of the positions."""
    count, vocab_size = logits.shape
    native = Sampler(count, vocab_size, CPU, draw_tokens=native_kernels().draw_tokens)
    plain = Sampler(count, vocab_size, CPU)
    for sampler in (native, plain):
        for row, case in enumerate(drawn):
            row_start(sampler, row, case)
    tokens = []
    for position in positions:
        batch = batch_of(list(range(count)), [position] * count)
        found, truth = native.sample(logits, batch), plain.sample(logits, batch)
        assert found.finite.tolist() == truth.finite.tolist()
        assert found.tokens.tolist() == truth.tokens.tolist()
        tokens += found.tokens.tolist()
    return tokens


@settings(max_examples=examples(20, 400), deadline=None)
@given(rows=st.lists(cases(), min_size=1, max_size=6), data=st.data())
def test_rows_of_every_kind_get_the_token_of_the_reference(rows: list[Case], data: st.DataObject) -> None:
    logits = torch.from_numpy(data.draw(logits_of(len(rows)))).float()
    agree(rows, logits, [8, 9, 10])


@pytest.mark.parametrize("vocab_size", [1, 63, 5000, 49152])
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 6.0])
def test_large_vocabularies_with_flat_and_steep_distributions(vocab_size: int, spread: float) -> None:
    rows = [Case(sampling) for sampling in MIXTURE if sampling.top_k <= vocab_size]
    logits = spread * torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(0))
    tokens = agree(rows, logits, list(range(1, 1 + examples(2, 5))))
    assert vocab_size == 1 or len(set(tokens)) > 1


def test_tokens_that_are_forbidden_and_rows_that_are_not_finite() -> None:
    rows = [Case(sampling) for sampling in MIXTURE]
    logits = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(1))
    logits[:, 3:600] = -math.inf
    agree(rows, logits, [5, 6])
    for row, bad in ((1, math.nan), (4, math.inf), (8, math.nan)):
        logits[row, row] = bad
    logits[5] = -math.inf
    logits[9] = math.nan
    agree(rows, logits, [5, 6])
