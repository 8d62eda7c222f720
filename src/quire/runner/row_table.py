"""The persistent batch on the device: block tables, lengths and last tokens by row, updated by plan differences.

What is known on the device only (sampled tokens, finished rows) is in tensors; what follows from plans is kept on the
host as well, so that building a batch never synchronises.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.fault_injection import FaultSite, trip_any
from quire.core.ids import NULL_BLOCK, IntArray, Row
from quire.core.step import AppendTokens, ChunkOutput, Grants, RowStart, StepPlan
from quire.kernels.row_interface import RowColumns, RowState
from quire.kernels.transfers import upload, upload_integers

NO_ROWS: IntArray = np.empty(0, dtype=np.int32)


class RowTable:
    """One line per row. A finished row is not alive: it writes to the null block and emits nothing.

    On the device there is one line more, the padding row, which is never alive: CUDA graphs that are wider than a step
    point their unused places at it.
    """

    def __init__(self, max_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.padding_row = Row(max_rows)
        width = -(-max_length // block_size)
        self.tables = torch.full((max_rows + 1, width), NULL_BLOCK, dtype=torch.int32, device=device)
        self.lengths = torch.ones(max_rows + 1, dtype=torch.int64, device=device)  # known tokens
        self.max_lengths = torch.ones(max_rows + 1, dtype=torch.int64, device=device)  # tokens it may ever hold
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.alive = torch.zeros(max_rows + 1, dtype=torch.bool, device=device)
        self.history: Tensor | None = None  # [max_rows + 1, width] int32: tokens by position, where drafts need them
        self.places = torch.arange(max_rows + 2, device=device)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._tokens_left: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # until the length ends the row
        self.decoding: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self.starts: dict[Row, RowStart] = {}
        self.columns = RowColumns(self.tables, self.lengths, self.max_lengths, self.last_tokens, self.alive)
        self._host_tables: IntArray | None = self.tables.numpy() if device.type == "cpu" else None
        self._next_step = 0
        self._latest = NO_ROWS  # those that decoded in the step before
        self._repeats_left = 0  # steps that the same rows can decode again
        self._num_repeated = 0  # steps since `apply`, not counted in `_tokens_left` yet

    @property
    def state(self) -> RowState:
        return RowState(self.last_tokens, self.lengths, self.alive, self.history)

    def trip(self, site: FaultSite) -> None:
        """Faults that are armed for a sequence here occur."""
        trip_any(site, (start.sequence for start in self.starts.values()))

    @property
    def latest(self) -> IntArray:
        """The rows that decode in the step that was applied last."""
        return self._latest

    def repeat(self, plan: StepPlan) -> IntArray | None:
        """`apply` where the rows of the step before decode again, the same array; None: the plan has to be applied."""
        if not self._repeats_left or not plan.only_decodes:
            return None
        assert plan.step == self._next_step, f"plan {plan.step} came, {self._next_step} was due"
        assert len(self._latest) == plan.num_decoding, f"{len(self._latest)} rows, the plan has {plan.num_decoding}"
        self._next_step += 1
        self._repeats_left -= 1
        self._num_repeated += 1
        if len(plan.grants):
            self._grant(plan.grants)
        return self._latest

    def apply(self, plan: StepPlan) -> IntArray:
        """Apply a plan's differences. Returns the rows that decode in this step."""
        if self._num_repeated:
            self._tokens_left[self._latest] -= self._num_repeated
            self.decoding &= self._tokens_left > 0
            self._num_repeated = 0
        if plan.reset:
            self.starts.clear()
            self.decoding[:] = False
        else:
            assert plan.step == self._next_step, f"plan {plan.step} came, {self._next_step} was due"
        self._next_step = plan.step + 1
        for row in plan.releases:
            del self.starts[row]
            self.decoding[row] = False
        if plan.starts:
            self._start_rows(plan.starts)
        for append in plan.appends:
            self._append_tokens(append)
        if len(plan.grants):
            self._grant(plan.grants)
        running = self.decoding.copy()
        running[list(plan.pauses)] = False
        rows = np.flatnonzero(running).astype(np.int32)
        assert len(rows) == plan.num_decoding, f"{len(rows)} rows decode, the plan has {plan.num_decoding}"
        caught_up = [chunk.row for chunk in plan.chunks if ChunkOutput.SAMPLE in chunk.output]
        self._tokens_left[rows] -= 1
        self._tokens_left[caught_up] -= 1
        self.decoding[caught_up] = True
        self.decoding &= self._tokens_left > 0
        self._latest = rows
        same = len(rows) and not caught_up and not plan.pauses
        self._repeats_left = int(self._tokens_left[rows].min()) if same else 0
        return rows

    def advance(self, rows: Tensor, tokens: Tensor, emitted: Tensor, ended: Tensor) -> None:
        """Append a token to the rows that emitted one; finished rows become inert."""
        self.last_tokens[rows] = torch.where(emitted, tokens, self.last_tokens[rows])
        self.lengths[rows] += emitted
        self.end(rows, ended)

    def end(self, rows: Tensor, ended: Tensor) -> None:
        """Mark finished rows as not alive."""
        self.alive[rows] &= ~ended

    def _start_rows(self, starts: tuple[RowStart, ...]) -> None:
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

    def _append_tokens(self, append: AppendTokens) -> None:
        assert not self.decoding[append.row], f"row {append.row} is decoding: it appends its own tokens"
        row_start = self.starts[append.row]
        known = np.concatenate([row_start.tokens, np.array(append.tokens, dtype=np.int32)])
        self.starts[append.row] = row_start._replace(tokens=known)
        self._tokens_left[append.row] -= len(append.tokens)
        self.lengths.index_fill_(0, upload(np.array([append.row]), self.device), len(known))

    def _grant(self, grants: Grants) -> None:
        """Append blocks to block tables. A row may occur several times: the stable sort keeps its blocks in order."""
        order = np.argsort(grants.rows, kind="stable")
        rows = grants.rows[order].astype(np.int64)
        columns = self.num_blocks[rows] + np.arange(len(rows)) - np.searchsorted(rows, rows)
        np.add.at(self.num_blocks, rows, 1)
        if self._host_tables is not None:
            self._host_tables[rows, columns] = grants.blocks[order]
            return
        at, column, block = upload_integers(self.device, rows, columns, grants.blocks[order])
        self.tables[at, column] = block.int()
