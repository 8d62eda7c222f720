"""Packed weights of the native kernels: their values against gguf's, their products against float64."""

import math

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu.native_kernels import NativeKernels
from quire.kernels.cpu.native_library import PackedFormat
from quire.kernels.cpu.packed_weight import PackedWeight
from quire.kernels.interface import QuantizedWeight
from tests.kernels.cpu_kernels import native_kernels, needs_native
from tests.kernels.stored_rows import (
    ENCODINGS,
    HALVES,
    PLAIN,
    QUANTIZED,
    SUPER_BLOCKS,
    decoded,
    drawn_rows,
    stored,
    weight_of,
)
from tests.tiers import examples

pytestmark = needs_native

WIDTH = 512  # two super-blocks
GROUP = 32
MAX_CODE = 127 * 256 + 127  # of activations


def unpacked(kernels: NativeKernels, packed: PackedWeight) -> Tensor:
    return kernels.embed(torch.arange(packed.shape[0]), packed)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Activations whose groups differ in size by a factor of a thousand, as those of models do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (3 * torch.rand(shape[0], -(-shape[1] // GROUP), 1, generator=generator) - 2)
    return torch.randn(*shape, generator=generator) * sizes.expand(-1, -1, GROUP).flatten(1)[:, : shape[1]]


def error_bound(x: Tensor, weight: Tensor, quantized: bool) -> Tensor:
    """Of each product: half a step of the 16-bit activations of each group times the weights of the group, and the
    rounding by float32 of a sum of terms of this size. [tokens, out]"""
    x, weight = x.double().abs(), weight.double().abs()
    bound = 1e-6 * (x @ weight.T)
    if quantized:
        half_steps = x.unflatten(1, (-1, GROUP)).amax(-1) / MAX_CODE / 2
        bound += 1.001 * half_steps @ weight.unflatten(1, (-1, GROUP)).sum(-1).T
    return bound + 1e-30


def assert_products(kernels: NativeKernels, packed: PackedWeight, x: Tensor, bias: Tensor | None = None) -> None:
    weight = unpacked(kernels, packed)
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    # One format with less than 16 bits is enough for activations to be rounded; plain segments read them as they are.
    bound = error_bound(x, weight, any(form.quantized for form in packed.formats))
    errors = (kernels.linear(x, packed, bias).double() - exact).abs()
    slack = 0 if bias is None else 1e-6 * (exact.abs() + bias.abs())
    assert (errors <= bound + slack).all(), (errors / bound).max()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_unpacked_rows_are_what_gguf_decodes(encoding: str, num_rows: int) -> None:
    rows = drawn_rows(encoding, num_rows, WIDTH)
    kernels, truth = native_kernels(), decoded(encoding, rows)
    values = unpacked(kernels, kernels.pack(weight_of(WIDTH, stored(encoding, rows))))
    if encoding in SUPER_BLOCKS:
        assert (values - truth).abs().max() <= 1e-3 * truth.abs().max()
    else:  # of a product and a sum, the processor may round once
        torch.testing.assert_close(values, truth, atol=1e-9, rtol=0 if encoding in PLAIN else 1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("num_rows", [5, 48, 71])
@pytest.mark.parametrize("num_tokens", [1, 7, 130])
def test_products_are_within_the_error_of_16_bit_activations(encoding: str, num_rows: int, num_tokens: int) -> None:
    kernels = native_kernels()
    packed = kernels.pack(weight_of(WIDTH, stored(encoding, drawn_rows(encoding, num_rows, WIDTH))))
    assert_products(kernels, packed, drawn(num_tokens, WIDTH))


@pytest.mark.parametrize("encoding", QUANTIZED)
def test_errors_do_not_add_up_in_one_direction(encoding: str) -> None:
    """Roundings cancel: over many products the mean error is a small part of the bound."""
    kernels = native_kernels()
    packed = kernels.pack(weight_of(WIDTH, stored(encoding, drawn_rows(encoding, 64, WIDTH))))
    x, weight = drawn(40, WIDTH), unpacked(kernels, packed)
    relative = (kernels.linear(x, packed, None) - x.double() @ weight.double().T) / error_bound(x, weight, True)
    assert relative.abs().mean() < 0.1 and relative.mean().abs() < 0.01


@pytest.mark.parametrize("width", [1, 2, 33, 48, 577])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_weights_have_any_width(width: int, dtype: torch.dtype) -> None:
    kernels = native_kernels()
    weight = torch.randn(19, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = kernels.pack(weight)
    assert torch.equal(unpacked(kernels, packed), weight.float())
    assert_products(kernels, packed, drawn(6, width))
    quantizing = native_kernels(quantization="int8")
    assert quantizing.pack(weight).formats == packed.formats or width % GROUP == 0


@settings(max_examples=examples(15, 60), deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(ENCODINGS), st.integers(1, 40), st.booleans()), min_size=1, max_size=4),
    num_tokens=st.integers(1, 20),
    has_bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_parts_of_any_encoding_and_order_make_one_matrix(
    parts: list[tuple[str, int, bool]], num_tokens: int, has_bias: bool, seed: int
) -> None:
    kernels, random = native_kernels(), np.random.default_rng(seed)
    rows, truths = [], []
    for index, (encoding, count, shuffled) in enumerate(parts):
        data = drawn_rows(encoding, count, WIDTH, seed + index)
        order = random.permutation(count).tolist() if shuffled else None
        rows.append(stored(encoding, data, order))
        truths.append(decoded(encoding, data)[order if order is not None else slice(None)])
    truth = torch.cat(truths)
    packed = kernels.pack(weight_of(WIDTH, *rows))
    assert packed.shape == tuple(truth.shape)
    assert (unpacked(kernels, packed) - truth).abs().max() <= 1e-3 * truth.abs().max()
    bias = torch.from_numpy(random.normal(0, 1, len(truth)).astype(np.float32)) if has_bias else None
    assert_products(kernels, packed, drawn(num_tokens, WIDTH, seed=seed), bias)


@settings(max_examples=examples(20, 80), deadline=None)
@given(
    encodings=st.lists(st.sampled_from(ENCODINGS), min_size=1, max_size=2),
    num_rows=st.integers(1, 50),
    num_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_a_token_has_the_same_bits_alone_and_in_every_batch(
    encodings: list[str], num_rows: int, num_tokens: int, data: st.DataObject
) -> None:
    weight = weight_of(256, *(stored(each, drawn_rows(each, num_rows, 256)) for each in encodings))
    x = drawn(num_tokens, 256)
    whole = native_kernels(1).linear(x, native_kernels(1).pack(weight), None)
    kernels = native_kernels(2)
    packed = kernels.pack(weight)
    chosen = data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=1, max_size=9))
    assert torch.equal(kernels.linear(x[chosen], packed, None), whole[chosen])
    assert torch.equal(kernels.linear(x, packed, None), whole)


@pytest.mark.parametrize("encoding", QUANTIZED)
@pytest.mark.parametrize("byte", [0x00, 0x77, 0x80, 0xFF])
def test_codes_at_their_ends_fit_every_sum(encoding: str, byte: int) -> None:
    """Codes of weights all lowest or all highest, with activations whose two bytes are at their ends."""
    rows = drawn_rows(encoding, 16, 256)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    blocks = rows.reshape(16, -1, size)
    scales = [at for place in HALVES[encoding] for at in (place, place + 1)]
    blocks[:, :, [at for at in range(size) if at not in scales]] = byte
    kernels = native_kernels()
    packed = kernels.pack(weight_of(256, stored(encoding, rows)))
    ends = torch.tensor([MAX_CODE, -MAX_CODE, 127 * 256 - 128, 128 - 127 * 256])
    x = ends[:, None].repeat(1, 256).float()
    x[:, ::GROUP] = MAX_CODE  # so that the scale of each group is 1
    for tokens in (x[:1], x[1:3], x[2:], x[3:], x):
        assert_products(kernels, packed, tokens)


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q4_0", "Q4_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_activation_that_is_not_finite_shows_in_its_own_row_only(encoding: str, bad: float) -> None:
    kernels = native_kernels()
    packed = kernels.pack(weight_of(256, stored(encoding, drawn_rows(encoding, 20, 256))))
    x = drawn(6, 256)
    clean = kernels.linear(x, packed, None)
    x[2, 100] = bad
    found = kernels.linear(x, packed, None)
    assert not found[2].isfinite().any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])


def test_activations_of_zero_and_of_the_largest_numbers() -> None:
    kernels = native_kernels()
    packed = kernels.pack(weight_of(256, stored("Q4_1", drawn_rows("Q4_1", 16, 256))))
    x = torch.zeros(3, 256)
    x[1, 7], x[2, 9] = 1e30, 1e-30
    weight, found = unpacked(kernels, packed), kernels.linear(x, packed, None)
    assert (found[0] == 0).all()
    torch.testing.assert_close(found[1:], x[1:] @ weight.T, rtol=1e-4, atol=0)


def quantized_at_load(bits: int, weight: Tensor) -> Tensor:
    kernels = native_kernels(quantization=f"int{bits}")
    return unpacked(kernels, kernels.pack(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int8_at_load_is_within_half_a_step(dtype: torch.dtype) -> None:
    weight = (0.05 * torch.randn(40, 128, generator=torch.Generator().manual_seed(1))).to(dtype).float()
    weight[3, :GROUP] = 0.0
    groups = weight.unflatten(1, (-1, GROUP))
    steps = groups.abs().amax(-1, keepdim=True) / 127
    errors = (quantized_at_load(8, weight).unflatten(1, (-1, GROUP)) - groups).abs()
    assert (errors <= steps * (0.5 + 127 * 2**-11)).all()  # scales have eleven bits
    assert (errors[3, 0] == 0).all()


def test_int4_at_load_is_not_worse_than_rounding_between_minimum_and_maximum() -> None:
    weight = 0.05 * torch.randn(40, 128, generator=torch.Generator().manual_seed(1))
    weight[0, :GROUP], weight[1, :GROUP] = 0.0, 0.25
    weight[2, 5] = 3.0
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    minimum, scale = low.half().float(), ((high - low) / 15).half().float()
    plain = minimum + scale * ((groups - minimum) / scale.clamp(min=1e-12)).round().clamp(0, 15)
    ours = quantized_at_load(4, weight).unflatten(1, (-1, GROUP))
    theirs, mine = (((each - groups) ** 2).sum(-1) for each in (plain, ours))
    assert (mine <= theirs * (1 + 1e-5) + 1e-12).all()
    assert mine.sum() < 0.97 * theirs.sum(), "a range smaller than that of the group is finer between"
    assert (ours[:2, 0] == groups[:2, 0]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_weights_quantized_at_load(bits: int) -> None:
    kernels = native_kernels(quantization=f"int{bits}")
    weight = 0.05 * torch.randn(40, 128, generator=torch.Generator().manual_seed(1))
    assert_products(kernels, kernels.pack(weight), drawn(9, 128))


def formats(quantization: str, encoding: str, *, head: bool = False) -> tuple[PackedFormat, ...]:
    kernels = native_kernels(quantization=quantization)
    weight: QuantizedWeight = weight_of(WIDTH, stored(encoding, drawn_rows(encoding, 16, WIDTH)))
    return (kernels.pack_head(weight) if head else kernels.pack(weight)).formats


def test_quantization_at_load_makes_weights_smaller_and_leaves_small_ones_as_stored() -> None:
    assert formats("int8", "BF16") == formats("int8", "Q8_0") == (PackedFormat.INT8,)
    assert formats("int4", "F16") == formats("int4", "Q8_0") == (PackedFormat.INT4_MINIMUM,)
    assert formats("int8", "Q4_0") == formats("int4", "Q4_0") == (PackedFormat.INT4,)
    assert formats("int8", "Q6_K") == (PackedFormat.INT6,)
    assert formats("int4", "BF16", head=True) == (PackedFormat.INT8,), "the head keeps 8 bits"
    assert formats("int4", "Q4_1", head=True) == (PackedFormat.INT4_MINIMUM,), "unless it is stored with fewer"


def test_memory_of_a_packed_weight_is_that_of_its_encoding() -> None:
    kernels = native_kernels()
    bits = {"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q4_K": 5, "IQ4_NL": 4.5}
    bits |= {"Q5_0": 5.5, "Q5_1": 6, "Q5_K": 6, "Q6_K": 7, "Q3_K": 5, "IQ4_XS": 4.5}
    for encoding in ENCODINGS:
        packed = kernels.pack(weight_of(WIDTH, stored(encoding, drawn_rows(encoding, 32, WIDTH))))
        assert packed.nbytes * 8 == 32 * WIDTH * bits[encoding], encoding
