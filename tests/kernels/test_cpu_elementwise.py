"""Norms, gates and linear layers of the CPU kernels against the reference."""

import math
from itertools import product

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.attention_backends import USUAL_NEEDS
from quire.kernels.cpu.native_kernels import MAX_HEAD_DIM, NativeKernels
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import select_kernels
from tests.kernels.cpu_kernels import cpu_kernels, each_kernels, needs_native

TRUTH = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]
# The native kernels compute and return float32.
SETS = [
    pytest.param("native", torch.float32, marks=needs_native),
    ("torch", torch.float32),
    ("torch", torch.bfloat16),
]
each_set = pytest.mark.parametrize(("name", "dtype"), SETS)


def close(fast: torch.Tensor, truth: torch.Tensor) -> None:
    assert fast.dtype == truth.dtype
    tolerance = 1e-5 if fast.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast, truth, atol=tolerance, rtol=tolerance)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@each_set
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_packed_weight_multiplies_as_the_plain_one(name, dtype, weight_dtype, bias, rows):
    kernels = cpu_kernels(name)
    x, weight = drawn(rows, 48, dtype=dtype), drawn(40, 48, dtype=weight_dtype, seed=1)
    offset = drawn(40, dtype=weight_dtype, seed=2) if bias else None
    fast = kernels.linear(x, kernels.pack(weight), offset)
    truth = TRUTH.linear(x, TRUTH.pack(weight), offset)
    exact = name == "native" or dtype == weight_dtype == torch.float32
    torch.testing.assert_close(fast, truth, atol=1e-4 if exact else 0.13, rtol=1e-5 if exact else 1e-2)


@each_set
def test_norms_agree_for_rows_and_for_some_of_the_heads(name, dtype):
    kernels = cpu_kernels(name)
    x, weight = drawn(5, 6, 32, dtype=dtype), drawn(32, seed=1)
    close(kernels.rms_norm(x, weight, 1e-5), TRUTH.rms_norm(x, weight, 1e-5))
    close(kernels.rms_norm(x[:, :4], weight, 1e-5), TRUTH.rms_norm(x[:, :4], weight, 1e-5))


@each_set
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (1, 576), (3, 7), (32, 577), (200, 33)])
def test_norms_agree_at_every_size(name, dtype, rows, width):
    kernels = cpu_kernels(name)
    x, weight = drawn(rows, width, dtype=dtype), drawn(width, seed=1)
    close(kernels.rms_norm(x, weight, 1e-5), TRUTH.rms_norm(x, weight, 1e-5))
    residuals = [drawn(rows, width, seed=2) for _ in range(2)]
    close(kernels.add_rms_norm(x, residuals[0], weight, 1e-5), TRUTH.add_rms_norm(x, residuals[1], weight, 1e-5))
    assert torch.equal(residuals[0], residuals[1])


@pytest.mark.parametrize(
    ("name", "dtype", "residual_dtype"),
    [pytest.param("native", torch.float32, torch.float32, marks=needs_native), *product(["torch"], DTYPES, DTYPES)],
)
def test_adding_to_the_residual_happens_in_place_and_before_the_norm(name, dtype, residual_dtype):
    kernels = cpu_kernels(name)
    x, weight = drawn(5, 32, dtype=dtype), drawn(32, seed=1)
    residuals = [drawn(5, 32, dtype=residual_dtype, seed=2) for _ in range(2)]
    before = residuals[0].clone()
    close(kernels.add_rms_norm(x, residuals[0], weight, 1e-5), TRUTH.add_rms_norm(x, residuals[1], weight, 1e-5))
    assert torch.equal(residuals[0], residuals[1])
    assert torch.equal(residuals[0], (before + x).to(residual_dtype))


def test_norms_round_to_the_nearest_bfloat16_and_halves_to_even():
    """A row of ones has norm 1, so that the output is the weight, rounded."""
    half = 2.0**-8  # of the last place of a bfloat16 between 1 and 2
    weight = torch.tensor([1 + half, 1 + 3 * half, 1 + half * 1.01, 1 + half * 0.99, -1 - half, 3.4e38, 0.0, -0.0])
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert torch.equal(TorchCpuKernels().rms_norm(x, weight, 0.0), weight.bfloat16().expand(2, 8))


