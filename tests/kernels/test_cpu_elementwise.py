"""Norms, gates and linear layers of the CPU kernels against the reference."""

import math

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import select_kernels

DTYPES = [torch.float32, torch.bfloat16]
FAST, TRUTH = CpuKernels(use_amx=False), ReferenceKernels()
NORMS = [
    pytest.param(FAST, id="numba", marks=pytest.mark.skipif(not FAST.compiled, reason="numba is not installed")),
    pytest.param(CpuKernels(use_numba=False), id="torch"),
]


def close(fast: torch.Tensor, truth: torch.Tensor) -> None:
    assert fast.dtype == truth.dtype
    tolerance = 1e-5 if fast.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast, truth, atol=tolerance, rtol=tolerance)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_packed_weight_multiplies_as_the_plain_one(dtype, bias, rows):
    x, weight = drawn(rows, 48, dtype=dtype), drawn(40, 48, dtype=dtype, seed=1)
    offset = drawn(40, dtype=dtype, seed=2) if bias else None
    fast = FAST.linear(x, FAST.pack(weight), offset)
    truth = TRUTH.linear(x, TRUTH.pack(weight), offset)
    torch.testing.assert_close(fast, truth, atol=1e-4 if dtype == torch.float32 else 0.13, rtol=1e-2)


@pytest.mark.parametrize("kernels", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_agree_for_rows_and_for_some_of_the_heads(kernels, dtype):
    x, weight = drawn(5, 6, 32, dtype=dtype), drawn(32, seed=1)
    close(kernels.rms_norm(x, weight, 1e-5), TRUTH.rms_norm(x, weight, 1e-5))
    close(kernels.rms_norm(x[:, :4], weight, 1e-5), TRUTH.rms_norm(x[:, :4], weight, 1e-5))


@pytest.mark.parametrize("kernels", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (1, 576), (3, 7), (32, 577), (200, 33)])
def test_norms_agree_at_every_size(kernels, dtype, rows, width):
    x, weight = drawn(rows, width, dtype=dtype), drawn(width, seed=1)
    close(kernels.rms_norm(x, weight, 1e-5), TRUTH.rms_norm(x, weight, 1e-5))
    residuals = [drawn(rows, width, seed=2) for _ in range(2)]
    close(kernels.add_rms_norm(x, residuals[0], weight, 1e-5), TRUTH.add_rms_norm(x, residuals[1], weight, 1e-5))
    assert torch.equal(residuals[0], residuals[1])


@pytest.mark.parametrize("kernels", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_adding_to_the_residual_happens_in_place_and_before_the_norm(kernels, dtype, residual_dtype):
    x, weight = drawn(5, 32, dtype=dtype), drawn(32, seed=1)
    residuals = [drawn(5, 32, dtype=residual_dtype, seed=2) for _ in range(2)]
    before = residuals[0].clone()
    close(kernels.add_rms_norm(x, residuals[0], weight, 1e-5), TRUTH.add_rms_norm(x, residuals[1], weight, 1e-5))
    assert torch.equal(residuals[0], residuals[1])
    assert torch.equal(residuals[0], (before + x).to(residual_dtype))


@pytest.mark.parametrize("kernels", NORMS)
def test_norms_round_to_the_nearest_bfloat16_and_halves_to_even(kernels):
    """A row of ones has norm 1, so that the output is the weight, rounded."""
    half = 2.0**-8  # of the last place of a bfloat16 between 1 and 2
    weight = torch.tensor([1 + half, 1 + 3 * half, 1 + half * 1.01, 1 + half * 0.99, -1 - half, 3.4e38, 0.0, -0.0])
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert torch.equal(kernels.rms_norm(x, weight, 0.0), weight.bfloat16().expand(2, 8))


@pytest.mark.parametrize("kernels", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_shows(kernels, dtype, bad):
    x = drawn(3, 32, dtype=dtype)
    x[1, 5] = bad
    normed = kernels.add_rms_norm(x, torch.zeros(3, 32), torch.ones(32), 1e-5)
    assert normed[1, 5].isnan()
    assert normed[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_agree(dtype, activation):
    x = drawn(5, 64, dtype=dtype)
    close(FAST.act_and_mul(x, activation), TRUTH.act_and_mul(x, activation))


def test_kernels_are_chosen_with_a_reason_and_unknown_ones_refused():
    choice = select_kernels("cpu")
    assert choice.kernels.name == "cpu" and "CPU" in choice.reason
    assert select_kernels("reference").kernels.name == "reference"
    with pytest.raises(ConfigError, match="abacus"):
        select_kernels("abacus")


@pytest.mark.parametrize("vocab_size", [64, 65, 320])
def test_near_ties_of_logits_are_resolved_in_float32(vocab_size) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 32, generator=generator).bfloat16()
    weight = torch.randn(vocab_size, 32, generator=generator).bfloat16()
    weight[1] = weight[0]
    weight[1, 0] += weight[1, 0].abs() * 2**-7  # so close that bfloat16 logits cannot tell them apart
    weight[:2] += 4 * x.mean(0).sign()
    cpu = CpuKernels(use_amx=False)
    exact = ReferenceKernels().logits(x, weight, weight)
    settled = cpu.logits(x, cpu.pack(weight), weight)
    assert settled.dtype is torch.float32
    assert torch.equal(settled.argmax(-1), exact.argmax(-1))
    highest = exact.amax(-1, keepdim=True)
    near = exact >= highest - highest.abs() * 2**-7
    torch.testing.assert_close(settled[near], exact[near], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(settled, exact, atol=0.1, rtol=2**-7)
