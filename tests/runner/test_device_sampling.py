"""Drafts on the device beside all that sampling can do: the same tokens, ends and log-probabilities."""

import pytest
import torch

from tests.runner.drafted_requests import Kernels, Said, all_wishes, assert_same, say
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS

VOCAB = 150
CAPTURED = Kernels(torch.device("cpu"), REFERENCE_ROW_KERNELS)
WISHES = all_wishes(VOCAB)


@pytest.fixture(scope="module")
def truth() -> Said:
    """Without drafts and graphs, one step after the other."""
    return say(WISHES, Kernels(CAPTURED.device, None), vocab_size=VOCAB)


@pytest.mark.parametrize(("depth", "num_blocks"), [(0, 400), (1, 400), (2, 400), (1, 45)])
def test_no_sampling_feature_sees_the_drafts(truth: Said, depth: int, num_blocks: int) -> None:
    drafted = say(WISHES, CAPTURED, vocab_size=VOCAB, foretold=truth.texts, depth=depth, num_blocks=num_blocks)
    assert_same(drafted, truth)
    assert min(drafted.accepted) >= 3, "drafts of every request are accepted"
    assert drafted.rejected > 100
    assert bool(drafted.preemptions) == (num_blocks < 100)


def test_captured_steps_without_drafts_say_the_same(truth: Said) -> None:
    plain = say(WISHES, CAPTURED, vocab_size=VOCAB, depth=1)
    assert_same(plain, truth)
    assert not any(plain.accepted)
    assert len(set(map(tuple, truth.texts.values()))) == len(truth.texts), "features that change what is said"
