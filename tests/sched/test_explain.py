"""An explanation names what a request waited for, what was cached, what preempted it and what that cost."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import RequestId
from quire.core.request import RequestGroup, Sequence, WaitCause
from quire.core.step import FinishReason
from quire.sched.cost_model import Constants, CostTable
from quire.sched.explain import Explanation, Wait, WaitHistory
from quire.sched.pacing import StepBound
from quire.sched.policy import Policy
from quire.sched.queue import OrderPolicy
from quire.sched.scheduler import Scheduler
from quire.sim.check.check import numpy_oracle
from quire.sim.check.scenario import draw_scenario
from quire.sim.check.trial import CheckRun
from tests.sched.inspection import state_of
from tests.sched.stepping import NEVER, Bench, counting
from tests.tiers import examples


def events(bench: Bench, sequence: Sequence) -> Explanation:
    explanation = bench.scheduler.explain(sequence.group)
    assert explanation.lines(), "an explanation is never empty"
    return explanation


def test_wait_for_a_row() -> None:
    bench = Bench(rows=1)
    first = bench.add(counting(0, 4), 3)
    second = bench.add(counting(50, 4), 1)
    bench.run_out()
    assert events(bench, first).waits == ()
    explanation = events(bench, second)
    assert explanation.waits == (Wait(0, 3, WaitCause.ROWS),)
    assert "step 0: waited 3 steps: every row was assigned" in explanation.lines()


def test_a_step_without_tokens_left() -> None:
    bench = Bench(budget=8)
    bench.add(counting(0, 8), 1)
    second = bench.add(counting(50, 8), 1)
    bench.run_out()
    assert events(bench, second).waits == (Wait(0, 1, WaitCause.BUDGET),)


def test_what_sized_the_steps_of_a_prompt() -> None:
    """A token takes a millisecond: of 20 ms a decoding row takes one, and no other prompt waits."""
    policy = Policy(itl_target_s=0.02, ttft_target_s=1.0)
    cost = CostTable(Constants(0.0, 0.0, 1e-3, 0.0, 0.0))
    bench = Bench(blocks=100, rows=3, budget=64, policy=policy, cost=cost)
    bench.add(counting(0, 4), 30)
    bench.turn()
    late = bench.add(counting(50, 50), 2)
    bench.run_out()
    explanation = events(bench, late)
    assert explanation.paced_by == ((StepBound.ITL, 2),), "the third step holds what is left"
    assert any("its steps had the size of the ITL target (2)" in line for line in explanation.lines())


def test_a_full_cache() -> None:
    bench = Bench(blocks=4, policy=NEVER)
    bench.add(counting(0, 8), 9)
    second = bench.add(counting(50, 4), 1)
    bench.turn()
    assert events(bench, second).waits == (Wait(0, 1, WaitCause.BLOCKS),)
    bench.run_out()
    assert events(bench, second).waited(WaitCause.BLOCKS) == 9


def test_a_step_under_pressure_admits_no_request() -> None:
    bench = Bench(blocks=4, rows=4)
    bench.add(counting(0, 6), 10)
    bench.add(counting(30, 6), 10)
    bench.turn()
    third = bench.add(counting(60, 2), 1)
    bench.run_out()
    explanation = events(bench, third)
    assert explanation.waited(WaitCause.PRESSURE) > 0
    assert explanation.waited(WaitCause.BLOCKS) > 0


def test_an_overtaken_request_waits_for_the_order() -> None:
    bench = Bench(rows=1, policy=Policy(order=OrderPolicy(ageing_s=0)))
    bench.add(counting(0, 4), 2)
    humble = bench.add(counting(20, 4), 1, priority=1)
    bench.turn()
    noble = bench.add(counting(40, 4), 2)
    bench.run_out()
    explanation = events(bench, humble)
    assert explanation.waits == (
        Wait(0, 2, WaitCause.ROWS),
        Wait(2, 3, WaitCause.ORDER, (noble.request.id,)),
        Wait(3, 4, WaitCause.ROWS),
    )
    assert any("others came first" in line and f"(request {noble.request.id})" in line for line in explanation.lines())


def test_waiting_for_the_same_prefix() -> None:
    bench = Bench(budget=24)
    leader = bench.add(counting(0, 20), 1)
    follower = bench.add(counting(0, 20), 1)
    bench.run_out()
    explanation = events(bench, follower)
    assert explanation.waits == (Wait(0, 1, WaitCause.PREFIX, (leader.request.id,)),)
    assert explanation.admissions[0].num_found == 19


def test_hits_and_what_was_never_seen() -> None:
    bench = Bench()
    bench.add(counting(0, 10), 3)
    bench.run_out()
    again = bench.add([*counting(0, 10), *counting(500, 8)], 1)
    bench.run_out()
    explanation = events(bench, again)
    assert explanation.admissions[0].num_found == 10
    assert explanation.shortfall is not None
    assert (explanation.shortfall.num_tokens, explanation.shortfall.why) == (8, "never seen")
    assert "with 10 tokens from the cache" in " ".join(explanation.lines())


def test_what_was_evicted_names_the_step_and_the_one_it_went_for() -> None:
    bench = Bench(blocks=6)
    bench.add(counting(0, 16), 1)
    bench.run_out()
    greedy = bench.add(counting(100, 22), 1)
    bench.run_out()
    again = bench.add(counting(0, 16), 1)
    bench.run_out()
    explanation = events(bench, again)
    assert explanation.shortfall is not None
    assert explanation.shortfall.why == f"evicted in step {greedy.group.events[-2].step}"
    assert explanation.shortfall.evicted_for == greedy.request.id
    assert f" for request {greedy.request.id}" in " ".join(explanation.lines())


def test_a_prefix_cached_in_another_partition_is_reported() -> None:
    bench = Bench()
    bench.add(counting(0, 12), 1, partition="mine")
    bench.run_out()
    other = bench.add(counting(0, 12), 1, partition="yours")
    bench.run_out()
    explanation = events(bench, other)
    assert explanation.shortfall is not None and explanation.shortfall.why == "other partition"


def test_a_preemption_names_its_cause_and_what_was_lost() -> None:
    bench = Bench(rows=1, blocks=16, policy=Policy(order=OrderPolicy(ageing_s=0)))
    humble = bench.add(counting(0, 6), 8, priority=1)
    bench.turns(3)
    noble = bench.add(counting(100, 60 - 20), 20)
    bench.turn()
    assert events(bench, humble).interruptions[0].num_lost is None
    bench.run_out()
    explanation = events(bench, humble)
    (interruption,) = explanation.interruptions
    assert (interruption.by, interruption.num_computed) == (noble.request.id, 8)
    assert interruption.num_lost == 8 - explanation.admissions[1].num_found
    assert explanation.waits[-1].stop == explanation.admissions[1].step
    assert any(line.endswith(f"8 tokens had been computed, {interruption.num_lost} tokens recomputed")
               for line in explanation.lines())  # fmt: skip


def test_lost_steps_are_caused_by_no_request() -> None:
    bench = Bench()
    sequence = bench.add(counting(0, 6), 4)
    bench.turns(2)
    bench.scheduler.lose_steps(keep_cache=False)
    bench.run_out()
    (interruption,) = events(bench, sequence).interruptions
    assert (interruption.by, interruption.num_lost) == (None, 7)


def test_a_life_from_first_token_to_end() -> None:
    bench = Bench(budget=8)
    sequences = bench.add_group(counting(0, 13), 3, 3)
    bench.run_out()
    explanation = events(bench, sequences[0])
    assert [(fork.num_shared, fork.shared_with) for fork in explanation.forks] == [(12, "2 siblings")]
    assert explanation.first_token_step == 1, "8 tokens of the prompt in step 0, 5 in step 1"
    assert explanation.ending is not None and explanation.ending.reasons == FinishReason.LENGTH.value
    steps = [int(line.split(":")[0].removeprefix("step ")) for line in explanation.lines()]
    assert steps == sorted(steps)


def test_beams_report_their_first_fork() -> None:
    bench = Bench(oracle=True)
    sequences = bench.add_beams(counting(0, 9), 6, 3)
    bench.run_out()
    explanation = events(bench, sequences[0])
    assert explanation.forks[0].num_shared == 9 and explanation.forks[0].shared_with == "beams"
    assert len(explanation.forks) <= 2, "consecutive forks are reported once"


def test_a_preempted_request_waits_for_steps_in_flight() -> None:
    bench = Bench(blocks=6, depth=2)
    first = bench.add(counting(0, 6), 10)
    bench.add(counting(30, 5), 10)  # it needs its next block a step later, and computes meanwhile
    third = bench.add(counting(60, 5), 10)
    bench.run_out()
    explanation = events(bench, third)
    interruption = explanation.interruptions[0]
    assert interruption.by == first.request.id
    assert explanation.waits[0].start == interruption.step and explanation.waits[0].cause is None, explanation.waits
    waits = [wait for wait in explanation.waits if wait.stop <= explanation.admissions[1].step]
    assert waits[-1].stop == explanation.admissions[1].step
    for one, other in pairwise(waits):
        assert one.stop == other.start, "no step of a wait is left unexplained"


def test_explanations_of_random_scenarios_add_up() -> None:
    """Every step of a wait has one cause, and a preemption names its cause."""
    seen: set[WaitCause | None] = set()
    for seed in range(examples(15, 40)):
        dice = random.Random(seed)
        trial = CheckRun(draw_scenario(dice), dice, numpy_oracle)
        accepted = _AcceptedGroups(trial.scheduler)
        trial.run()
        for group in accepted.groups:
            explanation = trial.scheduler.explain(group)
            assert explanation.lines() and explanation.ending is not None
            for one, other in pairwise(explanation.waits):
                assert one.stop <= other.start
            if explanation.admissions:
                before = [wait for wait in explanation.waits if wait.start < explanation.admissions[0].step]
                waited = sum(wait.stop - wait.start for wait in before)
                assert waited == explanation.admissions[0].step - explanation.arrived_step
            seen |= {wait.cause for wait in explanation.waits}
    assert seen >= set(WaitCause)


class _AcceptedGroups:
    """All request groups that a scheduler accepted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.groups: list[RequestGroup] = []
        state = state_of(scheduler)
        self._enter = state.add
        state.add = self.enter  # type: ignore[method-assign]

    def enter(self, group: RequestGroup) -> None:
        self.groups.append(group)
        self._enter(group)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, *WaitCause])), max_size=40), st.integers(0, 60))
