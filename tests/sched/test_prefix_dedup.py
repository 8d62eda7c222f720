"""Requests that wait for a prefix another request is computing, and when they continue."""

import sys
from dataclasses import replace
from types import FrameType

import pytest

from quire.core.errors import QueueFull
from quire.core.ids import RequestId
from quire.core.request import EventKind, Sequence, SequenceState, WaitCause
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason
from quire.sched.admission import MAX_PARKED
from quire.sched.plan_builder import PlanBuilder
from quire.sched.prefix_dedup import InflightPrefixes, PrefixWait
from quire.sched.queue import OrderPolicy
from tests.sched.inspection import admission_of, state_of
from tests.sched.stepping import OPTIMISTIC, Bench, counting, events_of, oracle_output
from tests.sched.waiting_groups import group

LONG = counting(1, 16)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def follower_of(bench: Bench, prompt: list[int]) -> tuple[Sequence, Sequence]:
    """A leader that has started a long prompt, and a request that shares a part of it."""
    leader = bench.add(LONG, 5)
    return leader, bench.add(prompt, 5)


def test_a_follower_waits_until_the_leader_has_come_far_enough() -> None:
    """6 tokens a step, of which a long prompt leaves to others what they need: it has 6, 12 and 16. Two blocks are
    common: they are there after the second step, and one token of the third with them."""
    policy = replace(OPTIMISTIC, order=OrderPolicy(long_prompt=16))
    bench = Bench(oracle=True, budget=6, rows=4, policy=policy)
    leader = bench.add(LONG, 5)
    bench.turn()
    follower = bench.add([*LONG[:9], 500], 5)
    bench.turn()
    (wait,) = events_of(follower, EventKind.WAITED)
    assert (wait.step, wait.cause, wait.other) == (1, WaitCause.PREFIX, leader.request.id)
    bench.turn()
    assert follower.assigned_step == 2
    assert [(chunk.start, chunk.length) for chunk in bench.chunks_of(follower)] == [(9, 1)]
    assert [chunk.length for chunk in bench.chunks_of(leader)] == [6, 6, 4]
    bench.run()
    assert bench.emitted[follower.id] == oracle_output([*LONG[:9], 500], 5)
    assert bench.emitted[leader.id] == oracle_output(LONG, 5)


def test_a_follower_returns_with_what_is_left_to_compute() -> None:
    """It waited as a long prompt; most of it is cached now."""
    policy = replace(OPTIMISTIC, order=OrderPolicy(long_prompt=8))
    bench = Bench(oracle=True, budget=6, rows=4, policy=policy)
    bench.add(LONG, 5)
    bench.turn()
    follower = bench.add([*LONG[:9], 500], 5)
    assert follower.group.num_uncached == 6
    bench.turns(3)
    assert follower.group.num_uncached == 1 and follower.state is SequenceState.RUNNING
    bench.run()


def test_a_follower_still_counts_as_waiting() -> None:
    bench = Bench(oracle=True, policy=replace(OPTIMISTIC, max_waiting=1), depth=1)
    bench.add(LONG, 5)
    bench.turn()
    follower = bench.add(LONG, 5)
    admission_of(bench.scheduler).admit(PlanBuilder(1, 0.0, 8))
    assert not bench.scheduler.is_queued(follower.group) and bench.scheduler.num_waiting == 1
    with pytest.raises(QueueFull):
        bench.add([600], 2)
    bench.run()


@DEPTHS
def test_a_follower_of_a_whole_prompt_begins_when_it_is_absorbed(depth: int) -> None:
    bench = Bench(oracle=True, depth=depth)
    leader, follower = follower_of(bench, LONG)
    bench.turns(depth + 1)
    assert follower.state is SequenceState.WAITING
    bench.turn()
    assert follower.assigned_step == depth + 1 and bench.chunks_of(follower)[0].start == 15
    bench.run()
    assert bench.emitted[leader.id] == bench.emitted[follower.id] == oracle_output(LONG, 5)


@DEPTHS
def test_a_follower_continues_when_its_leader_is_aborted(depth: int) -> None:
    """It takes over from where the leader's absorbed steps had come."""
    bench = Bench(oracle=True, depth=depth, budget=5, rows=4)
    leader, follower = follower_of(bench, LONG)
    bench.turn()
    bench.scheduler.abort(leader.request.id)
    bench.turn()
    assert bench.chunks_of(follower)[0].start == (5 if depth == 0 else 0)
    bench.run()
    assert bench.emitted[follower.id] == oracle_output(LONG, 5)


