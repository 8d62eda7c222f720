"""Fault injection: a runner between the loop and a correct one that loses steps, dies or poisons a row on demand.

A lost step may or may not have happened: of the steps in flight with it, each copy and each row's writes are carried
out or not, at random. It also checks every plan: budgets, invariants (a) and (c), I5, I6 and I17.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, Row
from quire.core.request import RequestGroup, SequenceState
from quire.core.step import FinishedRow, FinishReason, Masks, Pending, Runner, StepLost, StepPlan, StepResult
from quire.sched.audit import audit_plan
from quire.sched.scheduler import Scheduler
from quire.sim.check.expected import mask_after
from quire.sim.check.invariants import CounterCheck, InFlightWatch, Readable
from quire.sim.check.scenario import VOCAB_SIZE, Scenario


class FaultyRunner:
    """Applies the faults set for the next step. A runner that died is built again."""

    def __init__(
        self,
        build: Callable[[], Runner],
        scheduler: Scheduler,
        scenario: Scenario,
        recount: CounterCheck,
        rng: random.Random,
    ) -> None:
        block_size = scenario.block_size
        self._depth = scenario.depth
        self._pipelined = scenario.policy.num_stages > 1
        self._rng = rng
        self._build = build
        self._runner = build()
        self._scheduler = scheduler
        self._block_size = block_size
        self.watch = InFlightWatch(block_size, self._partition_of)
        self._recount = recount
        self._failed_rows: set[Row] = set()  # rows that failed: inert until they are released
        self._known: set[int] = set()  # groups that were admitted
        self.fresh: list[RequestGroup] = []  # groups admitted in this step
        self.num_launched = 0
        self.num_tokens = self.num_moves = self.num_padding = self.num_absorbed = 0
        self.num_preemptions = 0  # before this step
        self.now_s = 0.0
        self.loses: StepLost | None = None  # the next result
        self.loses_early = False  # already when it is launched, or sampled
        self.poisons = False  # one row of the next result
        self.violation: Exception | None = None  # of an invariant, found while a step was launched

    @property
    def runner(self) -> Runner:
        return self._runner

    def launch(self, plan: StepPlan) -> "_FaultyStep":
        with self._noting_violations():
            return self._launch(plan)

    @contextmanager
    def _noting_violations(self) -> Iterator[None]:
        try:
            yield
        except StepLost:
            raise
        except Exception as broken:  # the loop would look for a request to blame
            self.violation = broken
            raise

    def _launch(self, plan: StepPlan) -> "_FaultyStep":
        scheduler = self._scheduler
        self.num_launched += 1
        self.num_tokens += plan.num_tokens
        self.num_moves += len(plan.moves)
        self.num_padding += plan.num_padding
        audit_plan(scheduler, plan)
        counters = scheduler.counters
        if self._pipelined:
            self.watch.check_stages(plan)
        else:
            assert not plan.pauses or scheduler.kv.num_available == 0, f"{plan.pauses} are paused, and there are blocks"
        denied = bool(plan.pauses) and not self._pipelined
        pressed = denied or counters.preemptions > self.num_preemptions
        taken = counters.class_preemptions + counters.share_preemptions > 0  # for a waiting request: not pressure
        assert taken or not (pressed and plan.chunks and self._admits(plan)), "a step under pressure admitted a request"
        self._check_deadlines(plan)
        self.watch.launch(plan)
        assert self.watch.num_in_flight <= self._depth + 1, f"{self.watch.num_in_flight} steps are in flight"
        self._recount.launch(plan, self.watch.latest)
        self._failed_rows -= set(plan.releases)
        if plan.reset:
            self._failed_rows.clear()
        if self.loses is not None and self.loses_early and not (plan.masked and self._rng.random() < 0.5):
            if isinstance(self._runner, Readable):
                self._runner.carry(plan.moves)  # what did not happen is erased below
            self._raise_lost()
        return _FaultyStep(self._runner.launch(plan), self)

    def sample(self, pending: Pending, masks: Masks) -> None:
        """Pass the masks on, unless the step is lost with them."""
        with self._noting_violations():
            allowed = partial(mask_after, vocab_size=VOCAB_SIZE)
            self.watch.sample(masks, self._has_ended, allowed, pending.drafted)
            if self.loses is not None and self.loses_early:
                self._raise_lost()
            pending.sample(masks)

    def _has_ended(self, row: Row) -> bool:
        (sequence,) = self._scheduler.row_sequences([row])
        return sequence.finished

    def _partition_of(self, row: Row) -> str:
        (sequence,) = self._scheduler.row_sequences([row])
        return sequence.request.partition

    def _admits(self, plan: StepPlan) -> bool:
        """Whether a plan starts new requests; siblings and beams of running ones do not count."""
        starting = self._scheduler.row_sequences(start.row for start in plan.starts)
        return any(sequence.request.beam is None and sequence.index == 0 for sequence in starting)

    def _check_deadlines(self, plan: StepPlan) -> None:
        """No request is first admitted after its deadline (I17)."""
        for sequence in self._scheduler.row_sequences(start.row for start in plan.starts):
            group = sequence.group
            if group.order not in self._known:
                deadline_s = group.request.deadline_s
                assert deadline_s is None or self.now_s < deadline_s, f"{group} was admitted after its deadline"
                self._known.add(group.order)
                self.fresh.append(group)

    def _raise_lost(self) -> None:
        lost, self.loses = self.loses, None
        assert lost is not None
        if not lost.cache_intact:
            self._runner = self._build()
            self.watch.forget_all()
        elif isinstance(self._runner, Readable):
            self._undo(self._runner)
        self.watch.lose_steps()
        raise lost

    def _undo(self, runner: Readable) -> None:
        """Some copies and writes of the steps in flight did not happen."""
        for move in self.watch.lost_copies():
            if self._rng.random() < 0.5:
                runner.erase(move.dst, range(self._block_size))
                self.watch.forget(move.dst)
        for lost in self.watch.lost_writes():
            if self._rng.random() < 0.5:
                runner.erase(lost.place, lost.slots)

    def settle(self, pending: Pending) -> StepResult:
        """The result of a step after its fault."""
        with self._noting_violations():
            return self._settle(pending)

    def _settle(self, pending: Pending) -> StepResult:
        if self.loses is not None:
            self._raise_lost()
        result = pending.wait()
        reads = self.watch.absorb(result)
        self.num_absorbed += 1
        row = self._first_running(result) if self.poisons else None
        if row is not None:
            self.poisons = False
            self._failed_rows.add(row)
            if isinstance(self._runner, Readable):  # its cache must not be used again
                self._runner.erase(*self.watch.slots_of(reads[row], reads[row].stop - 1))
            result = self._silence(result, FinishedRow(row, FinishReason.ERROR))
        elif self._failed_rows:
            result = self._silence(result, None)
        self._recount.verify(result.verified)
        return result

    def _first_running(self, result: StepResult) -> Row | None:
        """A row with an output in this result whose sequence still runs."""
        for number in [*result.rows.tolist(), *result.candidates, *result.pooled]:
            sequence = self._scheduler.row_sequence(Row(number))
            if sequence is not None and sequence.state is SequenceState.RUNNING:
                return Row(number)
        return None

    def _silence(self, result: StepResult, ended: FinishedRow | None) -> StepResult:
        passes = [(rows, tokens, ~np.isin(rows, list(self._failed_rows))) for rows, tokens in result.each_pass()]
        starts = np.cumsum([np.count_nonzero(kept) for _, _, kept in passes[:-1]]).tolist()
        verified = result.verified
        accepted = np.where(np.isin(verified.rows, list(self._failed_rows)), 0, verified.accepted).astype(np.int32)
        others = tuple(each for each in result.ended if each.row not in self._failed_rows)
        return result._replace(
            rows=np.concatenate([rows[kept] for rows, _, kept in passes]),
            tokens=np.concatenate([tokens[kept] for _, tokens, kept in passes]),
            passes=tuple(starts),
            verified=replace(verified, accepted=accepted),
            ended=others if ended is None else (*others, ended),
            candidates={row: top for row, top in result.candidates.items() if row not in self._failed_rows},
            pooled={row: total for row, total in result.pooled.items() if row not in self._failed_rows},
        )


class _FaultyStep(NamedTuple):
    """A step in flight that may fail."""

    pending: Pending
    runner: FaultyRunner

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.pending.drafted

    def sample(self, masks: Masks) -> None:
        self.runner.sample(self.pending, masks)

    def wait(self) -> StepResult:
        return self.runner.settle(self.pending)
