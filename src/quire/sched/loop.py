"""Keeps up to `depth` steps in flight between a scheduler and a runner. Depth 0 is synchronous."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from quire.core.ids import IntArray
from quire.core.request import Sequence as Continuation
from quire.core.step import Masks, Pending, Runner, StepLost, StepPlan
from quire.sched.scheduler import Absorbed, Scheduler

# What each of some sequences may say next, as the bits of a row of `Masks`.
MaskSource = Callable[[Sequence[Continuation]], IntArray]


class Loop:
    """The whole engine step: plan, launch, absorb."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        depth: int,
        clock: Callable[[], float],
        masks: MaskSource | None = None,
    ) -> None:
        assert depth >= 0, depth
        self.scheduler = scheduler
        self.depth = depth
        self._runner = runner
        self._clock = clock
        self._masks = masks
        self._in_flight: deque[Pending] = deque()

    def turn(self) -> Absorbed | None:
        """Launch what can be launched; absorb the oldest step once more than `depth` fly or none could be added."""
        try:
            return self._turn() or self.scheduler.overdue()
        except StepLost as lost:
            self._in_flight.clear()
            self.scheduler.lose_steps(keep_cache=lost.cache_intact)
            if lost.too_large:
                self.scheduler.fail_largest()
            return self.scheduler.overdue()

    def _turn(self) -> Absorbed | None:
        plan = self.scheduler.plan(self._clock())
        if plan is not None:
            self._in_flight.append(self._launch(plan))
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            return self.scheduler.absorb(self._in_flight.popleft().wait(), self._clock())
        return None

    def _launch(self, plan: StepPlan) -> Pending:
        if not plan.masked:
            return self._runner.launch(plan)
        assert self._masks is not None, "a masked row, and nobody to say what it may choose"
        seated = self.scheduler.books.seating.seated
        bits = self._masks([seated[row] for row in plan.masked])
        return self._runner.launch(plan, Masks(np.array(plan.masked, dtype=np.int32), bits))
