"""Keeps up to `depth` steps in flight between a scheduler and a runner. Depth 0 is synchronous.

Which request makes a step fail: suspects compute in halves, apart from everybody else, until one fails alone.

Decides who may sit next; seats nobody itself. Whoever has emitted a token, or ended, in a suspects that did not fail is
innocent.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from quire.core.ids import IntArray, SequenceId
from quire.core.request import RequestGroup
from quire.core.request import Sequence as Continuation
from quire.core.step import Masks, Pending, Runner, StepLost, StepPlan, StepResult
from quire.core.step_output import StepOutput
from quire.sched.scheduler import Scheduler


class FaultBisection:
    """From the first failure until every suspect was cleared or blamed."""

    __slots__ = ("_halves", "_lengths", "_unheard")

    def __init__(self, suspects: Iterable[RequestGroup]) -> None:
        self._halves = [list(suspects)]
        self._unheard: set[SequenceId] = set()
        self._lengths: dict[int, int] = {}  # of the suspects's beams when it began: they emit nothing, but they grow
        assert self._halves[0], "a step failed, and nobody sat in it"
        self.fail()

    @property
    def suspects(self) -> frozenset[int]:
        """The families that may sit now, by their order."""
        return frozenset(group.order for group in self._halves[-1])

    @property
    def open(self) -> bool:
        return bool(self._halves)

    def fail(self) -> RequestGroup | None:
        """The suspects that sat has failed; whom it leaves to blame, if it was one alone."""
        suspects = self._halves.pop()
        blamed = None
        if len(suspects) == 1:
            (blamed,) = suspects
        else:
            middle = len(suspects) // 2
            self._halves += [suspects[middle:], suspects[:middle]]
        self._begin()
        return blamed

    def hear(self, emitters: Iterable[int]) -> bool:
        """Who emitted a token in a step that did not fail; whether the whole suspects is cleared by now."""
        self._unheard -= {SequenceId(name) for name in emitters}
        if not all(self._is_cleared(group) for group in self._halves[-1]):
            return False
        self._halves.pop()
        self._begin()
        return True

    def _begin(self) -> None:
        while self._halves and all(group.finished for group in self._halves[-1]):  # aborted meanwhile
            self._halves.pop()
        suspects = self._halves[-1] if self._halves else []
        self._unheard = {sequence.id for group in suspects for sequence in group.unfinished}
        self._lengths = {group.order: _length(group) for group in suspects}

    def _is_cleared(self, group: RequestGroup) -> bool:
        if group.request.beam is not None:
            return group.finished or _length(group) > self._lengths[group.order]
        return not any(sequence.id in self._unheard for sequence in group.unfinished)


def _length(group: RequestGroup) -> int:
    return max(sequence.num_tokens for sequence in group.sequences)


# What each of some sequences may say next, as the bits of a row of `Masks`.
MaskSource = Callable[[Sequence[Continuation]], IntArray]
# Marks a part of a turn for whoever profiles.
Span = Callable[[str], AbstractContextManager[object]]

_NOTHING: AbstractContextManager[object] = nullcontext()


def _unwatched(name: str) -> AbstractContextManager[object]:
    return _NOTHING


_MOST_BLAMED = 3  # requests that failed alone, one after the other, without a step that succeeded between them
_MOST_IN_VAIN = 5  # failed steps in a row for which nobody could be blamed: then the engine is at fault

_log = logging.getLogger(__name__)


class _StepFailed(Exception):
    """A body raised something in a step."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
        self._masks = masks
        self._span: Span = span or _unwatched
        self._in_flight: deque[Pending] = deque()
        self._inquest: FaultBisection | None = None
        self._num_in_vain = 0  # inquests since the last that found somebody
        self._num_blamed = 0  # requests ended since a step last succeeded

    def turn(self) -> StepOutput | None:
        """Launch what can be launched; absorb the oldest step once more than `depth` fly or none could be added."""
        try:
            absorbed = self._turn()
        except StepLost as lost:
            self._in_flight.clear()
            self.scheduler.lose_steps(keep_cache=lost.cache_intact)
            if lost.too_large:
                self.scheduler.fail_largest()
            return self.scheduler.overdue()
        except _StepFailed as failed:
            self._look_into(failed.cause)
            return self.scheduler.overdue()
        if absorbed is not None:
            self._num_blamed = 0
        if self._inquest is not None:  # also without a step: its suspects may have been aborted
            self._clear(self._inquest, absorbed)
        return absorbed or self.scheduler.overdue()

    def _turn(self) -> StepOutput | None:
        with self._span("plan"):
            plan = self.scheduler.plan(self._clock())
        if plan is not None:
            with self._span("launch"):
                self._in_flight.append(self._launch(plan))
        depth = self.depth if self._inquest is None else 0
        if self._in_flight and (plan is None or len(self._in_flight) > depth):
            with self._span("wait"):
                result = self._wait(self._in_flight.popleft())
            with self._span("absorb"):
                return self.scheduler.absorb(result, self._clock())
        return None

    def _launch(self, plan: StepPlan) -> Pending:
        try:
            if not plan.masked:
                return self._runner.launch(plan)
            assert self._masks is not None, "a masked row, and nobody to say what it may choose"
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

    # Which request made a step fail.

    def _look_into(self, error: Exception) -> None:
        """Its suspects compute again, in halves; whoever fails alone is ended, and all others go on."""
        scheduler = self.scheduler
        _log.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
        suspects = scheduler.running_groups()
        self._in_flight.clear()
        scheduler.lose_steps(keep_cache=True)
        if self._inquest is None:
            self._num_in_vain += 1
            if not suspects or self._num_in_vain > _MOST_IN_VAIN:
                raise error
            self._inquest, blamed = FaultBisection(suspects), None
            if len(suspects) == 1:
                (blamed,) = suspects
        else:
            blamed = self._inquest.fail()
        if blamed is not None:
            _log.error("request %s failed alone: it is ended", blamed.request.id)
            self._num_in_vain = 0
            self._num_blamed += 1
            scheduler.fail(blamed)
        if self._num_blamed >= _MOST_BLAMED:  # whoever is asked fails: the engine is broken, not a request
            raise error
        self._go_on()

    def _clear(self, inquest: FaultBisection, absorbed: StepOutput | None) -> None:
        if inquest.hear(() if absorbed is None else absorbed.sequences.tolist()):
            self.scheduler.withdraw_all()
            self._go_on()

    def _go_on(self) -> None:
        """The next group sits apart; with nobody left under suspicion, everybody may."""
        inquest = self._inquest
        if inquest is not None and not inquest.open:
            self._inquest = inquest = None
        self.scheduler.admit_only(None if inquest is None else inquest.suspects)
