"""The toy: a model whose next token is the sum of all tokens before it, modulo the vocabulary.

Answers can be computed by hand, so that an engine test needs no model and no KV cache.
"""

from quire.core.step import StepPlan
from quire.sim.rows import Done, Rows, SeatedRow, Work


class ToyRunner:
    """Follows plans and adds up tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = Rows()

    def launch(self, plan: StepPlan) -> Done:
        return self._rows.run(plan, self._next_token)

    def _next_token(self, work: Work, row: SeatedRow) -> int:
        return sum(row.tokens) % self._vocab_size
