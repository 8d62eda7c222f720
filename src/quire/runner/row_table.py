"""The persistent batch on the device: block tables, lengths and last tokens by row, kept up by differences.

What the device alone can know (which token came, who ended) lives in tensors; what follows from plans is kept on
the host as well, so that building a batch never waits for the device.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import NULL_BLOCK, IntArray, Row
from quire.core.step import AppendTokens, ChunkOutput, Grants, RowStart, StepPlan
from quire.kernels.row_interface import RowColumns, RowState
from quire.kernels.transfers import upload, upload_integers


class RowTable:
    """One line per row. A row that ended is not alive: it writes to the null block and emits nothing.

    On the device there is one line more, of `nobody`, who is never alive: whatever is too wide for a step's rows may
    name it.
    """

    def __init__(self, max_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.nobody = Row(max_rows)
        width = -(-max_length // block_size)
        self.tables = torch.full((max_rows + 1, width), NULL_BLOCK, dtype=torch.int32, device=device)
        self.lengths = torch.ones(max_rows + 1, dtype=torch.int64, device=device)  # known tokens
        self.max_lengths = torch.ones(max_rows + 1, dtype=torch.int64, device=device)  # tokens it may come to hold
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.alive = torch.zeros(max_rows + 1, dtype=torch.bool, device=device)
        self.places = torch.arange(max_rows + 2, device=device)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._tokens_left: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # until the length ends the row
        self.decoding: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self.starts: dict[Row, RowStart] = {}
        self._next_step = 0

    @property
    def state(self) -> RowState:
        return RowState(self.last_tokens, self.lengths, self.alive)

    @property
    def columns(self) -> RowColumns:
        return RowColumns(self.tables, self.lengths, self.max_lengths, self.last_tokens, self.alive)

    def apply(self, plan: StepPlan) -> IntArray:
        """Follow the differences; the rows that cruise through this step."""
        if plan.reset:
            self.starts.clear()
            self.decoding[:] = False
        else:
            assert plan.step == self._next_step, f"plan {plan.step} came, {self._next_step} was due"
        self._next_step = plan.step + 1
        for row in plan.leaves:
            del self.starts[row]
            self.decoding[row] = False
        if plan.starts:
            self._sit(plan.starts)
        for tell in plan.tells:
            self._hear(tell)
        if len(plan.grants):
            self._grant(plan.grants)
        moving = self.decoding.copy()
        moving[list(plan.pauses)] = False
        rows = np.flatnonzero(moving).astype(np.int32)
        assert len(rows) == plan.num_decoding, f"{len(rows)} rows cruise, the plan says {plan.num_decoding}"
        caught_up = [chunk.row for chunk in plan.chunks if ChunkOutput.SAMPLE in chunk.output]
        self._tokens_left[rows] -= 1
        self._tokens_left[caught_up] -= 1
        self.decoding[caught_up] = True
        self.decoding &= self._tokens_left > 0
        return rows

    def advance(self, rows: Tensor, tokens: Tensor, emitted: Tensor, ended: Tensor) -> None:
        """Rows that emitted a token know one more; rows that ended are inert from now on."""
        self.last_tokens[rows] = torch.where(emitted, tokens, self.last_tokens[rows])
        self.lengths[rows] += emitted
        self.end(rows, ended)

    def end(self, rows: Tensor, ended: Tensor) -> None:
        """Those of the rows that ended are inert from now on."""
        self.alive[rows] &= ~ended

    def _sit(self, starts: tuple[RowStart, ...]) -> None:
        for row_start in starts:
            assert row_start.row not in self.starts, f"row {row_start.row} is taken"
            self.starts[row_start.row] = row_start
            self.num_blocks[row_start.row] = 0
            self._tokens_left[row_start.row] = row_start.max_length - len(row_start.tokens)
        known = np.array(
            [(row_start.row, len(row_start.tokens), row_start.max_length) for row_start in starts], dtype=np.int64
        )
        rows, lengths, max_lengths = upload(known, self.device).unbind(1)
        self.lengths[rows] = lengths
        self.max_lengths[rows] = max_lengths
        self.alive.index_fill_(0, rows, True)

    def _hear(self, tell: AppendTokens) -> None:
        assert not self.decoding[tell.row], f"row {tell.row} cruises: it finds its tokens itself"
        row_start = self.starts[tell.row]
        known = np.concatenate([row_start.tokens, np.array(tell.tokens, dtype=np.int32)])
        self.starts[tell.row] = row_start._replace(tokens=known)
        self._tokens_left[tell.row] -= len(tell.tokens)
        self.lengths.index_fill_(0, upload(np.array([tell.row]), self.device), len(known))

    def _grant(self, grants: Grants) -> None:
        """A row may be named several times: its blocks stay in order because the sort does."""
        order = np.argsort(grants.rows, kind="stable")
        rows = grants.rows[order].astype(np.int64)
        columns = self.num_blocks[rows] + np.arange(len(rows)) - np.searchsorted(rows, rows)
        np.add.at(self.num_blocks, rows, 1)
        at, column, block = upload_integers(self.device, rows, columns, grants.blocks[order])
        self.tables[at, column] = block.int()
