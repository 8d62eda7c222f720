"""AMX matmuls: float32 times bfloat16 against the reference, on every CPU that has AMX."""

import math

import pytest
import torch

from quire.kernels.cpu.kernels import CpuKernels
from quire.kernels.reference import ReferenceKernels

TILES, TRUTH = CpuKernels(), ReferenceKernels()
pytestmark = pytest.mark.skipif(not TILES.has_amx, reason="this CPU has no matrix unit, or numba is not installed")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize(("out", "width"), [(16, 32), (48, 64), (80, 576), (960, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_matmuls_keep_sixteen_bits_of_float32(rows, out, width, bias):
    x, weight = drawn(rows, width), drawn(out, width, seed=1).bfloat16()
    offset = drawn(out, seed=2).bfloat16() if bias else None
    product = TILES.linear(x, TILES.pack(weight), offset)
    exact = TRUTH.linear(x.double(), weight, offset)
    assert product.dtype is torch.float32
    error = (product - exact).norm() / exact.norm()
    assert error < 1e-5  # rounding x to bfloat16 alone would make it 1e-3


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_threads_agrees(num_threads):
    x, weight = drawn(5, 64), drawn(5 * 16, 64, seed=1).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        product = TILES.linear(x, TILES.pack(weight), None)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(product, TRUTH.linear(x, weight, None), atol=1e-3, rtol=1e-4)


def test_a_row_is_the_same_in_every_batch():
    x, packed = drawn(33, 64), TILES.pack(drawn(48, 64, seed=1).bfloat16())
    whole = TILES.linear(x, packed, None)
    for row in range(33):
        assert torch.equal(TILES.linear(x[row : row + 1], packed, None)[0], whole[row])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_shows(bad):
    x = drawn(20, 64)
    x[17, 5] = bad
    product = TILES.linear(x, TILES.pack(drawn(32, 64, seed=1).bfloat16()), None)
    assert not product[17].isfinite().any()
    assert product[:17].isfinite().all() and product[18:].isfinite().all()


@pytest.mark.parametrize(("out", "width"), [(40, 64), (64, 40)])
def test_weights_that_do_not_fill_tiles_are_multiplied_in_bfloat16(out, width):
    x, weight = drawn(3, width), drawn(out, width, seed=1).bfloat16()
    product = TILES.linear(x, TILES.pack(weight), None)
    assert product.dtype is torch.float32
    torch.testing.assert_close(product, TRUTH.linear(x, weight, None), atol=0.2, rtol=2e-2)


def test_logits_need_no_recomputation():
    x, weight = drawn(4, 64), drawn(128, 64, seed=1).bfloat16()
    logits = TILES.logits(x, TILES.pack(weight), weight)
    torch.testing.assert_close(logits, TRUTH.logits(x, weight, weight), atol=1e-3, rtol=1e-4)
