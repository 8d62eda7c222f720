"""The exact oracle as a runner: real KV slots in numpy, tokens derived from what is read back through the tables."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray, Row
from quire.core.moves import Run, Tier, runs
from quire.core.oracle import mix
from quire.core.step import Masks, StepPlan
from quire.sim.rows import Done, Rows, SeatedRow, Work

_SLOT_BYTES = 2 * np.dtype(np.int64).itemsize


class _Reading(NamedTuple):
    """What a row's slots held, and the sum of it."""

    image: bytes
    total: int


class OracleRunner:
    """One slot holds (token, position). The next token is (Σ mix over all slots of the row + index) mod V."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._read: dict[Row, _Reading] = {}  # by row, the last time
        self._rows = Rows(vocab_size)
        self._stores = {
            Tier.DEVICE: np.full((num_blocks + 1, block_size, 2), -1, dtype=np.int64),
            Tier.HOST: np.full((num_host_blocks + 1, block_size, 2), -1, dtype=np.int64),
        }

    def read(self, tier: Tier, blocks: IntArray) -> NDArray[np.int64]:  # [blocks, block_size, 2]
        """What some blocks hold: (token, position) in each slot."""
        held: NDArray[np.int64] = self._stores[tier][blocks]
        return held

    def spoil(self, row: Row) -> None:
        """What a row whose logits were not finite has written last is not to be trusted."""
        seated = self._rows.rows.get(row)
        if seated is not None:
            last = len(seated.tokens) - (2 if seated.cruising else 1)  # a tethered row has not heard its next token
            self._stores[Tier.DEVICE][seated.blocks[last // self._block_size], last % self._block_size] = -7

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> Done:
        for run in runs(plan.moves):
            self._carry(run)
        return self._rows.run(plan, self._totals, masks)

    def _carry(self, run: Run) -> None:
        assert (run.src, run.dst) != (Tier.HOST, Tier.HOST), f"a move inside the host's store: {run}"
        self._stores[run.dst][list(run.targets)] = self._stores[run.src][list(run.sources)]

    def _totals(self, work: Work, row: SeatedRow) -> NDArray[np.int64]:
        """Write the positions that are computed; then read everything back. Slots that read as they did in the row's
        last step add up to what they did then: of a row that cruises, one is new."""
        device, size = self._stores[Tier.DEVICE], self._block_size
        for position in range(work.start, work.stop):
            device[row.blocks[position // size], position % size] = row.tokens[position], position
        read = device.take(row.blocks[: -(-work.stop // size)], axis=0).reshape(-1, 2)[: work.stop]
        before, image = self._read.get(work.row), read.tobytes()
        if before is not None and work.stop - work.start == 1 and before.image == image[:-_SLOT_BYTES]:
            token, position = read[-1].tolist()
            sums = np.array([before.total + mix(token, position)])
        else:
            sums = mix(read[:, 0], read[:, 1]).cumsum()[work.start :]
        self._read[work.row] = _Reading(image, int(sums[-1]))
        return sums
