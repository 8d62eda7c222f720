"""A runner that everything goes wrong with, on demand: between the loop and a body that is always right.

It also watches every plan on its way: budgets, law (a), law (c), I6 and I17.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quire.core.ids import Row
from quire.core.request import RequestGroup, SequenceState
from quire.core.step import FinishedRow, FinishReason, Masks, Pending, Runner, StepLost, StepPlan, StepResult
from quire.sched.audit import audit_plan
from quire.sched.scheduler import Scheduler
from quire.sim.check.invariants import CounterCheck, InFlightWatch
from quire.sim.runners import OracleRunner


class FaultyRunner:
    """Troubles ordered for the next step. A body that has died is built anew."""

    def __init__(
        self, build: Callable[[], Runner], scheduler: Scheduler, block_size: int, recount: CounterCheck
    ) -> None:
        self._build = build
        self._body = build()
        self._scheduler = scheduler
        self._block_size = block_size
        self._flight = InFlightWatch(block_size)
        self._recount = recount
        self._silenced: set[Row] = set()  # rows that failed: inert until they leave
        self._known: set[int] = set()  # families that were seated
        self.fresh: list[RequestGroup] = []  # those of them who were in this turn
        self.num_launched = 0
        self.num_tokens = self.num_moves = self.num_padding = self.num_absorbed = 0
        self.num_preemptions = 0  # before this turn
        self.now_s = 0.0
        self.loses: StepLost | None = None  # the next result
        self.loses_early = False  # already when it is launched
        self.poisons = False  # one row of the next result

    @property
    def body(self) -> Runner:
        return self._body

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> "_FaultyStep":
        scheduler = self._scheduler
        self.num_launched += 1
        self.num_tokens += plan.num_tokens
        self.num_moves += len(plan.moves)
        self.num_padding += plan.num_padding
        audit_plan(scheduler, plan)
        counters = scheduler.counters
        pressed = bool(plan.pauses) or counters.preemptions > self.num_preemptions
        taken = counters.class_preemptions > 0  # a priority seat swap is not pressure
        assert taken or not (pressed and plan.chunks and self._admits(plan)), "a step under pressure admitted somebody"
        self._check_deadlines(plan)
        self._flight.launch(plan)
        self._recount.launch(plan)
        self._silenced -= set(plan.releases)
        if plan.reset:
            self._silenced.clear()
        if self.loses is not None and self.loses_early:  # before anything was carried out
            self._raise_lost()
        return _FaultyStep(self._body.launch(plan, masks), self)

    def _admits(self, plan: StepPlan) -> bool:
        """Siblings and beams of those who sit already are no new work."""
        starting = self._scheduler.row_sequences(start.row for start in plan.starts)
        return any(sequence.request.beam is None and sequence.index == 0 for sequence in starting)

    def _check_deadlines(self, plan: StepPlan) -> None:
        """Nobody sits down for the first time after its deadline (I17)."""
        for sequence in self._scheduler.row_sequences(start.row for start in plan.starts):
            group = sequence.group
            if group.order not in self._known:
                deadline_s = group.request.deadline_s
                assert deadline_s is None or self.now_s < deadline_s, f"{group} was seated after its deadline"
                self._known.add(group.order)
                self.fresh.append(group)

    def _raise_lost(self) -> None:
        lost, self.loses = self.loses, None
        assert lost is not None
        if not lost.cache_intact:
            self._body = self._build()
        raise lost

    def settle(self, pending: Pending) -> StepResult:
        """The result, or what became of it."""
        if self.loses is not None:
            self._raise_lost()
        result = pending.wait()
        self._flight.absorb()
        self.num_absorbed += 1
        row = self._first_running(result) if self.poisons else None
        if row is not None:
            self.poisons = False
            self._silenced.add(row)
            if isinstance(self._body, OracleRunner):
                self._body.spoil(row)
            return self._silence(result, FinishedRow(row, FinishReason.ERROR))
        return self._silence(result, None) if self._silenced else result

    def _first_running(self, result: StepResult) -> Row | None:
        """A row that speaks in this result and has not been told to leave."""
        for number in [*result.rows.tolist(), *result.candidates, *result.pooled]:
            sequence = self._scheduler.row_sequence(Row(number))
            if sequence is not None and sequence.state is SequenceState.RUNNING:
                return Row(number)
        return None

    def _silence(self, result: StepResult, ended: FinishedRow | None) -> StepResult:
        heard = ~np.isin(result.rows, list(self._silenced))
        others = tuple(each for each in result.ended if each.row not in self._silenced)
        return replace(
            result,
            rows=result.rows[heard],
            tokens=result.tokens[heard],
            ended=others if ended is None else (*others, ended),
            candidates={row: top for row, top in result.candidates.items() if row not in self._silenced},
            pooled={row: total for row, total in result.pooled.items() if row not in self._silenced},
        )


class _FaultyStep:
    """A step under way, and what may become of it."""

    __slots__ = ("_chaos", "_pending")

    def __init__(self, pending: Pending, chaos: FaultyRunner) -> None:
        self._pending = pending
        self._chaos = chaos

    def wait(self) -> StepResult:
        return self._chaos.settle(self._pending)