@each_set
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_shows(name, dtype, bad):
    kernels = cpu_kernels(name)
    x = drawn(3, 32, dtype=dtype)
    x[1, 5] = bad
    normed = kernels.add_rms_norm(x, torch.zeros(3, 32), torch.ones(32), 1e-5)
    assert normed[1, 5].isnan()
    assert normed[[0, 2]].isfinite().all()


@each_set
@pytest.mark.parametrize("width", [1, 7, 32, 61])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_agree(name, dtype, width, activation):
    x = 3 * drawn(5, 2 * width, dtype=dtype)
    close(cpu_kernels(name).act_and_mul(x, activation), TRUTH.act_and_mul(x, activation))


@each_kernels
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_activation_far_from_zero_saturates_and_nan_shows(name, activation):
    gate = torch.tensor([1e4, -1e4, 200.0, -200.0, 0.0, -90.0, 1e20, math.nan, 1.0])
    x = torch.cat([gate, torch.full_like(gate, 2.0)])[None]
    activated = cpu_kernels(name).act_and_mul(x, activation)[0]
    assert activated[[0, 2, 4, 6]].tolist() == pytest.approx([2e4, 400.0, 0.0, 2e20])
    assert activated[[1, 3, 5]].abs().max() < 1e-30
    assert activated[7].isnan() and activated[8].isfinite()


def test_kernels_are_chosen_with_a_reason_and_unknown_ones_refused():
    choice = select_kernels("cpu")
    assert choice.kernels.name == "cpu" and "CPU" in choice.reason
    assert select_kernels("reference").kernels.name == "reference"
    with pytest.raises(ConfigError, match="abacus"):
        select_kernels("abacus")


@needs_native
def test_heads_too_wide_for_the_native_kernels_are_computed_by_torch():
    wide = USUAL_NEEDS._replace(dim=MAX_HEAD_DIM + 8)
    choice = select_kernels("cpu", wide)
    assert isinstance(choice.kernels, TorchCpuKernels) and "520 numbers are wider than 512" in choice.reason
    assert isinstance(select_kernels("cpu", USUAL_NEEDS._replace(dim=MAX_HEAD_DIM)).kernels, NativeKernels)
    with pytest.raises(ConfigError, match="wider than 512"):
        select_kernels("cpu", wide, quantization="int8")
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype=int8 needs the native CPU kernels.*wider than 512"
    ) as caught:
        select_kernels("cpu", wide, kv_dtype=torch.int8)
    assert caught.value.param == "kv_cache_dtype"
    assert isinstance(select_kernels("cpu", wide, kv_dtype=wide.dtype).kernels, TorchCpuKernels), "it is so anyway"
    assert select_kernels("cpu", USUAL_NEEDS, batch_invariant=True).kernels.name == "cpu"
    with pytest.raises(ConfigError, match="wider than 512") as caught:
        select_kernels("cpu", wide, batch_invariant=True)
    assert caught.value.param == "batch_invariant"


@pytest.mark.parametrize("vocab_size", [64, 65, 320])
def test_near_ties_of_logits_are_resolved_in_float32(vocab_size) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 32, generator=generator).bfloat16()
    weight = torch.randn(vocab_size, 32, generator=generator).bfloat16()
    weight[1] = weight[0]
    weight[1, 0] += weight[1, 0].abs() * 2**-7  # so close that bfloat16 logits cannot tell them apart
    weight[:2] += 4 * x.mean(0).sign()
    cpu = TorchCpuKernels()
    exact = ReferenceKernels().logits(x, weight, weight)
    settled = cpu.logits(x, cpu.pack(weight), weight)
    assert settled.dtype is torch.float32
    assert torch.equal(settled.argmax(-1), exact.argmax(-1))
    highest = exact.amax(-1, keepdim=True)
    near = exact >= highest - highest.abs() * 2**-7
    torch.testing.assert_close(settled[near], exact[near], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(settled, exact, atol=0.1, rtol=2**-7)
