"""Log-probabilities come from the raw logits, whatever shaped the choice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.core.sampling import RowSampling
from quire.sampling import logprobs as logprobs_module
from quire.sampling.logprobs import token_logprobs_reference
from tests.sampling.reference import Case, sampler_of
from tests.sampling.strategies import VOCAB, logits_of


@given(st.data())
def test_scores_equal_log_softmax(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 5))
    logits = torch.tensor(data.draw(logits_of(num_rows)), dtype=torch.float32)
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=num_rows, max_size=num_rows))
    counts = data.draw(st.lists(st.integers(0, VOCAB), min_size=num_rows, max_size=num_rows))
    sampler, _ = sampler_of([Case(RowSampling())], VOCAB)
    scores = sampler.logprobs_of(logits, torch.tensor(tokens), max(counts)).wait(counts)
    wanted = torch.log_softmax(logits, -1).numpy()
    for row, score in enumerate(scores):
        order = sorted(range(VOCAB), key=lambda token, row=row: (-float(logits[row, token]), token))
        assert score.token == tokens[row]
        assert score.logprob == wanted[row, tokens[row]]
        assert score.rank == 1 + int((logits[row] > logits[row, tokens[row]]).sum())
        assert score.ids.tolist() == order[: counts[row]]
        assert score.ids.dtype == np.int32
        np.testing.assert_array_equal(score.logprobs, wanted[row, order[: counts[row]]])


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(7)
    whole = token_logprobs_reference(logits, tokens, 4)
    monkeypatch.setattr(logprobs_module, "_LOGPROBS_AT_ONCE", 600)
    assert torch.equal(token_logprobs_reference(logits, tokens, 4), whole)


def test_nothing_to_score_is_no_error() -> None:
    assert token_logprobs_reference(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 2).shape == (0, 7)


def test_rows_get_the_requested_number_of_logprobs() -> None:
    assigned = [
        Case(RowSampling(num_logprobs=2, logit_bias=((5, 100.0),))),
        Case(RowSampling()),
        Case(RowSampling(num_logprobs=0)),
    ]
    sampler, batch = sampler_of(assigned, 6)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0, 0.0, -1.0]]).expand(3, -1)
    sampled = sampler.sample(logits, batch)
    scores = sampler.logprobs(logits, batch, sampled.tokens)
    assert scores is not None
    by_row = scores.wait()
    assert set(by_row) == {Row(0), Row(2)}
    assert (by_row[Row(0)].token, by_row[Row(0)].rank, by_row[Row(0)].ids.tolist()) == (5, 6, [1, 2])
    assert by_row[Row(0)].logprob == float(torch.log_softmax(logits[0], -1)[5])
    assert (by_row[Row(2)].token, by_row[Row(2)].rank, len(by_row[Row(2)].ids)) == (1, 1, 0)


def test_a_batch_without_logprobs_has_no_scores() -> None:
    sampler, batch = sampler_of([Case(RowSampling())], 6)
    assert sampler.logprobs(torch.zeros(1, 6), batch, torch.tensor([0])) is None
