"""QK norm, RoPE and KV write between the QKV projection and attention, in one launch per layer.

Queries and keys are normed (if there is a norm) and rotated, queries in place; keys and values go to the store. One
program: one token and some heads of any kind. A head is read in three parts: the two halves of its rotary width, which
rotate into each other, and the rest.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch_with_pdl, next_power_of_2, pdl_wait
from quire.kernels.interface import HeadNorm, Rotation

_MANY_TOKENS = 128  # from here on, more heads per program still make enough programs
_HEADS_OF_FEW, _HEADS_OF_MANY = 4, 16  # minimum per program; not measured
_NUMBERS_PER_WARP = 256  # 16 bytes of 16-bit numbers for each thread
_MAX_WARPS = 8


class _RopeTiles(NamedTuple):
    """Tile of one program."""

    heads: int
    padded_half: int  # of the rotary width
    padded_rest: int
    num_warps: int


def _tiles(num_tokens: int, dim: int, rotary_dim: int) -> _RopeTiles:
    half = next_power_of_2(rotary_dim // 2)
    heads = max(_HEADS_OF_MANY if num_tokens >= _MANY_TOKENS else _HEADS_OF_FEW, _NUMBERS_PER_WARP // half)
    rest = next_power_of_2(dim - rotary_dim) if dim > rotary_dim else 0
    return _RopeTiles(heads, half, rest, min(_MAX_WARPS, heads * half // _NUMBERS_PER_WARP))


@triton.jit
def _read(
    rows,  # [heads] pointers
    there,  # [heads]: whether the head is read
    beyond,  # value of masked elements
    START: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Numbers START to START + COUNT of each head, [heads, PADDED] float32."""
    column = tl.arange(0, PADDED)[None, :]
    inside = there[:, None] & (column < COUNT)
    return tl.load(rows[:, None] + START + column, mask=inside, other=beyond).to(tl.float32)


