"""Keeps up to `depth` steps in flight between a scheduler and a runner. Depth 0 is synchronous."""

from collections import deque

from quire.core.step import Pending, Runner
from quire.sched.scheduler import Absorbed, Scheduler


class Loop:
    """The whole engine step: plan, launch, absorb."""

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int) -> None:
        assert depth >= 0, depth
        self.scheduler = scheduler
        self.depth = depth
        self._runner = runner
        self._in_flight: deque[Pending] = deque()

    def turn(self) -> Absorbed | None:
        """Launch what can be launched; absorb the oldest step once more than `depth` fly or none could be added."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self._runner.launch(plan))
        else:
            assert self._in_flight or self.scheduler.idle, "something waits, and nothing advances"
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            return self.scheduler.absorb(self._in_flight.popleft().wait())
        return None
