"""Skinny GEMM: few rows times a small weight, the matmuls of decoding a small model. Bound by memory latency.

One program: a few outputs over the whole input. No split-K, so no second launch and no atomics; sums are float32, in a
fixed order. There are enough programs to have the whole weight in flight. A row's result does not depend on its
neighbours, nor on their number as long as the same kernel serves them: one row is multiplied and summed, several go
through the tensor cores, which add in another order. Does not depend on activations or large weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch_with_pdl, pdl_wait

_MAX_ROWS = 8  # tensor cores take 16 as well, but then the other kernels are as fast
_DOT_ROWS = 16  # minimum of a tensor core: missing rows are zeros
# Several rows: where cuBLAS is slower, measured on an H200 with layers of models from 0.1B to 8B. It is as fast with
# wide outputs, which give it enough programs, and with large weights.
_WIDE_BYTES = 8 * 2**20
_NARROW_BYTES = 40 * 2**20
_IN_WIDTHS = range(256, 16_385, 16)  # narrower: nothing to stream; wider: too long a loop; step: 16-byte loads
_SUM_COLUMNS = 256  # per warp and iteration: 16 bytes per thread
_MAX_AHEAD = 4096  # weights of an output held in registers while waiting for the input (PDL)
_ANY = 2**31


class SkinnyTiles(NamedTuple):
    """Tile sizes. The defaults come from `_tiles`; others are for measuring and testing."""

    outs: int  # outputs per program
    warps: int  # each takes its own columns of the input
    columns: int  # per warp and iteration
    stages: int  # software-pipeline stages; without dots as many as registers hold
    dots: bool  # tensor cores, up to 16 rows at once; else each row by itself


# The first line whose (max rows, max in, max out) are not exceeded. Lines for several rows do not depend on how many:
# else the summation order of a row would depend on its neighbours. Measured on an H200 (docs/performance/ledger).
_TILES = (
    (1, 4096, _ANY, SkinnyTiles(outs=2, warps=4, columns=_SUM_COLUMNS, stages=1, dots=False)),
    (1, _ANY, _ANY, SkinnyTiles(outs=2, warps=2, columns=_SUM_COLUMNS, stages=1, dots=False)),
    (_ANY, 1023, _ANY, SkinnyTiles(outs=8, warps=2, columns=64, stages=5, dots=True)),
    (_ANY, _ANY, 1536, SkinnyTiles(outs=8, warps=4, columns=64, stages=4, dots=True)),
    (_ANY, _ANY, _ANY, SkinnyTiles(outs=16, warps=4, columns=64, stages=6, dots=True)),
)


def _tiles(num_rows: int, in_width: int, out_width: int) -> SkinnyTiles:
    bounds = (line for line in _TILES if num_rows <= line[0] and in_width <= line[1] and out_width <= line[2])
    return next(bounds)[3]


@triton.jit
def _sum_kernel(
    x,  # [rows, IN]
    weight,  # [out_width, IN]
    bias,  # [out_width] if HAS_BIAS
    output,  # [rows, out_width]
    out_width,
    IN: tl.constexpr,
    OUTS: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a row and OUTS outputs. The first AHEAD weights are loaded before the input is there; the loop is
    unrolled, so that all of its loads are issued at once."""
    row = tl.program_id(1)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    present = outs < out_width
    weight_rows = weight + tl.minimum(outs, out_width - 1)[:, None] * IN
    ahead = tl.arange(0, AHEAD)[None, :]
    weights_ahead = tl.load(weight_rows + ahead)
    pdl_wait(PDL)
    numbers_ahead = tl.load(x + row * IN + ahead)
    total = tl.sum(weights_ahead.to(tl.float32) * numbers_ahead.to(tl.float32), axis=1)
    columns = tl.arange(0, COLUMNS)[None, :]
    row_columns = x + row * IN + columns
    weight_columns = weight_rows + columns
    partial = tl.zeros([OUTS, COLUMNS], tl.float32)
    for start in tl.static_range(AHEAD, IN, COLUMNS):
        if start + COLUMNS <= IN:
            weights = tl.load(weight_columns + start)
            numbers = tl.load(row_columns + start)
        else:
            inside = columns < IN - start
            weights = tl.load(weight_columns + start, mask=inside, other=0.0)
            numbers = tl.load(row_columns + start, mask=inside, other=0.0)
        partial += weights.to(tl.float32) * numbers.to(tl.float32)
    total += tl.sum(partial, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=present, other=0.0).to(tl.float32)
    tl.store(output + row * out_width + outs, total.to(output.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["num_rows"])  # one compilation serves every number of rows
def _dot_kernel(
    x,  # [num_rows, IN]
    weight,  # [out_width, IN]
    bias,  # [out_width] if HAS_BIAS
    output,  # [num_rows, out_width]
    num_rows,
    out_width,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: all rows and OUTS outputs. A tile is SPLITS matmuls side by side, one per warp."""
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows = tl.arange(0, ROWS)
    columns = (tl.arange(0, SPLITS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])[:, None, :]
    row_present = tl.broadcast_to((rows < num_rows)[None, :, None], [SPLITS, ROWS, COLUMNS])
    row_columns = rows[None, :, None] * IN + columns
    pdl_wait(PDL)
    weight_columns = tl.minimum(outs, out_width - 1)[None, :, None] * IN + columns
    partial = tl.zeros([SPLITS, ROWS, OUTS], tl.float32)
    for start in tl.range(0, IN, SPLITS * COLUMNS):
        if IN % (SPLITS * COLUMNS) == 0:
            weights = tl.load(weight + start + weight_columns)
            numbers = tl.load(x + start + row_columns, mask=row_present, other=0.0)
        else:
            inside = columns < IN - start
            weights = tl.load(weight + start + weight_columns, mask=inside, other=0.0)
            numbers = tl.load(x + start + row_columns, mask=row_present & inside, other=0.0)
        partial = tl.dot(numbers, tl.permute(weights, (0, 2, 1)), partial, input_precision="ieee")
    total = tl.sum(partial, axis=0)
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=outs < out_width, other=0.0).to(tl.float32)[None, :]
    present = (rows < num_rows)[:, None] & (outs < out_width)[None, :]
    places = rows[:, None] * out_width + outs[None, :]
    tl.store(output + places, total.to(output.dtype.element_ty), mask=present)


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether to use `skinny_gemm`: for one row always, for a few rows where cuBLAS is slower."""
    return (
        1 <= x.shape[0] <= _MAX_ROWS
        and weight.shape[1] in _IN_WIDTHS
        and (x.shape[0] == 1 or _cublas_is_slower(weight))
        and weight.dtype in (torch.bfloat16, torch.float16)
        and x.dtype is weight.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and weight.numel() < _ANY
        and (bias is None or bias.is_contiguous())
    )


def _cublas_is_slower(weight: Tensor) -> bool:
    out_width, in_width = weight.shape
    return weight.nbytes < _WIDE_BYTES or (out_width <= in_width and weight.nbytes < _NARROW_BYTES)


def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: SkinnyTiles | None = None) -> Tensor:
    """x: [rows, in]; weight: [out, in]; bias: [out]; all contiguous. Returns [rows, out], as x."""
    (num_rows, in_width), out_width = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    assert weight.shape[1] == in_width and weight.numel() < _ANY, (x.shape, weight.shape)
    tiles = tiles or _tiles(num_rows, in_width, out_width)
    assert not tiles.dots or num_rows <= _DOT_ROWS, (num_rows, tiles)
    output = torch.empty(num_rows, out_width, dtype=x.dtype, device=x.device)
    groups = cdiv(out_width, tiles.outs)
    if tiles.dots:
        launch_with_pdl(
            _dot_kernel, (groups,),
            x, weight, bias, output, num_rows, out_width,
            IN=in_width, ROWS=_DOT_ROWS, OUTS=tiles.outs, SPLITS=tiles.warps, COLUMNS=tiles.columns,
            HAS_BIAS=bias is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    else:
        launch_with_pdl(
            _sum_kernel, (groups, num_rows),
            x, weight, bias, output, out_width,
            IN=in_width, OUTS=tiles.outs, AHEAD=min(_MAX_AHEAD, 1 << in_width.bit_length() - 1),
            COLUMNS=tiles.warps * tiles.columns,
            HAS_BIAS=bias is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return output
