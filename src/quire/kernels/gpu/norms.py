"""RMSNorm, alone or fused with the residual addition before it, in one pass. Does not depend on a model."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch_with_pdl, next_power_of_2, pdl_launch_dependents, pdl_wait
from quire.kernels.interface import PartialSums

_WIDEST = 16_384  # numbers per row: a program holds whole rows in registers
_NUMBERS = 1_024  # minimum per program: narrow rows share one
_NUMBERS_PER_WARP = 256  # 16 bytes of 16-bit numbers for each thread
_MAX_WARPS = 16


class _NormTiles(NamedTuple):
    """Tile of one program."""

    rows: int
    padded_width: int
    num_warps: int


@cache
def _tiles(width: int) -> _NormTiles:
    assert width <= _WIDEST, f"rows of {width} numbers; the widest that a program holds have {_WIDEST}"
    padded = next_power_of_2(width)
    rows = max(1, _NUMBERS // padded)
    return _NormTiles(rows, padded, min(_MAX_WARPS, max(1, rows * padded // _NUMBERS_PER_WARP)))


@triton.jit
def _normed(
    wide,  # [ROWS, PADDED_WIDTH] float32, 0 beyond WIDTH
    scale,  # [1, PADDED_WIDTH] float32
    epsilon,
    WIDTH: tl.constexpr,
):
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + epsilon)
    return wide * inverse[:, None] * scale


@triton.jit(do_not_specialize=["num_rows"])  # one compilation serves every batch
def _norm_rows(
    x,  # [outer, inner, WIDTH], strided
    weight,  # [WIDTH] float32
    output,  # [outer * inner, WIDTH]
    num_rows,
    num_inner,
    outer_stride,
    inner_stride,
    epsilon,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (column < WIDTH)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)  # before the wait: weights are constant
    pdl_wait(PDL)
    source = x + (row // num_inner * outer_stride + row % num_inner * inner_stride)[:, None]
    wide = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(wide, scale, epsilon, WIDTH)
    tl.store(output + row[:, None] * WIDTH + column, normed.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_rows(
    x,  # [rows, WIDTH], strided; or [PARTS, rows, WIDTH] float32
    residual,  # [rows, WIDTH], strided: x is added to it
    weight,  # [WIDTH] float32
    output,  # [rows, WIDTH]
    num_rows,
    x_stride,
    residual_stride,
    epsilon,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: none
    PDL: tl.constexpr,
):
    """Split-K partial sums are added in order and rounded once, like the reduced matmul."""
    pdl_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (column < WIDTH)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)  # before the wait: weights are constant
    pdl_wait(PDL)
    residual_place = residual + row[:, None] * residual_stride + column
    x_place = x + row[:, None] * x_stride + column
    added = tl.load(x_place, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        for split in tl.static_range(1, SPLITS):
            added += tl.load(x_place + split * num_rows * x_stride, mask=inside, other=0.0)
        added = added.to(output.dtype.element_ty).to(tl.float32)
    before = tl.load(residual_place, mask=inside, other=0.0).to(tl.float32)
    total = (before + added).to(residual.dtype.element_ty)
    tl.store(residual_place, total, mask=inside)
    normed = _normed(total.to(tl.float32), scale, epsilon, WIDTH)
    tl.store(output + row[:, None] * WIDTH + column, normed.to(output.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x: [rows, width] or [tokens, heads, width], strided; weight: [width] float32. As x, contiguous."""
    assert x.dim() in (2, 3) and x.stride(-1) == 1 and weight.is_contiguous(), (x.shape, x.stride(), weight.stride())
    width, num_inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows, tiles = x.shape[0] * num_inner, _tiles(width)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_with_pdl(
        _norm_rows,
        (cdiv(num_rows, tiles.rows),),
        x,
        weight,
        output,
        num_rows,
        num_inner,
        x.stride(0),
        x.stride(-2),
        epsilon,
        WIDTH=width,
        PADDED_WIDTH=tiles.padded_width,
        ROWS=tiles.rows,
        num_warps=tiles.num_warps,
    )
    return output


def add_rms_norm(x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """residual += x in place, then its norm, as x.

    x: [tokens, width], or its partial sums; residual: [tokens, width], float32 or x's dtype; weight: [width] float32.
    """
    added, num_splits = (x.sums, len(x.sums)) if isinstance(x, PartialSums) else (x, 0)
    assert added.stride(-1) == residual.stride(1) == 1 and weight.is_contiguous(), (added.stride(), residual.stride())
    assert num_splits == 0 or added.is_contiguous(), added.stride()
    num_rows, width = residual.shape
    tiles = _tiles(width)
    output = torch.empty(num_rows, width, dtype=x.dtype, device=residual.device)
    launch_with_pdl(
        _add_norm_rows,
        (cdiv(num_rows, tiles.rows),),
        added,
        residual,
        weight,
        output,
        num_rows,
        added.stride(-2),
        residual.stride(0),
        epsilon,
        WIDTH=width,
        PADDED_WIDTH=tiles.padded_width,
        ROWS=tiles.rows,
        SPLITS=num_splits,
        num_warps=tiles.num_warps,
    )
    return output
