"""The engine loop: plan, launch, wait, absorb, with up to `depth` steps in flight. Depth 0 is synchronous.

A step with rows under a grammar is sampled after the step before was absorbed, because its masks depend on those
tokens. The masks are computed while the device runs the forward pass, so such rows get a token in every step. While
there are such requests, at most one step is in flight when the next is planned.

A step that raises is bisected to find the request that causes it. The suspects compute in halves, apart from all other
requests, until one fails alone. A request that emits a token, or ends, in a step that succeeds is cleared.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn, TypeVar, TypeVarTuple

import numpy as np

from quire.core.errors import RankFailed
from quire.core.ids import IntArray, Row, SequenceId
from quire.core.request import RequestGroup
from quire.core.request import Sequence as Continuation
from quire.core.step import Masks, Pending, Runner, StepLost, StepResult
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


# The masks of each sequence at its next position and after each of its drafts, if it has any. `Receiver` has seen all
# its tokens. The rows of `Masks` are those of the sequences; its first pass has all of them, in this order.
MaskSource = Callable[[Sequence[Continuation], Sequence[IntArray]], Masks]
# Gets each output as soon as its step is absorbed, and may replace it.
Receiver = Callable[[StepOutput], StepOutput]
# Marks a part of the loop for a profiler.
Span = Callable[[str], AbstractContextManager[object]]

_Arguments = TypeVarTuple("_Arguments")
_Returned = TypeVar("_Returned")
_NO_DRAFTS: IntArray = np.empty(0, dtype=np.int32)

_MAX_BLAMED = 3  # requests that failed alone without a successful step between them: then the engine is at fault
_MAX_UNEXPLAINED = 5  # failed steps in a row that no request could be blamed for: then the engine is at fault

_log = logging.getLogger(__name__)


class _StepFailed(Exception):
    """The runner raised in a step."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _fail_step(error: Exception) -> NoReturn:
    """Mark what the runner raises, other than a lost step or its own end, as a failed step."""
    if isinstance(error, StepLost | RankFailed):
        raise error
    raise _StepFailed(error) from error


class Progress(NamedTuple):
    """What the loop does, and since when."""

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
        receive: Receiver | None = None,
        span: Span | None = None,
    ) -> None:
        assert depth >= 0, depth
        self.scheduler = scheduler
        self.depth = depth
        self._runner = runner
        self._clock = clock
        self._progress = (clock(), 0.0)  # the fields of `Progress`
        self._masks = masks
        self._receive: Receiver = receive or (lambda output: output)
        self._span = span
        self._in_flight: deque[Pending] = deque()
        self._unsampled: tuple[Row, ...] = ()  # masked rows of the newest step, until it is sampled
        self._bisection: FaultBisection | None = None
        self._num_unexplained = 0  # bisections since the last that blamed a request
        self._num_blamed = 0  # requests failed since a step last succeeded

    @property
    def progress(self) -> Progress:
        """What the loop does now. May be read on another thread."""
        return Progress(*self._progress)

    def note_progress(self) -> None:
        """Something other than a step is done: the loop continues."""
        self._progress = (self._clock(), 0.0)

    def step(self) -> StepOutput | None:
        """Launch the next step; absorb the oldest once too many are in flight or none could be planned.

        Every step in flight is sampled when this returns: what runs between two steps may overwrite its logits.
        """
        absorbed: StepOutput | None = None
        try:
            limit = self._limit
            launched = len(self._in_flight) <= limit and self._launch_next()
            if self._unsampled:
                self._sample_if_alone()
            if self._in_flight and (not launched or len(self._in_flight) > limit):
                absorbed = self._absorb_oldest()
                if self._unsampled:
                    self._sample_if_alone()
            assert not self._unsampled, "a step with masked rows is not sampled"
        except StepLost as lost:
            self._forget_steps()
            self.scheduler.lose_steps(keep_cache=lost.cache_intact)
            if lost.too_large:
                self.scheduler.fail_largest()
            return absorbed or self._overdue()
        except _StepFailed as failed:
            self._bisect(failed.cause)
            return absorbed or self._overdue()
        if self._bisection is not None:  # also without a step: the suspects may have been aborted
            self._clear(self._bisection, absorbed)
        return absorbed or self._overdue()

    @property
    def _limit(self) -> int:
        """Steps that may be in flight when the next is planned."""
        if self._bisection is not None:
            return 0
        return min(self.depth, 1) if self.scheduler.has_masked else self.depth

    def _launch_next(self) -> bool:
        """Whether there was anything to plan."""
        now_s = self._clock()
        # Without spans, parts are called directly: each call counts where the weights have just emptied the caches.
        plan = self.scheduler.plan(now_s) if self._span is None else self._run("plan", self.scheduler.plan, now_s)
        self._progress = (now_s, self.scheduler.expected_s)
        if plan is None:
            return False
        try:
            launch = self._runner.launch
            self._in_flight.append(launch(plan) if self._span is None else self._run("launch", launch, plan))
        except Exception as error:
            _fail_step(error)
        self._unsampled = plan.masked
        return True

    def _absorb_oldest(self) -> StepOutput:
        try:
            wait = self._in_flight.popleft().wait
            result = wait() if self._span is None else self._run("wait", wait)
        except Exception as error:
            _fail_step(error)
        now_s = self._clock()
        self._progress = (now_s, 0.0)
        return self._absorb(result, now_s) if self._span is None else self._run("absorb", self._absorb, result, now_s)

    def _absorb(self, result: StepResult, now_s: float) -> StepOutput:
        self._num_blamed = 0
        return self._receive(self.scheduler.absorb(result, now_s))

    def _sample_if_alone(self) -> None:
        """Sample a step with masked rows, if all steps before it are absorbed."""
        if len(self._in_flight) > 1:
            return
        try:
            self._run("masks", self._sample_masked)
        except Exception as error:
            _fail_step(error)
        self._unsampled = ()

    def _sample_masked(self) -> None:
        assert self._masks is not None, "a row under a grammar, and no source of masks"
        sequences = [each for each in self.scheduler.row_sequences(self._unsampled) if not each.finished]
        drafted = self._in_flight[-1].drafted
        drafts = [drafted.get(each.row, _NO_DRAFTS) for each in sequences if each.row is not None]
        self._in_flight[-1].sample(self._masks(sequences, drafts))

    def _run(self, name: str, part: Callable[[*_Arguments], _Returned], *arguments: *_Arguments) -> _Returned:
        """A part of a step, within its span if a profiler asks for spans."""
        if self._span is None:
            return part(*arguments)
        with self._span(name):
            return part(*arguments)

    def _overdue(self) -> StepOutput | None:
        overdue = self.scheduler.overdue()
        return None if overdue is None else self._receive(overdue)

    def _forget_steps(self) -> None:
        self._in_flight.clear()
        self._unsampled = ()

    # Fault bisection.

    def _bisect(self, error: Exception) -> None:
        """The suspects compute again, in halves. The one that fails alone is ended; all others continue."""
        scheduler = self.scheduler
        _log.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
        suspects = scheduler.running_groups()
        self._forget_steps()
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
