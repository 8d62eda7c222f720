"""Fault bisection: the request that makes steps fail is ended, and no other request loses a token."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import RequestId, SequenceId
from quire.core.request import BeamParams, Request
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason, StepPlan
from quire.kv.manager import KVManager
from quire.sched.audit import audit, audit_rest
from quire.sched.loop import Loop
from quire.sched.reference_checks import add_reference_checks
from quire.sched.scheduler import Scheduler
from quire.sim.check.expected import expect
from quire.sim.runners import OracleRunner, SimStep
from tests.sched.inspection import state_of
from tests.sched.stepping import VOCAB, counting
from tests.tiers import examples


def request_of(number: int, num_prompt: int, max_tokens: int, n: int, beam: BeamParams | None) -> Request:
    sampling = RowSampling(num_candidates=0 if beam is None else 2 * n)
    prompt = np.array(counting(7 * number, num_prompt), dtype=np.int32)
    return Request(RequestId(number), prompt, max_tokens, sampling, num_sequences=n, beam=beam)


SIZES = st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3), st.booleans())


class Allergic:
    """The oracle, but for sequences that it cannot compute once they know so many tokens."""

    def __init__(self, num_blocks: int, bad: dict[SequenceId, int], num_hiccups: int = 0) -> None:
        self._make = lambda: OracleRunner(num_blocks, 4, VOCAB)
        self._oracle = self._make()
        self._bad = bad
        self._num_hiccups = num_hiccups
        self._sits: dict[int, SequenceId] = {}
        self.num_failures = 0

    def launch(self, plan: StepPlan) -> SimStep:
        if plan.reset:
            self._sits.clear()
        for row in plan.releases:
            self._sits.pop(row, None)
        self._sits.update({row_start.row: row_start.sequence for row_start in plan.starts})
        done = self._oracle.launch(plan)
        rows = self._oracle._rows.rows
        sick = [s for row, s in self._sits.items() if s in self._bad and len(rows[row].tokens) >= self._bad[s]]
        if sick or self._num_hiccups:
            self._num_hiccups -= not sick
            self.num_failures += 1
            raise ZeroDivisionError(f"{sick}")
        return done


def ends_of(depth: int, num_blocks: int, asked: list[Request], runner: Allergic) -> dict[int, FinishReason | None]:
    """Run all; the output of requests that did not fail equals the closed form."""
    scheduler = Scheduler(KVManager(num_blocks, 4, 6), max_rows=6, max_step_tokens=16)
    loop = Loop(scheduler, runner, depth, lambda: 0.0)
    sequences = [sequence for request in asked for sequence in scheduler.add(request)]
    said: dict[int, list[int]] = {sequence.id: [] for sequence in sequences}
    for _ in range(3000):
        if scheduler.idle:
            break
        absorbed = loop.step()
        audit(scheduler)
        assert state_of(scheduler).admissible is None or not loop._in_flight, "a step would clear a request too early"
        if absorbed is not None:
            for name, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
                said[name].append(token)
    assert scheduler.idle, "they never ended"
    audit_rest(scheduler)
    for sequence in sequences:
        if sequence.request.beam is None and sequence.finish_reason is not FinishReason.FAILED:
            right = expect(sequence.request, VOCAB)[sequence.index]
            assert said[sequence.id] == right.tokens and sequence.finish_reason is right.reason, sequence
    return {sequence.id: sequence.finish_reason for sequence in sequences}


@settings(deadline=None, max_examples=examples(40, 120))
@given(st.integers(0, 2), st.integers(60, 90), st.lists(SIZES, min_size=1, max_size=8), st.data())
def test_requests_that_break_steps_are_ended_and_others_are_unaffected(depth, num_blocks, sizes, data):
    asked, first_ids, name = [], [], 0
    for number, (num_prompt, max_tokens, n, beams) in enumerate(sizes):
        beam = BeamParams(n) if beams else None
        asked.append(request_of(number, num_prompt, max_tokens, n, beam))
        first_ids.append(name)
        name += n
    bad = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=2))
    at = {number: sizes[number][0] + data.draw(st.integers(0, max(sizes[number][1] - 1, 0))) for number in bad}
    runner = Allergic(num_blocks, {SequenceId(first_ids[number]): at[number] for number in bad})
    ends = ends_of(depth, num_blocks, asked, runner)
    failed = {number for number, first in enumerate(first_ids) if ends[first] is FinishReason.FAILED}
    assert failed <= bad
    doomed = {number for number in bad if sizes[number][2:] == (1, False) and at[number] <= sizes[number][0]}
    assert doomed <= failed  # a request that cannot compute its own prompt always fails


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_transient_failure_ends_no_request(depth):
    asked = [request_of(number, 5, 6, 1, None) for number in range(5)]
    runner = Allergic(80, {}, num_hiccups=1)
    ends = ends_of(depth, 80, asked, runner)
    assert set(ends.values()) == {FinishReason.LENGTH} and runner.num_failures == 1


def test_an_engine_that_always_fails_raises_instead_of_blaming_all_requests():
    scheduler = Scheduler(KVManager(80, 4, 6), max_rows=6, max_step_tokens=16)
    loop = Loop(scheduler, Allergic(80, {}, num_hiccups=10**6), 1, lambda: 0.0)
    for number in range(6):
        scheduler.add(request_of(number, 5, 6, 1, None))
    with pytest.raises(ZeroDivisionError):
        for _ in range(200):
            loop.step()
    ended = [group for group in scheduler.groups() if group.finished]
    assert len(scheduler.groups()) - len(ended) >= 3


def test_requests_that_fail_one_after_another_do_not_end_the_engine():
    """Each fails alone, and others succeed between them: the engine is not at fault."""
    asked = [request_of(number, 5, 3, 1, None) for number in range(10)]
    scheduler = Scheduler(KVManager(80, 4, 6), max_rows=6, max_step_tokens=16)
    loop = Loop(scheduler, Allergic(80, {SequenceId(number): 1 for number in range(0, 10, 2)}), 1, lambda: 0.0)
    ends = []
    for request in asked:
        (sequence,) = scheduler.add(request)
        while not scheduler.idle:
            loop.step()
        ends.append(sequence.finish_reason)
    assert ends == [FinishReason.FAILED, FinishReason.LENGTH] * 5


def test_requests_that_arrive_during_a_bisection_are_served_afterwards():
    scheduler, times = Scheduler(KVManager(80, 4, 6), max_rows=6, max_step_tokens=16), count(1)
    add_reference_checks(scheduler)  # among them: since when a request waits
    loop = Loop(scheduler, Allergic(80, {SequenceId(2): 1}), 1, lambda: float(next(times)))
    for number in range(6):
        scheduler.add(request_of(number, 5, 8, 1, None))
    while state_of(scheduler).admissible is None:
        loop.step()
    scheduler.add(request_of(9, 5, 3, 1, None))
    loop.step()
    scheduler.abort(RequestId(5))
    audit(scheduler)
    ends = {}
    while not scheduler.idle:
        absorbed = loop.step()
        audit(scheduler)
        ends.update({over.number: over.reason for over in (() if absorbed is None else absorbed.finished)})
    assert ends[2] is FinishReason.FAILED and ends[9] is FinishReason.LENGTH
    assert sorted(ends) == [0, 1, 2, 3, 4, 9]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_when_all_suspects_of_a_group_are_aborted_the_others_are_served(depth):
    scheduler = Scheduler(KVManager(80, 4, 6), max_rows=6, max_step_tokens=16)
    loop = Loop(scheduler, Allergic(80, {SequenceId(2): 1}), depth, lambda: 0.0)
    sequences = [sequence for number in range(6) for sequence in scheduler.add(request_of(number, 5, 8, 1, None))]
    while state_of(scheduler).admissible is None:
        loop.step()
    suspects = [sequence for sequence in sequences if sequence.group.order in state_of(scheduler).admissible]
    for sequence in suspects:
        scheduler.abort(sequence.request.id)
    for _ in range(200):
        loop.step()
        audit(scheduler)
    assert scheduler.idle
    others = {sequence.id: sequence.finish_reason for sequence in sequences if sequence not in suspects}
    assert others.pop(SequenceId(2)) is FinishReason.FAILED
    assert set(others.values()) == {FinishReason.LENGTH}
