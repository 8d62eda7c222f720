"""Stands between an engine and its runner, and notes of every step when it began, when it was done and who spoke.

Everything else is derived afterwards from these events: nothing is added up, and nobody waits, while the engine runs.

Marks in a device's stream of work, and the seconds between them by the device's own clock.

Marks go into the current stream: a runner that works in another one is not seen by them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import torch

from quire.core.ids import IntArray, Row, SequenceId
from quire.core.step import Masks, Pending, Runner, StepPlan, StepResult


class Mark(Protocol):
    """A place in the stream."""

    def passed(self) -> bool:
        """Whether the device has come past it."""
        ...

    def seconds_since(self, earlier: "Mark") -> float:
        """Only of marks that were passed."""
        ...


class DeviceClock(Protocol):
    def mark(self) -> Mark: ...


class CudaMark:
    """A CUDA event."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark), earlier
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaClock:
    """The GPU's own clock."""

    def mark(self) -> CudaMark:
        return CudaMark()


def device_clock(device: str) -> DeviceClock | None:
    """None on a CPU: it computes a step in the caller's own time, and there is nothing to overlap with."""
    return CudaClock() if device == "cuda" else None


class TimeSpan(NamedTuple):
    """A step's work on the device: its marks, and whether the step before was done when all of this one was launched.

    Then the device may have waited for the host within the span, and the span is no more than an upper bound.
    """

    first: Mark
    last: Mark
    late: bool


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One step, on the host's clock in seconds."""

    launched_s: float
    done_s: float
    num_prompt: int  # tokens of chunks; a step without any is a pure decode
    starts: tuple[tuple[Row, SequenceId], ...]  # who sat down
    rows: IntArray  # each of them got a token
    span: TimeSpan | None  # None where the device has no clock of its own


class Observer:
    """The events of the steps since the last `clear`."""

    __slots__ = ("_clock", "_device", "_last", "steps")

    def __init__(self, clock: Callable[[], float], device: DeviceClock | None) -> None:
        self._clock = clock
        self._device = device
        self._last: Mark | None = None
        self.steps: list[StepEvent] = []

    def clear(self) -> None:
        self.steps = []
        self._last = None

    def around(self, runner: Runner) -> Runner:
        """The same runner, observed."""
        return _ObservedRunner(runner, self)

    def launch(self, runner: Runner, plan: StepPlan, masks: Masks | None) -> Pending:
        launched_s = self._clock()
        if self._device is None:
            return _ObservedStep(runner.launch(plan, masks), plan, launched_s, None, self)
        first = self._device.mark()
        pending = runner.launch(plan, masks)
        span = TimeSpan(first, self._device.mark(), late=self._last is None or self._last.passed())
        self._last = span.last
        return _ObservedStep(pending, plan, launched_s, span, self)

    def note(self, plan: StepPlan, result: StepResult, launched_s: float, span: TimeSpan | None) -> None:
        num_prompt = sum(chunk.length for chunk in plan.chunks)
        starts = tuple((row_start.row, row_start.sequence) for row_start in plan.starts)
        self.steps.append(StepEvent(launched_s, self._clock(), num_prompt, starts, result.rows, span))


class _ObservedRunner:
    __slots__ = ("_observer", "_runner")

    def __init__(self, runner: Runner, observer: Observer) -> None:
        self._runner = runner
        self._observer = observer

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> Pending:
        return self._observer.launch(self._runner, plan, masks)


class _ObservedStep(NamedTuple):
    pending: Pending
    plan: StepPlan
    launched_s: float
    span: TimeSpan | None
    observer: Observer

    def wait(self) -> StepResult:
        result = self.pending.wait()
        self.observer.note(self.plan, result, self.launched_s, self.span)
        return result


def token_gaps_s(steps: Many[StepEvent]) -> list[float]:
    """The seconds between two tokens of one sequence, of all sequences; a preemption is within them."""
    sitting: dict[int, SequenceId] = {}
    spoke_s: dict[SequenceId, float] = {}
    gaps = []
    for step in steps:
        sitting.update(step.starts)
        for row in step.rows.tolist():
            sequence = sitting[row]
            if sequence in spoke_s:
                gaps.append(step.done_s - spoke_s[sequence])
            spoke_s[sequence] = step.done_s
    return gaps


class GpuBusy(NamedTuple):
    """How much of the time from the first step's work to the end of the last one's the device worked."""

    share: float
    late_share: float  # of the steps; while it is 0 the share is exact, else an upper bound


def busy(steps: Many[StepEvent]) -> GpuBusy | None:
    """None if the device has no clock of its own, or there was no step."""
    spans = [step.span for step in steps if step.span is not None]
    if not spans:
        return None
    working_s = sum(span.last.seconds_since(span.first) for span in spans)
    idle_s = sum(after.first.seconds_since(before.last) for before, after in pairwise(spans))
    return GpuBusy(working_s / (working_s + idle_s), sum(span.late for span in spans) / len(spans))


def steady_decode(steps: Many[StepEvent]) -> list[StepEvent]:
    """The longest run of steps without any prompt."""
    runs = [list(run) for pure, run in groupby(steps, key=lambda step: step.num_prompt == 0) if pure]
    return max(runs, key=len, default=[])
