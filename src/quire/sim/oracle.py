"""The exact oracle as a runner: real KV slots in numpy, tokens derived from what is read back through the tables."""

import numpy as np

from quire.core.oracle import mix
from quire.core.step import StepPlan
from quire.sim.rows import Done, Rows, SeatedRow, Work


class OracleRunner:
    """One slot holds (token, position). The next token is Σ mix over all slots of the row, modulo the vocabulary."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rows = Rows()
        self._slots = np.full(((num_blocks + 1) * block_size, 2), -1, dtype=np.int64)

    def launch(self, plan: StepPlan) -> Done:
        return self._rows.run(plan, self._next_token)

    def _next_token(self, work: Work, row: SeatedRow) -> int:
        """Write the positions that are computed; then read everything back."""
        positions = np.arange(work.stop)
        blocks = np.array(row.blocks, dtype=np.int64)[positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        self._slots[slots[work.start :], 0] = row.tokens[work.start : work.stop]
        self._slots[slots[work.start :], 1] = positions[work.start :]
        read = self._slots[slots]
        return int(mix(read[:, 0], read[:, 1]).sum()) % self._vocab_size
