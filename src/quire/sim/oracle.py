"""The exact oracle as a runner: real KV slots in numpy, tokens derived from what is read back through the tables."""

import numpy as np
from numpy.typing import NDArray

from quire.core.oracle import mix
from quire.core.step import StepPlan, StepResult
from quire.sim.rows import Rows, Work
from quire.sim.toy import Done


class OracleRunner:
    """One slot holds (token, position). The next token is Σ mix over all slots of the row, modulo the vocabulary."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rows = Rows()
        self._slots = np.full(((num_blocks + 1) * block_size, 2), -1, dtype=np.int64)

    def launch(self, plan: StepPlan) -> Done:
        emitted = []
        ended = []
        for work in self._rows.apply(plan):
            slots = self._slots_of(work)
            row = self._rows.rows[work.row]
            self._slots[slots[work.start :], 0] = row.tokens[work.start : work.stop]
            self._slots[slots[work.start :], 1] = np.arange(work.start, work.stop)
            if work.samples:
                read = self._slots[slots]
                token = int(mix(read[:, 0], read[:, 1]).sum()) % self._vocab_size
                emitted.append((work.row, token))
                end = self._rows.emit(work.row, token)
                if end is not None:
                    ended.append(end)
        pairs = np.array(emitted, dtype=np.int32).reshape(-1, 2)
        return Done(StepResult(plan.step, pairs[:, 0], pairs[:, 1], tuple(ended)))

    def _slots_of(self, work: Work) -> NDArray[np.int64]:
        positions = np.arange(work.stop)
        blocks = np.array(self._rows.rows[work.row].blocks, dtype=np.int64)
        return blocks[positions // self._block_size] * self._block_size + positions % self._block_size
