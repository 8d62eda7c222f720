"""What rows that go on by themselves do next, by tensor operations: the truth that the kernel is tested against. Where
each token is written is found by it for steps that are built, too."""

import torch
from torch import Tensor

from quire.core.ids import NULL_BLOCK
from quire.kernels.choosing import PADDING, NextTokens, RowColumns


def cruise_plainly(rows: Tensor, columns: RowColumns, block_size: int) -> NextTokens:
    """See `CruiseRows`."""
    lengths, alive = columns.lengths[rows], columns.alive[rows]
    positions = lengths - 1
    return NextTokens(
        tokens=columns.last_tokens[rows],
        positions=positions,
        slots=slots_of(rows, positions, columns, block_size),
        reaches=columns.reaches[rows],
        speaking=torch.where(alive, rows, PADDING),
        context_lengths=(lengths * alive).int(),
        tables=columns.tables[rows],
    )


def slots_of(rows: Tensor, positions: Tensor, columns: RowColumns, block_size: int) -> Tensor:
    """Where each token's key and value are written. rows, positions: [tokens] int64."""
    blocks = columns.tables[rows, positions // block_size].long()
    blocks = torch.where(columns.alive[rows], blocks, NULL_BLOCK)
    return blocks * block_size + positions % block_size
