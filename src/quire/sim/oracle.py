"""The exact oracle as a runner: real KV slots, and tokens derived from what is read back through the tables.

Plain lists, not arrays: the worlds of `quire check` are small, and a row that cruises writes one slot in a step.
"""

from collections.abc import Iterable
from itertools import accumulate, chain, islice, starmap
from typing import NamedTuple

from quire.core.ids import Row
from quire.core.moves import Run, Tier, runs
from quire.core.oracle import mix
from quire.core.step import Masks, StepPlan
from quire.sim.rows import Done, Rows, SeatedRow, Work

Slot = tuple[int, int]  # token, position

_EMPTY: Slot = (-1, -1)
_SPOILED: Slot = (-7, -7)


class _Reading(NamedTuple):
    """What a row's slots held, and Σ mix over them."""

    slots: list[Slot]
    total: int


_UNREAD = _Reading([], 0)


class OracleRunner:
    """One slot holds (token, position). The next token is (Σ mix over all slots of the row + index) mod V."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._rows = Rows(vocab_size)
        self._stores = {
            Tier.DEVICE: [[_EMPTY] * block_size for _ in range(num_blocks + 1)],
            Tier.HOST: [[_EMPTY] * block_size for _ in range(num_host_blocks + 1)],
        }
        self._device = self._stores[Tier.DEVICE]
        self._readings: dict[Row, _Reading] = {}  # the last of each row

    def read(self, tier: Tier, blocks: Iterable[int]) -> list[Slot]:
        """What the slots of some blocks hold, one after the other."""
        store = self._stores[tier]
        return list(chain.from_iterable([store[block] for block in blocks]))

    def spoil(self, row: Row) -> None:
        """What a row whose logits were not finite has written last is not to be trusted."""
        seated = self._rows.rows.get(row)
        if seated is not None:
            last = len(seated.tokens) - (2 if seated.cruising else 1)  # a tethered row has not heard its next token
            self._device[seated.blocks[last // self._block_size]][last % self._block_size] = _SPOILED

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> Done:
        for run in runs(plan.moves):
            self._carry(run)
        return self._rows.run(plan, self._totals, masks)

    def _carry(self, run: Run) -> None:
        assert (run.src, run.dst) != (Tier.HOST, Tier.HOST), f"a move inside the host's store: {run}"
        source, target = self._stores[run.src], self._stores[run.dst]
        for src, dst in zip(run.sources, run.targets, strict=True):
            target[dst] = list(source[src])

    def _totals(self, work: Work, row: SeatedRow) -> list[int]:
        """Write the positions that are computed; then read everything back. Slots before them that read as they did the
        last time need not be summed again."""
        device, size = self._device, self._block_size
        for position in range(work.start, work.stop):
            device[row.blocks[position // size]][position % size] = row.tokens[position], position
        read = list(islice(chain.from_iterable([device[block] for block in row.blocks]), work.stop))
        before = self._readings.get(work.row, _UNREAD)
        if before.slots != read[: work.start]:
            before = _UNREAD
        num_known = len(before.slots)
        sums = list(accumulate(starmap(mix, read[num_known:]), initial=before.total))
        self._readings[work.row] = _Reading(read, sums[-1])
        return sums[1 + work.start - num_known :]
