"""Scores by kernel against log_softmax and a sort: the same tokens and ranks, the same logarithms but for rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.core.sampling import MAX_LOGPROBS
from quire.kernels.gpu.sampling.logprobs import token_logprobs
from quire.sampling.logprobs import token_logprobs_reference
from quire.sampling.sampler import Sampler
from tests.kernels.gpu_row_kernels import GPU_ROW_KERNELS
from tests.tiers import examples, long_only

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def agree(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """What is packed, of the kernel."""
    found, truth = token_logprobs(logits, tokens, num_top), token_logprobs_reference(logits, tokens, num_top)
    floats = [2, *range(3 + num_top, 3 + 2 * num_top)]
    integers = [0, 1, *range(3, 3 + num_top)]
    assert torch.equal(found[:, integers], truth[:, integers])
    assert torch.allclose(
        found[:, floats].view(torch.float32), truth[:, floats].view(torch.float32), 1e-6, 8e-6, equal_nan=True
    )
    return found


@pytest.mark.parametrize("vocab_size", [1, 40, 4097, *long_only([4096, 13_001], gpu=True)])
@pytest.mark.parametrize("num_top", [0, 5, *long_only([1], gpu=True), MAX_LOGPROBS])
def test_logprobs_agree_across_tiles(vocab_size: int, num_top: int) -> None:
    numbers = torch.Generator().manual_seed(num_top)
    logits = (torch.randn(3, vocab_size, generator=numbers) * 5).to(DEVICE)
    agree(logits, torch.randint(0, vocab_size, (3,), generator=numbers).to(DEVICE), min(num_top, vocab_size))


@settings(max_examples=examples(4, 8, gpu=True))
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 30]), st.integers(0, 9))
def test_of_equal_logits_the_lowest_ids_come_first(seed: int, values: int, num_top: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    ties = torch.randint(-values, values, (2, 4200), generator=numbers)
    logits = (ties / 8 * torch.where(ties == 0, -1.0, 1.0)).to(DEVICE)  # zeros of both signs
    agree(logits, torch.randint(0, 4200, (2,), generator=numbers).to(DEVICE), num_top)


def test_a_tile_or_all_but_one_token_may_be_masked() -> None:
    logits = torch.full((3, 9000), -math.inf, device=DEVICE)
    logits[0, 5000:] = torch.arange(4000.0, device=DEVICE) / 1000
    logits[1, 8999] = 3.0
    logits[2, ::7] = 1e4
    found = agree(logits, torch.tensor([8998, 8999, 14], device=DEVICE), 1)
    assert found[:, 1].tolist() == [2, 1, 1] and found[1, 2:].tolist() == [0, 8999, 0], "certain: a logarithm of 0"


def test_strided_logits_agree() -> None:
    logits = torch.randn(4, 10_000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    agree(logits[::2, :5000], torch.tensor([4999, 0], device=DEVICE), 3)


@pytest.mark.parametrize(("at", "fault"), [(3, math.nan), (8000, -math.nan), (8192, math.nan), (4100, math.inf)])
def test_nan_and_inf_spread_over_their_row_only(at: int, fault: float) -> None:
    logits = torch.randn(3, 8193, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[1, at] = fault
    tokens = torch.tensor([5, 6, 7], device=DEVICE)
    found, truth = token_logprobs(logits, tokens, 3), token_logprobs_reference(logits, tokens, 3)
    scores = found[:, [2, 6, 7, 8]].view(torch.float32)
    assert scores[1].isnan().all() and truth[1, [2, 6, 7, 8]].view(torch.float32).isnan().all()
    assert torch.equal(found[::2], agree(logits[::2], tokens[[0, 2]], 3))


def test_an_empty_batch_has_no_logprobs_and_the_sampler_uses_the_kernel() -> None:
    sampler, tokens = Sampler(1, 150, DEVICE, GPU_ROW_KERNELS), torch.tensor([7], device=DEVICE)
    assert token_logprobs(torch.empty(0, 150, device=DEVICE), tokens[:0], 2).shape == (0, 7)
    logits = torch.randn(1, 150, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores = sampler.logprobs_of(logits, tokens, 4)
    assert torch.equal(torch.from_numpy(scores.packed.wait()), token_logprobs(logits, tokens, 4).cpu())
