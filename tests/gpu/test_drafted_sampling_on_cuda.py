"""Drafts in CUDA graphs beside penalties, bias, bad words, min_tokens, log-probabilities and grammars."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import select_kernels
from quire.runner.captured_steps import CapturedSteps
from quire.runner.device_drafting import DeviceDrafting
from tests.runner.drafted_requests import Kernels, Said, all_wishes, assert_same, say

VOCAB = 2500  # more than one tile of the kernels
WISHES = all_wishes(VOCAB)
GREEDY = [number for number, wish in enumerate(WISHES) if not wish.temperature]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    choice = select_kernels("cuda")
    assert choice.row_kernels is not None and choice.draft_kernels is not None, choice.reason
    return Kernels(torch.device("cuda"), choice.row_kernels, choice.draft_kernels)


@pytest.fixture(scope="module")
def truth(kernels: Kernels) -> Said:
    """Without drafts."""
    return say(WISHES, kernels, vocab_size=VOCAB, depth=1)


def test_greedy_texts_without_drafts_are_those_of_tensor_operations_on_the_cpu(truth: Said) -> None:
    plain = say(WISHES, Kernels(torch.device("cpu"), None), vocab_size=VOCAB)
    assert [plain.texts[number, 0] for number in GREEDY] == [truth.texts[number, 0] for number in GREEDY]


@pytest.mark.parametrize(
    ("depth", "num_blocks", "reference"),
    [(1, 400, False), (0, 400, False), (2, 400, False), (1, 45, False), (1, 400, True)],
)
def test_no_sampling_feature_sees_the_drafts(
    kernels: Kernels, truth: Said, depth: int, num_blocks: int, reference: bool
) -> None:
    if reference:
        kernels = kernels._replace(drafts=REFERENCE_DRAFT_KERNELS)
    drafted = say(WISHES, kernels, vocab_size=VOCAB, foretold=truth.texts, depth=depth, num_blocks=num_blocks)
    assert_same(drafted, truth)
    assert min(drafted.accepted) >= 3, "drafts of every request are accepted"
    assert drafted.rejected > 100
    assert bool(drafted.preemptions) == (num_blocks < 100)


def test_no_step_with_drafts_waits_for_the_device(
    kernels: Kernels, truth: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch raises at any operation that does."""
    calls = []

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(work)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return work(*given)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for owner, name in ((CapturedSteps, "_sample_verified"), (DeviceDrafting, "make")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    drafted = say(WISHES, kernels, vocab_size=VOCAB, foretold=truth.texts, depth=1)
    assert_same(drafted, truth)
    assert len(set(calls)) == 2 and len(calls) > 20
