"""Which rows should emit a token in which step, by following the plans: so that a journal need not say it."""

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.core.step import Ended, FinishReason, Output, StepPlan


class Speakers:
    """The rows that cruise, and those of each step in flight. A row in flight is nobody else's: law (a)."""

    __slots__ = ("_cruising", "_in_flight")

    def __init__(self, max_rows: int) -> None:
        self._cruising: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        self._in_flight: deque[NDArray[np.bool_]] = deque()

    def launch(self, plan: StepPlan) -> None:
        cruising = self._cruising
        if plan.reset:
            cruising[:] = False
        cruising[list(plan.leaves)] = False
        sampled = [chunk.row for chunk in plan.chunks if Output.SAMPLE in chunk.output]
        cruising[sampled] = True
        speaking = cruising.copy()
        speaking[list(plan.pauses)] = False
        self._in_flight.append(speaking)

    def absorb(self, ended: Iterable[Ended]) -> NDArray[np.bool_]:
        """By row, who should have spoken in the oldest step in flight, if these ended in it and are silent from now."""
        speaking = self._in_flight.popleft()
        for row, reason in ended:
            speaking[row] &= reason is not FinishReason.ERROR
            for later in (self._cruising, *self._in_flight):
                later[row] = False
        return speaking

    def lose(self) -> None:
        """The steps in flight gave nothing."""
        self._in_flight.clear()
