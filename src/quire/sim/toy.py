"""The toy: a model whose next token is the sum of all tokens before it, and its index, modulo the vocabulary.

Answers can be computed by hand, so that an engine test needs no model and no KV cache: moves are ignored. Its
candidates follow from the sum as the oracle's do.
"""

from itertools import accumulate

from quire.core.step import Masks, StepPlan
from quire.sim.rows import Done, Rows, SeatedRow, Work


class ToyRunner:
    """Follows plans and adds up tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._rows = Rows(vocab_size)

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> Done:
        return self._rows.run(plan, self._totals, masks)

    def _totals(self, work: Work, row: SeatedRow) -> list[int]:
        return list(accumulate(row.tokens[: work.stop]))[work.start :]
