"""An observer between an engine and its runner: launch time, completion time and rows with tokens of every step.

Figures are derived from these events afterwards: nothing is summed, and the host does not wait, while the engine runs.
Device times are CUDA events in the current stream; a runner that works in another stream is not seen by them.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import torch

from quire.core.ids import IntArray, Row, SequenceId
from quire.core.step import Masks, Pending, Runner, StepPlan, StepResult


class Mark(Protocol):
    """A position in the device's stream, such as a CUDA event."""

    def reached(self) -> bool:
        """Whether the device has reached it."""
        ...

    def seconds_since(self, earlier: "Mark") -> float:
        """Only for marks that the device has reached."""
        ...


class DeviceClock(Protocol):
    def mark(self) -> Mark: ...


class CudaMark:
    """A CUDA event."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark), earlier
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaClock:
    """Marks of the GPU."""

    def mark(self) -> CudaMark:
        return CudaMark()


def device_clock(device: str) -> DeviceClock | None:
    """None on a CPU: a step runs in the caller's time, and overlaps with nothing."""
    return CudaClock() if device == "cuda" else None


class TimeSpan(NamedTuple):
    """A step on the device: its marks, and whether the step before had ended when this one was fully launched.

    If so (late), the device may have waited for the host within the span, and the span is an upper bound.
    """

    first: Mark
    last: Mark
    late: bool


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One step, on the host's clock in seconds."""

    launched_s: float
    done_s: float
    num_prompt: int  # tokens of prefill chunks; 0 in a pure decode step
    starts: tuple[tuple[Row, SequenceId], ...]  # sequences that got a row
    rows: IntArray  # rows that got a token
    span: TimeSpan | None  # None on a CPU


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

    def wrap(self, runner: Runner) -> Runner:
        """The same runner, observed."""
        return _ObservedRunner(runner, self)

    def launch(self, runner: Runner, plan: StepPlan) -> Pending:
        launched_s = self._clock()
        if self._device is None:
            return _ObservedStep(runner.launch(plan), plan, launched_s, None, self)
        first = self._device.mark()
        pending = runner.launch(plan)
        span = TimeSpan(first, self._device.mark(), late=self._last is None or self._last.reached())
        self._last = span.last
        return _ObservedStep(pending, plan, launched_s, span, self)

    def note_sampling(self, span: TimeSpan | None) -> TimeSpan | None:
        """The span of a step that was sampled after its launch; late also if the device waited for the masks."""
        if span is None or self._device is None:
            return None
        waited = span.last.reached()
        self._last = self._device.mark()
        return TimeSpan(span.first, self._last, late=span.late or waited)

    def note(self, plan: StepPlan, result: StepResult, launched_s: float, span: TimeSpan | None) -> None:
        num_prompt = sum(chunk.length for chunk in plan.chunks)
        starts = tuple((row_start.row, row_start.sequence) for row_start in plan.starts)
        self.steps.append(StepEvent(launched_s, self._clock(), num_prompt, starts, result.rows, span))


class _ObservedRunner:
    __slots__ = ("_observer", "_runner")

    def __init__(self, runner: Runner, observer: Observer) -> None:
        self._runner = runner
        self._observer = observer

    def launch(self, plan: StepPlan) -> Pending:
        return self._observer.launch(self._runner, plan)


@dataclass(slots=True)
class _ObservedStep:
    pending: Pending
    plan: StepPlan
    launched_s: float
    span: TimeSpan | None
    observer: Observer

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.pending.drafted

    def sample(self, masks: Masks) -> None:
        self.pending.sample(masks)
        self.span = self.observer.note_sampling(self.span)

    def wait(self) -> StepResult:
        result = self.pending.wait()
        self.observer.note(self.plan, result, self.launched_s, self.span)
        return result


def token_gaps_s(steps: Many[StepEvent]) -> list[float]:
    """The seconds between two tokens of a sequence, for all sequences. The time of a preemption counts."""
    row_sequence: dict[int, SequenceId] = {}
    last_token_s: dict[SequenceId, float] = {}
    gaps = []
    for step in steps:
        row_sequence.update(step.starts)
        for row in step.rows.tolist():
            sequence = row_sequence[row]
            if sequence in last_token_s:
                gaps.append(step.done_s - last_token_s[sequence])
            last_token_s[sequence] = step.done_s
    return gaps


class GpuBusy(NamedTuple):
    """The share of time in which the device worked, from the first step to the end of the last."""

    share: float
    late_share: float  # of the steps; above 0 the share is an upper bound


def busy(steps: Many[StepEvent]) -> GpuBusy | None:
    """None on a CPU, or without steps."""
    spans = [step.span for step in steps if step.span is not None]
    if not spans:
        return None
    working_s = sum(span.last.seconds_since(span.first) for span in spans)
    idle_s = sum(after.first.seconds_since(before.last) for before, after in pairwise(spans))
    return GpuBusy(working_s / (working_s + idle_s), sum(span.late for span in spans) / len(spans))


def steady_decode(steps: Many[StepEvent]) -> list[StepEvent]:
    """The longest run of steps without prefill."""
    runs = [list(run) for pure, run in groupby(steps, key=lambda step: step.num_prompt == 0) if pure]
    return max(runs, key=len, default=[])
