"""GEMM whose rows have the same bits in every batch: for the batch-invariant mode. Bound by memory or tensor cores.

One program: a tile of rows and outputs over the whole input, in float32, in one chain of additions from the first
column to the last. No split-K. The tile sizes follow from the number of rows; they change which program computes a
number and never the order of its additions: a tensor core adds 16 columns at a time, whatever the tile
(`tests/gpu/test_batch_invariance_on_cuda.py` compares the bits of all tiles). Does not depend on models.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch_with_pdl, pdl_wait

_ROW_GROUP = 8  # tiles of rows that use the same weights one after the other, while they are in the L2 cache


class InvariantTiles(NamedTuple):
    """Tile sizes. The defaults come from `_tiles`; others are for measuring and testing."""

    rows: int
    outs: int
    columns: int  # of the input, per iteration
    warps: int
    stages: int  # software-pipeline stages


# Up to 64 rows are one tile, and many narrow programs read the weights; more rows are bound by the tensor cores.
FEW_ROWS = InvariantTiles(rows=64, outs=32, columns=128, warps=4, stages=5)
SOME_ROWS = InvariantTiles(rows=64, outs=64, columns=128, warps=4, stages=4)
MANY_ROWS = InvariantTiles(rows=128, outs=128, columns=64, warps=8, stages=4)
_FLOAT32 = InvariantTiles(rows=32, outs=32, columns=32, warps=4, stages=2)  # no tensor cores: correct, not fast
_MAX_FEW = 64
_MAX_SOME = 192


def _tiles(num_rows: int, dtype: torch.dtype) -> InvariantTiles:
    if dtype is torch.float32:
        return _FLOAT32
    if num_rows <= _MAX_FEW:
        return FEW_ROWS
    return SOME_ROWS if num_rows <= _MAX_SOME else MANY_ROWS


@triton.jit(do_not_specialize=["num_rows"])  # one compilation serves every number of rows
def _invariant_kernel(
    x,  # [num_rows, IN]
    weight,  # [out_width, IN]
    bias,  # [out_width] if HAS_BIAS
    output,  # [num_rows, out_width]
    num_rows,
    out_width,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows beyond the last are zeros and not read: loads of a repeated row would wait for each other. Outputs beyond
    the last repeat it. None of them is stored."""
    row_tiles, out_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(out_width, OUTS)
    group = tl.program_id(0) // (ROW_GROUP * out_tiles)
    in_group = tl.minimum(row_tiles - group * ROW_GROUP, ROW_GROUP)
    place = tl.program_id(0) % (ROW_GROUP * out_tiles)
    rows = (group * ROW_GROUP + place % in_group) * ROWS + tl.arange(0, ROWS)
    outs = (place // in_group) * OUTS + tl.arange(0, OUTS)
    columns = tl.arange(0, COLUMNS)
    row_starts = x + rows.to(tl.int64)[:, None] * IN + columns[None, :]
    row_present = (rows < num_rows)[:, None]
    out_starts = weight + tl.minimum(outs, out_width - 1).to(tl.int64)[None, :] * IN + columns[:, None]
    pdl_wait(PDL)
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for start in tl.range(0, IN, COLUMNS):
        if IN % COLUMNS == 0:
            numbers = tl.load(row_starts + start, mask=row_present, other=0.0)
            weights = tl.load(out_starts + start)
        else:
            inside = columns < IN - start
            numbers = tl.load(row_starts + start, mask=row_present & inside[None, :], other=0.0)
            weights = tl.load(out_starts + start, mask=inside[:, None], other=0.0)
        total = tl.dot(numbers, weights, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=outs < out_width, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * out_width + outs[None, :]
    present = (rows < num_rows)[:, None] & (outs < out_width)[None, :]
    tl.store(output + places, total.to(output.dtype.element_ty), mask=present)


def batch_invariant_gemm(
    x: Tensor,  # [rows, in], contiguous
    weight: Tensor,  # [out, in], contiguous, as x
    bias: Tensor | None,  # [out]
    out: Tensor | None = None,  # [rows, out], contiguous; float32 is not rounded. None: a new one, as x
    tiles: InvariantTiles | None = None,
) -> Tensor:
    (num_rows, in_width), out_width = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == in_width, (x.shape, weight.shape)
    if out is None:
        out = torch.empty(num_rows, out_width, dtype=x.dtype, device=x.device)
    assert out.is_contiguous() and out.shape == (num_rows, out_width), out.shape
    tiles = tiles or _tiles(num_rows, x.dtype)
    if num_rows:
        launch_with_pdl(
            _invariant_kernel, (cdiv(num_rows, tiles.rows) * cdiv(out_width, tiles.outs),),
            x, weight, bias, out, num_rows, out_width,
            IN=in_width, ROWS=tiles.rows, OUTS=tiles.outs, COLUMNS=tiles.columns, ROW_GROUP=_ROW_GROUP,
            HAS_BIAS=bias is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out
