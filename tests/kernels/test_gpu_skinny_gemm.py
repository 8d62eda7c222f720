"""Few rows times a small weight against float64: compiled on a GPU, else interpreted."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gpu import kernels
from quire.kernels.gpu.gemm import skinny as skinny_gemm
from quire.kernels.gpu.gemm.skinny import SkinnyTiles, fits
from quire.kernels.gpu.kernels import GpuKernels
from tests.tiers import examples, long_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# The interpreter knows no bfloat16 dots.
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
MOST = skinny_gemm._MAX_ROWS
SUMS = SkinnyTiles(outs=8, warps=1, columns=64, stages=1, dots=False)
DOTS = SkinnyTiles(outs=16, warps=2, columns=16, stages=3, dots=True)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(product: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Float32 sums, rounded once: an error of one rounding beside that of adding so many numbers."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    assert product.dtype is x.dtype
    assert ((product - exact).abs() <= ROUNDING[x.dtype] * exact.abs() + 2**-18 * sizes).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("tiles", [SUMS, DOTS], ids=["sums", "dots"])
@settings(max_examples=examples(4, 8, gpu=True))
@given(
    num_rows=st.integers(1, 16),
    in_width=st.integers(1, 10).map(lambda chunks: 16 * chunks),
    out_width=st.integers(1, 40),
    has_bias=st.booleans(),
)
def test_gemms_of_every_shape_agree(dtype, tiles, num_rows, in_width, out_width, has_bias):
    x, weight = drawn(num_rows, in_width, dtype=dtype), drawn(out_width, in_width, dtype=dtype, seed=1)
    bias = drawn(out_width, dtype=dtype, seed=2) if has_bias else None
    close(skinny_gemm.skinny_gemm(x, weight, bias, tiles), x, weight, bias)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_rows", [1, 3, MOST, *long_only([2, *range(4, MOST)], gpu=True)])
def test_real_widths_agree_with_and_without_a_bias(dtype, num_rows):
    for in_width, out_width in ((576, 21), (1024, 37)):
        x, weight = drawn(num_rows, in_width, dtype=dtype), drawn(out_width, in_width, dtype=dtype, seed=1)
        for bias in (None, drawn(out_width, dtype=dtype, seed=2)):
            assert fits(x, weight, None)
            close(GpuKernels().linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("out_width", [64, 2049])
def test_every_line_of_the_tile_table_agrees(out_width):
    for num_rows in (1, 2):
        x, weight = drawn(num_rows, 1536, dtype=torch.float16), drawn(out_width, 1536, dtype=torch.float16, seed=1)
        tiles = skinny_gemm._tiles(num_rows, 1536, out_width)
        assert tiles.dots == (num_rows > 1)
        last = weight[-20:]  # as many as tell that the tiles are right; a line of the table is chosen by all
        close(skinny_gemm.skinny_gemm(x, last, None, tiles), x, last, None)


def test_a_row_is_the_same_in_any_batch():
    weight = drawn(24, 576, dtype=torch.float16)
    x = drawn(skinny_gemm._MAX_ROWS, 576, dtype=torch.float16, seed=1)
    whole = GpuKernels().linear(x, weight, None)
    for num_rows in range(2, len(x)):
        assert torch.equal(GpuKernels().linear(x[-num_rows:], weight, None), whole[-num_rows:])


@pytest.mark.parametrize("tiles", [SUMS, DOTS], ids=["sums", "dots"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_where_it_is(tiles, bad):
    """In a row: in its products. Behind the weight and behind the rows: nowhere, though tiles reach beyond both."""
    rows, weights = drawn(4, 80, dtype=torch.float16), drawn(9, 80, dtype=torch.float16, seed=1)
    rows[1, 5], rows[3], weights[7:] = bad, bad, bad
    product = skinny_gemm.skinny_gemm(rows[:3], weights[:7], None, tiles)
    assert not product[1].isfinite().any()
    assert product[[0, 2]].isfinite().all()


HALF = torch.zeros(2, 1024, dtype=torch.float16, device=DEVICE)
WEIGHT = torch.zeros(16, 1024, dtype=torch.float16, device=DEVICE)
CHOICES = {
    "two rows": (HALF, WEIGHT, True),
    "too many rows": (HALF[:1].repeat(9, 1), WEIGHT, False),
    "no rows": (HALF[:0], WEIGHT, False),
    "float32": (HALF.float(), WEIGHT.float(), False),
    "rows apart": (HALF.repeat(1, 2)[:, :1024], WEIGHT, False),
    "a turned weight": (HALF, WEIGHT.T.contiguous().T, False),
    "narrow": (HALF[:, :240].contiguous(), WEIGHT[:, :240].contiguous(), False),
    "loads of less than 16 bytes": (HALF[:, :1020].contiguous(), WEIGHT[:, :1020].contiguous(), False),
    "wide outputs": (HALF, WEIGHT.repeat(512, 1), False),
}


def test_large_weights_are_supported_for_one_row_or_narrow_outputs():
    wide, narrow = (torch.empty(*shape, dtype=torch.float16, device=DEVICE) for shape in ((8192, 1024), (1024, 8192)))
    assert fits(HALF[:1], wide, None) and not fits(HALF, wide, None)
    assert fits(HALF.repeat(1, 8), narrow, None) and not fits(HALF.repeat(1, 8), narrow.repeat(3, 1), None)


def test_weights_beyond_32_bits_and_strided_biases_are_declined():
    row = torch.empty(1, 8192, dtype=torch.float16, device="meta")
    vast = torch.empty(262_144, 8192, dtype=torch.float16, device="meta")
    assert not fits(row, vast, None) and fits(row, vast[1:], None)
    bias = torch.zeros(32, dtype=torch.float16, device=DEVICE)[::2]
    assert not fits(HALF[:1], WEIGHT, bias) and fits(HALF[:1], WEIGHT, bias.contiguous())


def test_more_outputs_than_the_second_axis_of_a_grid_holds(monkeypatch):
    """CUDA has 65,535 programs in the second and third direction of a grid."""
    seen = []
    monkeypatch.setattr(skinny_gemm, "launch_with_pdl", lambda kernel, grid, *args, **constants: seen.append(grid))
    row = torch.empty(1, 1024, dtype=torch.float16, device="meta")
    weight = torch.empty(151_936, 1024, dtype=torch.float16, device="meta")
    skinny_gemm.skinny_gemm(row, weight, None)
    [(first, *others)] = seen
    assert first == 151_936 // 2 and max(others) <= 65_535


@pytest.mark.parametrize("choice", CHOICES)
def test_linear_uses_the_skinny_gemm_exactly_where_it_fits(choice, monkeypatch):
    x, weight, expected = CHOICES[choice]
    seen = []

    def watched(*arguments):
        seen.append(arguments)
        return skinny_gemm.skinny_gemm(*arguments)

    monkeypatch.setattr(kernels, "skinny_gemm", watched)
    product = GpuKernels().linear(x, weight, None)
    assert product.shape == (len(x), len(weight))
    assert fits(x, weight, None) is expected
    assert len(seen) == int(expected)
