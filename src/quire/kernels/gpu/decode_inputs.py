"""Inputs of the next decode of each row (token, position, slot, block table), computed on the device in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.core.ids import NULL_BLOCK
from quire.kernels.gpu.launch import cdiv, launch, new_index_tensor
from quire.kernels.row_interface import PADDING, NextTokens, RowColumns

_COLUMNS = 1024  # of a block table, per program


def decode_inputs(rows: Tensor, columns: RowColumns, block_size: int) -> NextTokens:
    """See `row_interface.DecodeInputs`."""
    num_rows, width = len(rows), columns.tables.shape[1]
    numbers = new_index_tensor((5, num_rows), torch.int64, rows.device)
    context_lengths = new_index_tensor((num_rows,), torch.int32, rows.device)
    tables = new_index_tensor((num_rows, width), torch.int32, rows.device)
    if num_rows:
        launch(
            _decode_inputs_kernel, (num_rows, cdiv(width, _COLUMNS)),
            rows, *columns, numbers, context_lengths, tables, num_rows, width,
            BLOCK_SIZE=block_size, NULL_BLOCK=int(NULL_BLOCK), PADDING=PADDING, COLUMNS=_COLUMNS,
        )  # fmt: skip
    tokens, positions, slots, taken_max_lengths, sampled_rows = numbers
    return NextTokens(tokens, positions, slots, taken_max_lengths, sampled_rows, context_lengths, tables)


@triton.jit(do_not_specialize=["num_rows"])  # one compilation serves every batch
def _decode_inputs_kernel(
    rows,  # [n] int64
    tables,  # [max_rows, width] int32
    lengths,  # [max_rows] int64
    max_lengths,  # [max_rows] int64
    last_tokens,  # [max_rows] int64
    alive,  # [max_rows] bool
    numbers,  # [5, n] int64: token, position, slot, max length, sampled row
    context_lengths,  # [n] int32
    taken_tables,  # [n, width] int32
    num_rows,
    width,
    BLOCK_SIZE: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: one row and a part of its block table."""
    at, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + at)
    length = tl.load(lengths + row)
    is_alive = tl.load(alive + row) != 0
    table = tables + row * width
    if part == 0:
        position = length - 1
        block = tl.where(is_alive, tl.load(table + position // BLOCK_SIZE).to(tl.int64), NULL_BLOCK)
        tl.store(numbers + at, tl.load(last_tokens + row))
        tl.store(numbers + num_rows + at, position)
        tl.store(numbers + 2 * num_rows + at, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(numbers + 3 * num_rows + at, tl.load(max_lengths + row))
        tl.store(numbers + 4 * num_rows + at, tl.where(is_alive, row, PADDING))
        tl.store(context_lengths + at, tl.where(is_alive, length, 0).to(tl.int32))
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    taken = tl.load(table + column, mask=column < width, other=0)
    tl.store(taken_tables + at.to(tl.int64) * width + column, taken, mask=column < width)
