"""Norms, RoPE, activations and matmuls of the GPU kernels against the reference: on a GPU, else interpreted."""

import math
from dataclasses import replace

import pytest
import torch

from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.gpu import norms, rope_and_kv_write
from quire.kernels.gpu.kernels import GpuKernels
from quire.kernels.interface import PartialSums
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from tests.kernels.rope_inputs import BLOCK_SIZE, HEADS, KV_HEADS, LAYER, Turning, heads_apart
from tests.models.families import FAMILIES, VOCAB, build
from tests.models.running import in_chunks, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts a bfloat16 off where a GPU rounds it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
WIDTHS = [16, 100, 576, 4096]
FAST, TRUTH, CPU = GpuKernels(), ReferenceKernels(), TorchCpuKernels()


def close(fast: torch.Tensor, truth: torch.Tensor) -> None:
    tolerance = TOLERANCE[fast.dtype]
    torch.testing.assert_close(fast, truth, atol=tolerance, rtol=tolerance, equal_nan=True)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_rows_agree(dtype, width):
    x, weight = drawn(3, width, dtype=dtype), drawn(width, seed=1)
    close(FAST.rms_norm(x, weight, 1e-5), TRUTH.rms_norm(x, weight, 1e-5))
    between = drawn(3, 2, width, dtype=dtype)[:, 1]
    close(FAST.rms_norm(between, weight, 1e-5), TRUTH.rms_norm(between, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_strided_heads_agree(dtype):
    x, weight = drawn(5, 7, 40, dtype=dtype)[:, 1:4, :24], drawn(24, seed=1)
    close(FAST.rms_norm(x, weight, 1e-5), TRUTH.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("wide_residual", [True, False])
def test_the_residual_is_added_in_place_and_its_norm_agrees(dtype, width, wide_residual):
    x, weight = drawn(3, width, dtype=dtype), drawn(width, seed=1)
    residuals = [drawn(3, width, dtype=torch.float32 if wide_residual else dtype, seed=2) for _ in range(2)]
    close(FAST.add_rms_norm(x, residuals[0], weight, 1e-5), TRUTH.add_rms_norm(x, residuals[1], weight, 1e-5))
    close(residuals[0], residuals[1])
    if residuals[0].dtype is not torch.bfloat16:
        assert torch.equal(residuals[0], residuals[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_partial_sums_are_added_in_order_and_rounded_once(dtype, num_parts):
    for width in (100, 4096):
        parts, weight = PartialSums(drawn(num_parts, 3, width), dtype), drawn(width, seed=1)
        residuals = [drawn(3, width, seed=2) for _ in range(3)]
        normed = FAST.add_rms_norm(parts, residuals[0], weight, 1e-5)
        assert normed.dtype is dtype
        close(normed, truth := TRUTH.add_rms_norm(parts, residuals[1], weight, 1e-5))
        plain = CPU.add_rms_norm(PartialSums(parts.sums.cpu(), dtype), wide := residuals[2].cpu(), weight.cpu(), 1e-5)
        close(plain, truth.cpu())
        if dtype is not torch.bfloat16 or DEVICE == "cuda":
            assert torch.equal(residuals[0], residuals[1]), "as the plain product would have been"
            assert torch.equal(residuals[0].cpu(), wide)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_shows(bad):
    x = drawn(3, 32)
    x[1, 5] = bad
    normed = FAST.add_rms_norm(x, torch.zeros(3, 32, device=DEVICE), torch.ones(32, device=DEVICE), 1e-5)
    assert normed[1, 5].isnan()
    assert normed[[0, 2]].isfinite().all()


def test_rows_up_to_the_widest_are_normed_and_wider_ones_refused():
    x, weight = drawn(1, 16_384), drawn(16_384, seed=1)
    close(norms.rms_norm(x, weight, 1e-5), TRUTH.rms_norm(x, weight, 1e-5))
    with pytest.raises(AssertionError, match="16385"):
        norms.rms_norm(drawn(1, 16_385), drawn(16_385), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 100, 1500])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_agree(dtype, width, activation):
    x = drawn(3, 2 * width, dtype=dtype) * 4
    close(FAST.act_and_mul(x, activation), TRUTH.act_and_mul(x, activation))


def test_an_activation_far_from_zero_saturates():
    x = torch.tensor([[1e4, -1e4, 2.0, 3.0]], device=DEVICE)
    for activation in ("silu", "gelu_tanh"):
        assert FAST.act_and_mul(x, activation).tolist() == [[2e4, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(32, 32), (20, 12)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotated_queries_and_the_store_agree_and_other_slots_are_untouched(dtype, dim, rotary_dim, has_norm):
    turning = Turning.drawn(dtype, dim=dim, rotary_dim=rotary_dim, has_norm=has_norm, device=DEVICE)
    fast, truth = turning.through(FAST), turning.through(TRUTH)
    close(fast.query, truth.query)
    close(fast.store, truth.store)
    assert fast.store.isfinite().sum() == turning.written(fast.store).numel()


@pytest.mark.parametrize("has_norm", [False, True])
def test_values_are_stored_bit_for_bit_beside_rotated_keys(has_norm):
    turning = Turning.drawn(torch.float16, rotary_dim=16, has_norm=has_norm, device=DEVICE)
    assert torch.equal(turning.written(turning.through(FAST).store)[:, 1], heads_apart(turning.qkv).value)


def test_keys_and_values_are_rounded_to_the_dtype_of_the_store():
    turning = Turning.drawn(torch.float32, rotary_dim=32, has_norm=True, stored=torch.float16, device=DEVICE)
    close(turning.through(FAST).store, turning.through(TRUTH).store)


def test_the_widest_heads_are_rotated():
    turning = Turning.drawn(torch.float16, dim=256, rotary_dim=256, has_norm=True, device=DEVICE)
    fast, truth = turning.through(FAST), turning.through(TRUTH)
    close(fast.query, truth.query)
    close(fast.store, truth.store)


def test_tiles_for_many_tokens_give_the_same_result(monkeypatch):
    monkeypatch.setattr(rope_and_kv_write, "_MANY_TOKENS", 1)
    turning = Turning.drawn(torch.float32, dim=128, rotary_dim=128, has_norm=True, device=DEVICE)
    fast, truth = turning.through(FAST), turning.through(TRUTH)
    close(fast.query, truth.query)
    close(fast.store, truth.store)


def test_strided_heads_are_rotated_and_others_left():
    turning = Turning.drawn(torch.float32, rotary_dim=32, has_norm=False, device=DEVICE)
    wider = torch.full((len(turning.qkv), HEADS + 2 * KV_HEADS + 1, 40), 7.0, device=DEVICE)
    wider[:, 1:, :32] = turning.qkv
    store = turning.store.clone()
    step = FAST.plan(turning.layout, BLOCK_SIZE)
    step.rope_and_write_kv(wider[:, 1:, :32], None, turning.rotation, store[:, LAYER])
    truth = turning.through(TRUTH)
    close(heads_apart(wider[:, 1:, :32]).query, truth.query)
    close(store, truth.store)
    assert (wider[:, 0] == 7).all() and (wider[..., 32:] == 7).all()


def test_keys_beyond_two_to_the_31_numbers_land_in_their_block():
    """Nothing but the last block of a large store is touched, so that no memory is spent on it."""
    turning = Turning.drawn(torch.float16, rotary_dim=32, has_norm=False, device=DEVICE)
    near = turning.through(FAST).store[:, LAYER]
    block_numbers = near[0].numel()
    num_blocks = 2**31 // block_numbers + len(near) + 1
    far = torch.empty(num_blocks, *near.shape[1:], dtype=near.dtype, device=DEVICE)
    first = num_blocks - len(near)
    far[first:] = math.nan
    step = FAST.plan(replace(turning.layout, slots=turning.layout.slots + first * BLOCK_SIZE), BLOCK_SIZE)
    step.rope_and_write_kv(turning.qkv.clone(), None, turning.rotation, far)
    torch.testing.assert_close(far[first:], near, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_matmuls_agree_and_logits_are_not_rounded(dtype, bias):
    x, weight = drawn(5, 32, dtype=dtype), drawn(16, 32, dtype=dtype, seed=1)
    offset = drawn(16, dtype=dtype, seed=2) if bias else None
    close(FAST.linear(x, FAST.pack(weight), offset), TRUTH.linear(x, weight, offset))
    logits = FAST.logits(x, FAST.pack(weight), weight)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, TRUTH.logits(x, weight, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_whole_decoder_agrees_with_the_reference(name):
    """One with a norm of its heads, and one with norms after each half, another gate and capped scores."""
    family = next(family for family in FAMILIES if family.name == name)
    twin = build(family, device=DEVICE)
    lengths = [5, 2]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    fast, truth = (
        run(Decoder(twin.spec, twin.weights, kernels, 16), prompts, in_chunks(lengths, 3), device=DEVICE)
        for kernels in (FAST, TRUTH)
    )
    for left, right in zip(fast, truth, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=0)
