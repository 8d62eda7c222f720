"""The engine loop: plan, launch, wait, absorb, with up to `depth` steps in flight. Depth 0 is synchronous.

A step that raises is bisected to find the request that causes it. The suspects compute in halves, apart from all other
requests, until one fails alone. A request that emits a token, or ends, in a step that succeeds is cleared.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, SequenceId
from quire.core.request import RequestGroup
from quire.core.request import Sequence as Continuation
from quire.core.step import Masks, Pending, Runner, StepLost, StepPlan, StepResult
from quire.core.step_output import StepOutput
from quire.sched.scheduler import Scheduler


class FaultBisection:
    """From the first failure until every suspect is cleared or blamed. Names the groups that may be admitted."""

    __slots__ = ("_halves", "_lengths", "_not_emitted")

    def __init__(self, suspects: Iterable[RequestGroup]) -> None:
        self._halves = [list(suspects)]
        self._not_emitted: set[SequenceId] = set()
        self._lengths: dict[int, int] = {}  # of beam groups when their half began: they emit nothing, but they grow
        assert self._halves[0], "a step failed that computed no request"
        self.fail()

    @property
    def suspects(self) -> frozenset[int]:
        """The groups that may be admitted now, by their order."""
        return frozenset(group.order for group in self._halves[-1])

    @property
    def open(self) -> bool:
        return bool(self._halves)

    def fail(self) -> RequestGroup | None:
        """The step of the current suspects failed; the group to blame, if it was alone."""
        suspects = self._halves.pop()
        blamed = None
        if len(suspects) == 1:
            (blamed,) = suspects
        else:
            middle = len(suspects) // 2
            self._halves += [suspects[middle:], suspects[:middle]]
        self._begin()
        return blamed

    def note_step(self, emitters: Iterable[int]) -> bool:
        """A step succeeded in which these sequences emitted; whether all current suspects are cleared."""
        self._not_emitted -= {SequenceId(name) for name in emitters}
        if not all(self._is_cleared(group) for group in self._halves[-1]):
            return False
        self._halves.pop()
        self._begin()
        return True

    def _begin(self) -> None:
        while self._halves and all(group.finished for group in self._halves[-1]):  # aborted in the meantime
            self._halves.pop()
        suspects = self._halves[-1] if self._halves else []
        self._not_emitted = {sequence.id for group in suspects for sequence in group.unfinished}
        self._lengths = {group.order: _length(group) for group in suspects}

    def _is_cleared(self, group: RequestGroup) -> bool:
        if group.request.beam is not None:
            return group.finished or _length(group) > self._lengths[group.order]
        return not any(sequence.id in self._not_emitted for sequence in group.unfinished)


def _length(group: RequestGroup) -> int:
    return max(sequence.num_tokens for sequence in group.sequences)


# The tokens that each sequence may sample next, as rows of bits for `Masks`.
MaskSource = Callable[[Sequence[Continuation]], IntArray]
# Marks a part of the loop for a profiler.
Span = Callable[[str], AbstractContextManager[object]]

_NOTHING: AbstractContextManager[object] = nullcontext()

_MAX_BLAMED = 3  # requests that failed alone without a successful step between them: then the engine is at fault
_MAX_UNEXPLAINED = 5  # failed steps in a row that no request could be blamed for: then the engine is at fault

_log = logging.getLogger(__name__)


class _StepFailed(Exception):
    """The runner raised in a step."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Progress(NamedTuple):
    """What the loop does now. Replaced as a whole, so another thread may read it."""

    since_s: float
    expected_s: float = 0.0  # predicted time of the steps in flight; 0 between two steps