@settings(deadline=None)
def test_stretches_are_what_each_step_was_last_noted_with(
    notes: list[tuple[int, WaitCause | None]], start: int
) -> None:
    wait_history = WaitHistory()
    last: dict[int, WaitCause | None] = {}
    step = 0
    for ahead, cause in notes:
        step += min(ahead, 1)  # the same step again, or the next
        wait_history.note(step, cause)
        last[step] = cause
    stop = step + 1
    found = [
        (number, interval.cause) for interval in wait_history.between(start, stop) for number in range(*interval[:2])
    ]
    assert found == [(number, last[number]) for number in sorted(last) if number >= start]
    causes = [interval.cause for interval in wait_history.between(0, stop)]
    assert all(one is not other for one, other in pairwise(causes)), "a interval is as long as its cause"


def test_history_is_bounded() -> None:
    wait_history = WaitHistory(max_kept=4)
    for step in range(100):
        wait_history.note(step, WaitCause.ROWS if step % 2 else WaitCause.BLOCKS)
        wait_history.note_admitted(step, step, RequestId(step))
    assert sum(interval.stop - interval.start for interval in wait_history.between(0, 100)) == 4
    assert [assigned.step for assigned in wait_history.overtakers(-1, 0, 100)] == [96, 97, 98, 99]