@DEPTHS
@pytest.mark.parametrize("turns", range(5))
def test_a_follower_may_be_aborted(depth: int, turns: int) -> None:
    bench = Bench(oracle=True, depth=depth, budget=5, rows=4)
    leader, follower = follower_of(bench, LONG)
    bench.turns(turns)
    assert bench.scheduler.abort(follower.request.id) == (follower,)
    bench.run()
    assert bench.emitted[leader.id] == oracle_output(LONG, 5)


def test_a_following_group_that_loses_a_sequence_waits_in_one_place() -> None:
    bench = Bench(oracle=True, budget=20, depth=1)
    leader = bench.add(LONG, 5)
    one, other = bench.add_group(LONG, 5, 2)
    bench.turn()
    assert state_of(bench.scheduler).inflight_prefixes.follows(one.group)
    assert bench.scheduler.finish(other, FinishReason.STOP)
    assert bench.scheduler.num_waiting == 1 and not bench.scheduler.is_queued(one.group)
    bench.run()
    assert bench.emitted[one.id] == bench.emitted[leader.id] == oracle_output(LONG, 5)


def test_no_request_waits_for_a_lower_class() -> None:
    """After 12 of 18 tokens a second asks the same. It waits for one more block, if it may wait at all."""
    prompt = counting(1, 18)
    starts = {}
    for priority in (0, 1):
        bench = Bench(oracle=True, budget=12)
        bench.add(prompt, 3, priority=1)
        bench.turn()
        second = bench.add(prompt, 3, priority=priority)
        bench.run()
        starts[priority] = (bench.chunks_of(second)[0].start, events_of(second, EventKind.WAITED) != [])
        assert bench.emitted[second.id] == oracle_output(prompt, 3)
    assert starts == {0: (12, False), 1: (16, True)}


def test_less_than_a_block_is_not_worth_waiting_for() -> None:
    bench = Bench(oracle=True)
    leader, other = follower_of(bench, [*LONG[:3], 500, 501])
    bench.turn()
    assert other.assigned_step == leader.assigned_step == 0
    bench.run()


def test_a_request_for_prompt_logprobs_does_not_follow() -> None:
    bench = Bench(oracle=True)
    bench.add(LONG, 3)
    (scored,) = bench.add_request(LONG, 3, RowSampling(num_prompt_logprobs=0))
    bench.turn()
    assert scored.assigned_step == 0
    bench.run()


def test_the_prefix_of_a_failed_leader_is_not_shared() -> None:
    bench = Bench(oracle=True)
    leader, follower = follower_of(bench, LONG)
    bench.poison(leader)
    bench.turn()
    assert leader.finish_reason is FinishReason.ERROR and bench.emitted[leader.id] == []
    bench.run()
    assert bench.chunks_of(follower)[0].start == 0
    assert bench.emitted[follower.id] == oracle_output(LONG, 5)


def test_a_follower_that_waited_keeps_its_place_in_the_queue() -> None:
    """One row: the follower came before the other, and is woken when the leader leaves."""
    bench = Bench(oracle=True, rows=2, budget=8)
    bench.add([900], 30)
    leader, follower = follower_of(bench, LONG)
    bench.turn()
    other = bench.add([700], 2)
    bench.run()
    assert bench.finished[follower.id] < bench.finished[other.id]
    assert bench.finished[leader.id] < bench.finished[follower.id]


def test_a_follower_that_others_were_preempted_for_does_not_overtake_the_head_of_the_queue() -> None:
    """It finds its prefix, so one is preempted for it. Then the cache is dropped: it waits for the prefix after all,
    and its row goes to the first in the queue."""
    bench = Bench(oracle=True, rows=2, budget=6, depth=1)
    bench.add(LONG, 1)
    bench.run_out()
    low = bench.add([900], 30, priority=5)
    bench.turn()
    bench.add_request(LONG, 9, RowSampling(num_prompt_logprobs=0))  # computes all of it: 5, 10 and 16 tokens
    bench.turns(2)
    follower = bench.add([*LONG, 500], 5)
    bench.turn()
    assert low.group.num_preemptions == 1 and follower.state is SequenceState.WAITING
    bench.scheduler.abort(low.request.id)
    bench.scheduler.reset_cache()
    bench.turn()
    assert follower.group.waits_for is WaitCause.PREFIX
    head = bench.add([700], 2, priority=-1)
    bench.turn()
    assert bench.scheduler.is_queued(follower.group) and head.state is SequenceState.RUNNING
    bench.run()
    assert bench.emitted[follower.id] == oracle_output([*LONG, 500], 5)


