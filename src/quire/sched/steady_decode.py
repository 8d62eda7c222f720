"""Steady decoding: steps that repeat the one before, planned and absorbed with little work.

A step is steady if the rows of the step before decode once more and nothing else is to do: no request waits, and no row
starts, computes a prompt, ends, pauses, drafts, follows a grammar or needs a block. Its plan names nothing, and its
result has one token of each row. Plans, outputs and counters are those that `Scheduler.plan` and `absorb` would give.
What only later decisions read, measured times and late steps, is noted before the next step that is planned in full.
On a CPU the weights of a step empty the caches, so that each object that the host reads between two steps counts
(docs/performance/ledger, section 65).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray
from quire.core.request import Sequence
from quire.core.step import NO_DRAFTS, Drafts, ForcedTokens, StepPlan, StepResult
from quire.core.step_output import StepOutput
from quire.sched.cost_model import WINDOW, CostTable, StepShape
from quire.sched.rows import NO_SEQUENCE
from quire.sched.state import SchedulerState

_MAX_STEPS = 32  # made at once: those of one block, or of two small ones
_NEVER = -1  # in the place of a generation of rows
_NO_IDS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_NO_ROWS: IntArray = np.empty(0, dtype=np.int32)


class StepInFlight(NamedTuple):
    """A planned step whose result is not absorbed."""

    step: int
    shape: StepShape
    expected_s: float
    chunks: tuple[tuple[Sequence, int], ...] = ()  # each with the position where its chunk ends
    moves: bool = False  # whether it copies blocks
    drafts: Drafts = NO_DRAFTS
    forced: tuple[ForcedTokens, ...] = ()  # of rows with drafts


class SteadyStep(NamedTuple):
    """A step that repeats the one before."""

    flight: StepInFlight
    plan: StepPlan


class SteadyDecode:
    """The next steps, if they repeat the one before."""

    __slots__ = (
        "_cost",
        "_emitters",
        "_generation",
        "_measured",
        "_next",
        "_num_planned",
        "_num_rows",
        "_rows",
        "_state",
    )

    def __init__(self, state: SchedulerState, cost: CostTable) -> None:
        self._state = state
        self._cost = cost
        self._generation = _NEVER  # of the rows when a step was planned that the next may repeat
        self._num_rows = 0
        self._next: list[SteadyStep] = []  # the last first
        self._num_planned = 0  # steady steps whose notes are deferred
        self._measured: list[tuple[StepShape, float]] = []  # shapes and seconds of steps, not observed yet
        self._rows = _NO_ROWS  # of the last result, and
        self._emitters = _NO_IDS  # their sequences

    def begin(self, plan: StepPlan, expected_s: float) -> None:
        """A step was planned in full. The next repeat it if it names nothing but blocks and nothing waits, until a row
        needs a block or is at its end. They are made together: many cost little more than one."""
        state = self._state
        rows, policy, calendar = state.rows, state.policy, state.calendar
        waits = state.waiting or state.prefilling or state.host_driven or state.forked or state.excluded
        parked, ends = state.inflight_prefixes.num_followers, rows.releasing or state.num_masked
        differs = policy.regime.padded or policy.num_stages > 1 or calendar.has_drafting
        if not plan.repeats or waits or parked or ends or differs:
            return
        self._generation, self._num_rows = rows.generation, plan.num_decoding
        self._rows = _NO_ROWS
        last = state.governor.quiet_until(plan.step) if state.governor.active else plan.step + _MAX_STEPS
        for step in range(plan.step + 1, min(last, plan.step + _MAX_STEPS) + 1):
            if calendar.is_booked(step):
                break
            shape = StepShape(plan.num_decoding, calendar.num_context(step))
            following = StepPlan(step, num_decoding=plan.num_decoding)
            self._next.append(SteadyStep(StepInFlight(step, shape, expected_s), following))
        self._next.reverse()

    def end(self) -> None:
        """The next step may differ: before one is planned in full, and after a result that has more than tokens."""
        self._generation = _NEVER
        self._next.clear()
        self.note_deferred()

    def note_deferred(self) -> None:
        """What steady steps have left to note: before anything reads it. They are alike: the latest are enough."""
        for _ in range(self._num_planned):
            self._state.late_steps.note()
        for shape, seconds in self._measured[-WINDOW:]:
            self._cost.observe(shape, seconds)
        self._num_planned = 0
        self._measured.clear()

    def plan(self, now_s: float) -> SteadyStep | None:
        """The next step, if it is steady."""
        state = self._state
        if not self._next or state.rows.generation != self._generation or state.waiting or state.kv.has_moves:
            return None
        steady = self._next.pop()
        step = steady.plan.step
        state.now_s, state.last_planned, state.kv.step = now_s, step, step
        state.counters.computed_tokens += self._num_rows
        self._num_planned += 1
        return steady

    def absorb(self, flight: StepInFlight, result: StepResult, seconds: float) -> StepOutput | None:
        """The output of a step that took some seconds, if its rows have one token each and nothing else is to do."""
        state = self._state
        rows = state.rows
        if rows.generation != self._generation or flight.chunks or state.unreported or not result.plain:
            self.end()
            return None
        if seconds > 0:
            self._measured.append((flight.shape, seconds))
        rows.note(result)
        if state.governor.note_tokens(result, _NO_ROWS):  # rows may have drafts in the next step
            self._next.clear()
        if result.rows is not self._rows:
            self._rows, self._emitters = result.rows, rows.sequence_ids(result.rows)
            assert NO_SEQUENCE not in self._emitters, "a row without a sequence decodes"
        return StepOutput(result.step, self._emitters, result.tokens)