@triton.jit
def _write(
    values,  # [heads, PADDED] float32
    rows,  # [heads] pointers
    stored_rows,  # [heads] pointers
    to_qkv,  # [heads]: whether the head is written to qkv
    to_store,  # [heads]: whether it is written to the store
    START: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The counterpart of `_read`: to qkv or to the store."""
    column = tl.arange(0, PADDED)[None, :]
    to_qkv = to_qkv[:, None] & (column < COUNT)
    to_store = to_store[:, None] & (column < COUNT)
    tl.store(rows[:, None] + START + column, values.to(rows.dtype.element_ty), mask=to_qkv)
    tl.store(stored_rows[:, None] + START + column, values.to(stored_rows.dtype.element_ty), mask=to_store)


@triton.jit
def _rotated(
    left,  # [heads, PADDED] float32
    right,  # [heads, PADDED] float32
    cos,  # [heads] pointers, all to the token's row: in the layout of the heads, so no shared memory is used
    sin,  # [heads] pointers, all to the token's row
    is_rotated,  # [heads]: queries and keys, not values
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
):
    """RoPE: both halves."""
    rotated_left = left * _read(cos, is_rotated, 0.0, 0, HALF, PADDED)
    rotated_left += right * _read(sin, is_rotated, 0.0, 0, HALF, PADDED)
    rotated_right = right * _read(cos, is_rotated, 0.0, HALF, HALF, PADDED)
    rotated_right += left * _read(sin, is_rotated, 0.0, HALF, HALF, PADDED)
    return tl.where(is_rotated[:, None], rotated_left, left), tl.where(is_rotated[:, None], rotated_right, right)


@triton.jit
def _rope_and_write_kv(
    qkv,  # [tokens, QUERIES + 2 * KEYS, DIM], strided
    kv_layer,  # [blocks, 2, BLOCK_SIZE, KEYS, DIM], strided
    slots,  # [tokens] int64
    cos,  # [tokens, ROTARY_DIM]
    sin,  # [tokens, ROTARY_DIM]
    weight,  # [QUERIES + KEYS, DIM] float32, read if HAS_NORM
    epsilon, token_stride, head_stride, block_stride, side_stride, offset_stride, kv_head_stride,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = DIM - ROTARY_DIM
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists, is_rotated = head < QUERIES + 2 * KEYS, head < QUERIES + KEYS
    rows = qkv + token * token_stride + head * head_stride
    left = _read(rows, exists, 0.0, 0, HALF, PADDED_HALF)
    right = _read(rows, exists, 0.0, HALF, HALF, PADDED_HALF)
    if REST > 0:
        rest = _read(rows, exists, 0.0, ROTARY_DIM, REST, PADDED_REST)

    if HAS_NORM:  # value heads are multiplied by 1
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse = tl.where(is_rotated, tl.rsqrt(squares / DIM + epsilon), 1.0)[:, None]
        weights = weight + head * DIM
        left *= inverse * _read(weights, is_rotated, 1.0, 0, HALF, PADDED_HALF)
        right *= inverse * _read(weights, is_rotated, 1.0, HALF, HALF, PADDED_HALF)
        if REST > 0:
            rest *= inverse * _read(weights, is_rotated, 1.0, ROTARY_DIM, REST, PADDED_REST)

    angle_row = token * ROTARY_DIM + tl.zeros([HEADS], tl.int32)
    left, right = _rotated(left, right, cos + angle_row, sin + angle_row, is_rotated, HALF, PADDED_HALF)

    slot = tl.load(slots + token)  # int64, and so are the offsets below: a store has more than 2^31 numbers
    side = (head >= QUERIES + KEYS).to(tl.int32)  # 0: a key, 1: a value
    block_offset = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
    stored_rows = kv_layer + block_offset + side * side_stride + (head - QUERIES - side * KEYS) * kv_head_stride
    to_qkv, to_store = head < QUERIES, exists & (head >= QUERIES)
    _write(left, rows, stored_rows, to_qkv, to_store, 0, HALF, PADDED_HALF)
    _write(right, rows, stored_rows, to_qkv, to_store, HALF, HALF, PADDED_HALF)
    if REST > 0:
        _write(rest, rows, stored_rows, to_qkv, to_store, ROTARY_DIM, REST, PADDED_REST)


def rope_and_write_kv(
    qkv: Tensor,
    head_norm: HeadNorm | None,
    rotation: Rotation,
    slots: Tensor,
    kv_layer: Tensor,
    *,
    batch_invariant: bool = False,
) -> None:
    """See `StepAttention.rope_and_write_kv`.

    qkv: [tokens, heads + 2 * kv_heads, dim]; slots: [tokens] int64; kv_layer: [blocks, 2, block_size, kv_heads, dim],
    strided, of any floating dtype. Batch-invariant: norms are summed in the same order for any number of tokens.
    """
    assert qkv.stride(2) == kv_layer.stride(4) == 1, (qkv.stride(), kv_layer.stride())
    assert rotation.cos.is_contiguous() and rotation.sin.is_contiguous() and slots.is_contiguous()
    assert head_norm is None or head_norm.weight.is_contiguous()
    num_tokens, num_heads, dim = qkv.shape
    block_size, kv_heads = kv_layer.shape[2:4]
    rotary_dim = rotation.cos.shape[-1]
    tiles = _tiles(_MANY_TOKENS if batch_invariant else num_tokens, dim, rotary_dim)
    launch_with_pdl(
        _rope_and_write_kv,
        (num_tokens, cdiv(num_heads, tiles.heads)),
        qkv,
        kv_layer,
        slots,
        rotation.cos,
        rotation.sin,
        head_norm.weight if head_norm is not None else qkv,
        head_norm.epsilon if head_norm is not None else 0.0,
        *qkv.stride()[:2],
        *kv_layer.stride()[:4],
        QUERIES=num_heads - 2 * kv_heads,
        KEYS=kv_heads,
        DIM=dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=block_size,
        HAS_NORM=head_norm is not None,
        HEADS=tiles.heads,
        PADDED_HALF=tiles.padded_half,
        PADDED_REST=tiles.padded_rest,
        num_warps=tiles.num_warps,
    )