# The index itself.


def leading(order: int, tokens: int, leaders: InflightPrefixes) -> Sequence:
    (sequence,) = group(order, num_tokens=tokens).sequences
    leaders.begin(sequence)
    return sequence


def test_the_leader_with_most_in_common_is_followed() -> None:
    leaders = InflightPrefixes(4)
    short, long = leading(0, 8, leaders), leading(1, 16, leaders)
    waiting = group(2, num_tokens=14)
    assert leaders.find(waiting, waiting.request.prompt, 0) == PrefixWait(long, 12)
    assert leaders.find(waiting, waiting.request.prompt, 8) == PrefixWait(long, 12)
    assert leaders.find(waiting, waiting.request.prompt, 9) is None, "less than a block more than the match"
    leaders.end(long)
    assert leaders.take_ready(9) == []
    assert leaders.find(waiting, waiting.request.prompt, 0) == PrefixWait(short, 8)
    short.num_computed = 8
    assert leaders.find(waiting, waiting.request.prompt, 0) is None, "what is computed is found, not waited for"


def test_followers_are_released_once_by_their_distance() -> None:
    leaders = InflightPrefixes(4)
    leader = leading(0, 16, leaders)
    near, far = group(1), group(2)
    leaders.park(near, PrefixWait(leader, 4))
    leaders.park(far, PrefixWait(leader, 12))
    leader.num_computed = 3
    leaders.advance(leader)
    assert leaders.take_ready(9) == [] and leaders.num_followers == 2
    leader.num_computed = 4
    leaders.advance(leader)
    assert leaders.take_ready(9) == [near] and leaders.take_ready(9) == []
    assert leaders.follows(far) and not leaders.follows(near)
    leaders.forget(far)
    leaders.end(leader)
    assert leaders.take_ready(9) == [], "an aborted follower is not requeued"
    assert list(leaders.followers) == [] and leaders.num_waiting_tokens == 0
    assert leader.request.id == RequestId(0)


def test_ready_followers_are_requeued_in_portions_the_highest_class_first() -> None:
    leaders = InflightPrefixes(4)
    leader = leading(0, 16, leaders)
    low, others, high = group(1, priority=2), [group(order, priority=1) for order in range(2, 6)], group(6)
    for each in (low, *others, high):
        leaders.park(each, PrefixWait(leader, 8))
    leaders.end(leader)
    assert leaders.num_followers == 6, "until they are taken they wait"
    assert leaders.take_ready(2) == [high, others[0]]
    leaders.forget(others[1])
    assert leaders.take_ready(9) == [others[2], others[3], low]


def _planning_work(num_followers: int, *, leader_leaves: bool) -> int:
    """The most calls of one plan or absorb, while many requests wait for the same prefix."""
    bench = Bench(blocks=200, rows=3, budget=8, policy=replace(OPTIMISTIC, order=OrderPolicy(long_prompt=32)))
    leader = bench.add(counting(1, 32), 2)
    bench.turn()
    for _ in range(num_followers):
        bench.add(counting(1, 31), 2)
    scheduler, most = bench.scheduler, 0
    for number in range(6):
        calls = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        plan = scheduler.plan()
        sys.setprofile(None)
        assert plan is not None
        result = bench.recorder.launch(plan).wait()
        planned, calls = calls, 0
        sys.setprofile(count)
        scheduler.absorb(result)
        if leader_leaves and number == 2:
            scheduler.abort(leader.request.id)
        sys.setprofile(None)
        most = max(most, planned, calls)
    return most


@pytest.mark.parametrize("leader_leaves", [False, True])
def test_no_step_processes_all_followers(leader_leaves: bool) -> None:
    few = _planning_work(MAX_PARKED + 50, leader_leaves=leader_leaves)
    many = _planning_work(10 * MAX_PARKED, leader_leaves=leader_leaves)
    assert many <= 1.3 * few
