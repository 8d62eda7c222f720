"""A request not admitted in time expires at once, queued or waiting for a prefix."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.step import FinishReason
from quire.sched.queue import Deadlines, OrderPolicy
from tests.sched.inspection import state_of
from tests.sched.stepping import OPTIMISTIC, Bench, counting
from tests.sched.waiting_groups import group

SOME = st.lists(st.none() | st.integers(0, 30), max_size=12)


@settings(deadline=None)
@given(deadlines=SOME, assigned=st.sets(st.integers(0, 11)), gone=st.sets(st.integers(0, 11)), looks=SOME)
def test_expired_groups_are_returned_once_the_earliest_first(
    deadlines: list[int | None], assigned: set[int], gone: set[int], looks: list[int | None]
) -> None:
    groups = [group(order, deadline_s=deadline_s) for order, deadline_s in enumerate(deadlines)]
    heap = Deadlines()
    for each in groups:
        heap.watch(each)
        each.was_assigned = each.order in assigned
        if each.order in gone:
            each.sequences[0].finish(FinishReason.ABORT)
    waiting = [each for each in groups if each.order not in assigned | gone and each.request.deadline_s is not None]
    for now_s in (look for look in looks if look is not None):
        late = sorted((each.request.deadline_s or 0, each.order) for each in waiting)
        late = [(deadline_s, order) for deadline_s, order in late if deadline_s <= now_s]
        assert [each.order for each in heap.expire(now_s)] == [order for _, order in late]
        waiting = [each for each in waiting if (each.request.deadline_s or 0) > now_s]


def test_admitted_and_aborted_groups_leave_no_entries() -> None:
    heap = Deadlines()
    heap.watch(group(0, deadline_s=5.0))
    for order in range(1, 1000):
        new = group(order, deadline_s=float(2000 - order))
        heap.watch(new)
        new.was_assigned = order % 2 == 0
        if order % 2:
            new.sequences[0].finish(FinishReason.ABORT)
    assert len(heap) < 150
    assert [each.order for each in heap.expire(5.0)] == [0]


def test_a_follower_expires_in_the_next_plan_after_its_deadline() -> None:
    """It waits for a long prompt, which leaves to others what they need of a step."""
    bench = Bench(budget=6, rows=4, policy=replace(OPTIMISTIC, order=OrderPolicy(long_prompt=24)))
    leader = bench.add(counting(1, 24), 4)
    bench.turn()
    follower = bench.add(counting(1, 23), 4, deadline_s=5.0)
    bench.turn()
    assert state_of(bench.scheduler).inflight_prefixes.follows(follower.group)
    bench.now_s = 5.0
    absorbed = bench.turn()
    assert absorbed is not None and [over.sequence for over in absorbed.finished] == [follower.id]
    assert follower.finish_reason is FinishReason.EXPIRED and not leader.finished
    bench.run()


def test_a_waiting_group_still_expires_after_many_others() -> None:
    heap = Deadlines()
    stays = [group(0, deadline_s=9.0), group(1), group(2, deadline_s=5.0)]
    for each in stays:
        heap.watch(each)
    for order in range(3, 200):
        new = group(order, deadline_s=float(order))
        heap.watch(new)
        new.sequences[0].finish(FinishReason.ABORT)
    assert heap.expire(4.0) == []
    assert heap.expire(9.0) == [stays[2], stays[0]]
