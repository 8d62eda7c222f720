"""The toy: a model whose next token is the sum of all tokens before it, modulo the vocabulary.

Answers can be computed by hand, so that an engine test needs no model and no KV cache.
"""

import numpy as np

from quire.core.step import StepPlan, StepResult
from quire.sim.rows import Rows


class Done:
    """A step that was computed when it was launched."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class ToyRunner:
    """Follows plans and adds up tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = Rows()

    def launch(self, plan: StepPlan) -> Done:
        emitted = []
        ended = []
        for work in self._rows.apply(plan):
            if work.samples:
                token = sum(self._rows.rows[work.row].tokens) % self._vocab_size
                emitted.append((work.row, token))
                end = self._rows.emit(work.row, token)
                if end is not None:
                    ended.append(end)
        pairs = np.array(emitted, dtype=np.int32).reshape(-1, 2)
        return Done(StepResult(plan.step, pairs[:, 0], pairs[:, 1], tuple(ended)))
