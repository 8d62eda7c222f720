"""What can be drawn, and how often: against the slow truth and against transformers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.core.sampling import RowSampling
from quire.sampling.filters import ONE
from tests.sampling.reference import Case, batch_of, probabilities, sampler_of
from tests.sampling.strategies import VOCAB, cases, logits_of
from tests.tiers import examples


@settings(max_examples=examples(50, 150))
@given(st.data())
def test_every_mixture_of_parameters_gives_the_reference_distribution(data: st.DataObject) -> None:
    assigned = data.draw(st.lists(cases(), min_size=1, max_size=5))
    logits = data.draw(logits_of(len(assigned)))
    sampler, batch = sampler_of(assigned, VOCAB)
    weights = sampler.weights(torch.tensor(logits, dtype=torch.float32), batch).double().numpy()
    sampled = sampler.sample(torch.tensor(logits, dtype=torch.float32), batch)
    assert sampled.finite.all()
    for row, case in enumerate(assigned):
        wanted = probabilities(logits[row], case)
        possible = wanted / wanted.max() > 1 / ONE
        assert possible[sampled.tokens[row]]
        if case.sampling.temperature > 0:
            assert ((weights[row] > 0) == possible).all()
            np.testing.assert_allclose(weights[row] / weights[row].sum(), wanted, rtol=1e-4, atol=1e-11)


@pytest.mark.parametrize(
    ("scale", "top_k", "top_p"),
    [
        (9.0, 0, 0.9),
        (2.0, 0, 0.9),
        (0.5, 0, 0.9),
        (0.0, 0, 0.5),
        (2.0, 100, 0.9),
        (2.0, 1500, 0.99),
        (2.0, 4000, 1.0),
    ],
)
def test_a_wide_vocabulary_is_cut_exactly_however_far_down_the_cut_lies(scale: float, top_k: int, top_p: float) -> None:
    """The cut lies among the first few tokens, further down, or needs the whole sort."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 5000, generator=generator) * scale * 64).round() / 64
    case = Case(RowSampling(temperature=1.0, top_k=top_k, top_p=top_p))
    sampler, batch = sampler_of([case, Case(RowSampling(temperature=1.0, top_p=0.01))], 5000)
    weights = sampler.weights(logits, batch)
    wanted = probabilities(logits[0].double().numpy(), case)
    assert int((weights[0] > 0).sum()) == pytest.approx((wanted > 0).sum(), abs=1 if top_p < 1 and scale else 0)
    np.testing.assert_allclose(weights[0] / weights[0].sum(), wanted, rtol=1e-4, atol=1e-5)


def test_draws_follow_the_distribution() -> None:
    case = Case(RowSampling(temperature=0.8, top_p=0.95, seed=11))
    logits = np.linspace(-2, 2, VOCAB)
    sampler, _ = sampler_of([case], VOCAB)
    num_draws = 20_000
    batch = batch_of([0] * num_draws, list(range(num_draws)))
    tokens = sampler.sample(torch.tensor(logits, dtype=torch.float32).expand(num_draws, -1), batch).tokens
    wanted = probabilities(logits, case) * num_draws
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert counts[wanted == 0].sum() == 0
    drawn = wanted > 0
    degrees = drawn.sum() - 1
    chi_square = ((counts[drawn] - wanted[drawn]) ** 2 / wanted[drawn]).sum()
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)


SAME_AS_TRANSFORMERS: list[tuple[RowSampling, list[LogitsProcessor]]] = [
    (RowSampling(temperature=0.6), [TemperatureLogitsWarper(0.6)]),
    (RowSampling(temperature=1.0, top_k=7), [TopKLogitsWarper(7)]),
    (RowSampling(temperature=1.0, top_p=0.8), [TopPLogitsWarper(0.8)]),
    (RowSampling(temperature=1.0, min_p=0.1), [MinPLogitsWarper(0.1)]),
    (RowSampling(temperature=1.0, repetition_penalty=1.7), [RepetitionPenaltyLogitsProcessor(1.7)]),
    (
        RowSampling(temperature=1.4, repetition_penalty=0.7, top_k=40, top_p=0.7),
        [
            RepetitionPenaltyLogitsProcessor(0.7),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.7),
        ],
    ),
]


@pytest.mark.parametrize(("sampling", "processors"), SAME_AS_TRANSFORMERS)
def test_agrees_with_transformers(sampling: RowSampling, processors: list[LogitsProcessor]) -> None:
    logits = torch.randn(16, 400, generator=torch.Generator().manual_seed(7)) * 2
    tokens = (5, 9, 9, 300, 2)
    sampler, batch = sampler_of([Case(sampling, tokens, num_prompt=2)] * 16, 400)
    weights = sampler.weights(logits, batch)
    scores = logits
    for processor in processors:
        scores = processor(torch.tensor([tokens] * 16), scores)
    wanted = scores.softmax(-1)
    assert torch.equal(weights > 0, wanted > 0)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), wanted, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-8, 1e-3])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, -math.inf], [1.0, 1.5, -1e30, 1.25]])
    sampler, batch = sampler_of([Case(RowSampling(temperature=temperature, top_p=0.9))] * 2, 4)
    sampled = sampler.sample(logits, batch)
    assert sampled.finite.all()
    assert sampled.tokens.tolist() == [0, 1]


def test_greedy_takes_the_lowest_of_equals_in_every_width() -> None:
    for vocab_size in (3, 64, 100, 4096):
        logits = torch.zeros(2, vocab_size)
        logits[:, vocab_size // 3] = logits[:, vocab_size - 1] = 2.0
        sampler, batch = sampler_of([Case(RowSampling()), Case(RowSampling(temperature=1.0, top_k=1))], vocab_size)
        assert sampler.sample(logits, batch).tokens.tolist() == [vocab_size // 3] * 2


def test_negative_zero_is_the_equal_of_zero() -> None:
    sampler, batch = sampler_of([Case(RowSampling(temperature=1.0, top_k=1))], 3)
    assert sampler.weights(torch.tensor([[-0.0, 0.0, -1.0]]), batch).tolist() == [[ONE, 0, 0]]
