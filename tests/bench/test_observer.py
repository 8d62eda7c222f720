"""Figures derived from the events of steps, on clocks with known values."""

from collections.abc import Iterator

import numpy as np

from quire.bench.observer import Mark, Observer, StepEvent, TimeSpan, busy, steady_decode, token_gaps_s
from quire.bench.service_levels import Percentiles, percentiles_ms
from quire.core.ids import IntArray, Row, SequenceId
from quire.core.step import Masks, Pending, StepPlan, StepResult


class AtSecond:
    """A mark that the device reaches at a known second."""

    def __init__(self, second: float, *, reached: bool = True) -> None:
        self.second = second
        self._reached = reached

    def reached(self) -> bool:
        return self._reached

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, AtSecond)
        return self.second - earlier.second


class Marks:
    """A device clock with known marks."""

    def __init__(self, *marks: AtSecond) -> None:
        self._marks: Iterator[AtSecond] = iter(marks)

    def mark(self) -> AtSecond:
        return next(self._marks)


class OneRowRunner:
    """A runner whose step gives row 0 a token."""

    def launch(self, plan: StepPlan) -> Pending:
        return FinishedStep(StepResult(plan.step, np.array([0], np.int32), np.array([5], np.int32)))


class FinishedStep:
    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.drafted: dict[Row, IntArray] = {}

    def sample(self, masks: Masks) -> None:
        """Sampled later than it was launched."""

    def wait(self) -> StepResult:
        return self._result


def step(done_s: float, *rows: int, starts: tuple[tuple[int, int], ...] = (), num_prompt: int = 0) -> StepEvent:
    assigned = tuple((Row(row), SequenceId(sequence)) for row, sequence in starts)
    return StepEvent(done_s, done_s, num_prompt, assigned, np.array(rows, np.int32), None)


def spanned(first_s: float, last_s: float, *, late: bool = False) -> StepEvent:
    return StepEvent(0.0, 0.0, 0, (), np.empty(0, np.int32), TimeSpan(AtSecond(first_s), AtSecond(last_s), late))


def test_gaps_are_between_tokens_of_one_sequence() -> None:
    steps = [
        step(1, 0, starts=((0, 10), (1, 11))),
        step(3, 0, 1),
        step(4, 1),
        step(9, 0, 1, starts=((0, 12),)),  # another sequence in row 0: its first token
        step(10, 0),
    ]
    assert token_gaps_s(steps) == [2, 1, 5, 1]


def test_a_gap_includes_a_preemption_and_a_change_of_row() -> None:
    assert token_gaps_s([step(1, 0, starts=((0, 7),)), step(8, 3, starts=((3, 7),))]) == [7]


def test_busy_is_the_share_of_work_in_work_and_gaps() -> None:
    found = busy([spanned(1, 4), spanned(5, 6, late=True), spanned(6, 9), spanned(11, 12)])
    assert found == (8 / 11, 1 / 4)
    assert busy([step(1, 0)]) is None and busy([]) is None


def test_steady_decode_is_the_longest_run_without_prompts() -> None:
    steps = [step(1), step(2, num_prompt=8), step(3), step(4), step(5, num_prompt=1), step(6)]
    assert steady_decode(steps) == steps[2:4]
    assert steady_decode(steps[1:2]) == []


def test_an_observed_runner_gives_the_same_results_and_is_recorded() -> None:
    seconds = iter(range(100))
    marks = Marks(AtSecond(1), AtSecond(2, reached=False), AtSecond(2), AtSecond(5), AtSecond(6), AtSecond(7))
    observer = Observer(lambda: float(next(seconds)), marks)
    runner = observer.wrap(OneRowRunner())
    in_flight = [runner.launch(StepPlan(number)) for number in range(3)]
    assert [pending.wait().step for pending in in_flight] == [0, 1, 2]
    assert [(event.launched_s, event.done_s) for event in observer.steps] == [(0, 3), (1, 4), (2, 5)]
    spans = [event.span for event in observer.steps]
    assert [span is not None and span.late for span in spans] == [True, False, True], (
        "late where the step before had ended"
    )
    assert busy(observer.steps) == (5 / 6, 2 / 3)
    observer.clear()
    assert observer.steps == []


def test_a_step_that_is_sampled_later_ends_with_its_sampling() -> None:
    """It is late if the device had nothing left to do when its masks came."""
    for waited in (False, True):
        marks = Marks(
            AtSecond(0), AtSecond(1, reached=False), AtSecond(1), AtSecond(3, reached=waited), AtSecond(4), AtSecond(5)
        )
        observer = Observer(lambda: 0.0, marks)
        runner = observer.wrap(OneRowRunner())
        first = runner.launch(StepPlan(0))
        masked = runner.launch(StepPlan(1, masked=(Row(0),)))
        masked.sample(Masks(np.array([0], np.int32), np.ones((1, 1), np.int32)))
        assert [pending.wait().step for pending in (first, masked)] == [0, 1]
        span = observer.steps[1].span
        assert span is not None and span.late == waited and span.last.seconds_since(span.first) == 3


def test_percentiles_are_measured_values() -> None:
    assert percentiles_ms([number / 1000 for number in range(100, 0, -1)]) == Percentiles(50, 90, 99, 100)
    assert percentiles_ms([0.004]) == Percentiles(4, 4, 4, 4)
    assert percentiles_ms([]) is None
