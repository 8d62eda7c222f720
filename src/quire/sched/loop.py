"""Keeps up to `depth` steps in flight between a scheduler and a runner. Depth 0 is synchronous."""

from collections import deque
from collections.abc import Callable

from quire.core.step import Pending, Runner, StepLost
from quire.sched.scheduler import Absorbed, Scheduler


class Loop:
    """The whole engine step: plan, launch, absorb."""

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int, clock: Callable[[], float]) -> None:
        assert depth >= 0, depth
        self.scheduler = scheduler
        self.depth = depth
        self._runner = runner
        self._clock = clock
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
            self._in_flight.append(self._runner.launch(plan))
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            return self.scheduler.absorb(self._in_flight.popleft().wait(), self._clock())
        return None