class Loop:
    """The whole engine step: plan, launch, absorb."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        depth: int,
        clock: Callable[[], float],
        masks: MaskSource | None = None,
        span: Span | None = None,
    ) -> None:
        assert depth >= 0, depth
        self.scheduler = scheduler
        self.depth = depth
        self._runner = runner
        self._clock = clock
        self.progress = Progress(clock())
        self._masks = masks
        self._span: Span = span or (lambda name: _NOTHING)
        self._in_flight: deque[Pending] = deque()
        self._bisection: FaultBisection | None = None
        self._num_unexplained = 0  # bisections since the last that blamed a request
        self._num_blamed = 0  # requests failed since a step last succeeded

    def step(self) -> StepOutput | None:
        """Launch the next step; absorb the oldest once more than `depth` are in flight or none could be planned."""
        try:
            absorbed = self._step()
        except StepLost as lost:
            self._in_flight.clear()
            self.scheduler.lose_steps(keep_cache=lost.cache_intact)
            if lost.too_large:
                self.scheduler.fail_largest()
            return self.scheduler.overdue()
        except _StepFailed as failed:
            self._bisect(failed.cause)
            return self.scheduler.overdue()
        if absorbed is not None:
            self._num_blamed = 0
        if self._bisection is not None:  # also without a step: the suspects may have been aborted
            self._clear(self._bisection, absorbed)
        return absorbed or self.scheduler.overdue()

    def _step(self) -> StepOutput | None:
        with self._span("plan"):
            now_s = self._clock()
            plan = self.scheduler.plan(now_s)
            self.progress = Progress(now_s, self.scheduler.expected_s)
        if plan is not None:
            with self._span("launch"):
                self._in_flight.append(self._launch(plan))
        depth = self.depth if self._bisection is None else 0
        if self._in_flight and (plan is None or len(self._in_flight) > depth):
            with self._span("wait"):
                result = self._wait(self._in_flight.popleft())
            with self._span("absorb"):
                now_s = self._clock()
                self.progress = Progress(now_s)
                return self.scheduler.absorb(result, now_s)
        return None

    def _launch(self, plan: StepPlan) -> Pending:
        try:
            if not plan.masked:
                return self._runner.launch(plan)
            assert self._masks is not None, "a row under a grammar, and no source of masks"
            bits = self._masks(self.scheduler.row_sequences(plan.masked))
            return self._runner.launch(plan, Masks(np.array(plan.masked, dtype=np.int32), bits))
        except StepLost:
            raise
        except Exception as error:
            raise _StepFailed(error) from error

    def _wait(self, pending: Pending) -> StepResult:
        try:
            return pending.wait()
        except StepLost:
            raise
        except Exception as error:
            raise _StepFailed(error) from error

    # Fault bisection.

    def _bisect(self, error: Exception) -> None:
        """The suspects compute again, in halves. The one that fails alone is ended; all others continue."""
        scheduler = self.scheduler
        _log.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
        suspects = scheduler.running_groups()
        self._in_flight.clear()
        scheduler.lose_steps(keep_cache=True)
        if self._bisection is None:
            self._num_unexplained += 1
            if not suspects or self._num_unexplained > _MAX_UNEXPLAINED:
                raise error
            self._bisection, blamed = FaultBisection(suspects), None
            if len(suspects) == 1:
                (blamed,) = suspects
        else:
            blamed = self._bisection.fail()
        if blamed is not None:
            _log.error("request %s reproduces the failure: it is ended", blamed.request.id)
            self._num_unexplained = 0
            self._num_blamed += 1
            scheduler.fail(blamed)
        if self._num_blamed >= _MAX_BLAMED:  # every request fails: the engine is broken, not a request
            raise error
        self._restrict_admission()

    def _clear(self, bisection: FaultBisection, absorbed: StepOutput | None) -> None:
        if bisection.note_step(() if absorbed is None else absorbed.sequences.tolist()):
            self.scheduler.withdraw_all()
            self._restrict_admission()

    def _restrict_admission(self) -> None:
        """Admit the next half alone; with no suspect left, admit all."""
        bisection = self._bisection
        if bisection is not None and not bisection.open:
            self._bisection = bisection = None
        self.scheduler.admit_only(None if bisection is None else bisection.suspects)
