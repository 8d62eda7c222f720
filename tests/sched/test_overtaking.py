"""Bounded overtaking: the bound for any arrivals, the order against sums for each prompt, and its cost."""

import sys
from math import inf
from types import FrameType

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.request import RequestGroup
from quire.sched.fairness import WeightedFairShares
from quire.sched.overtaking import OvertakingQueue, QueuePlace, size_class
from quire.sched.queue import OrderPolicy
from quire.sched.reference_checks import _CheckedQueue
from tests.sched.waiting_groups import group

SHARES = st.sampled_from([0.0, 0.05, 0.3, 1.0, 4.0])
WORK = st.integers(1, 60) | st.integers(1, 200_000)


def queue_of(share: float, work: list[int]) -> OvertakingQueue:
    queue = OvertakingQueue(share)
    for order, each in enumerate(work):
        queue.push(QueuePlace(inf, order), each)
    return queue


def drain(queue: OvertakingQueue) -> list[int]:
    orders = []
    while queue:
        orders.append(queue.head().order)
        queue.remove(orders[-1], served=True)
    return orders


def test_a_shorter_prompt_overtakes_while_there_is_room() -> None:
    """A tenth of 1,000, of 1,800 and of 1,850 tokens: 100 may overtake the first, 180 the second, 185 the third."""
    assert drain(queue_of(0.1, [1000, 800, 50, 40, 30])) == [4, 3, 0, 2, 1]
    assert drain(queue_of(0.1, [1000, 800, 101])) == [0, 2, 1]


def test_a_longer_prompt_does_not_overtake_a_shorter_one_that_lacks_room() -> None:
    """The third has no room for itself before the first; so the second, which is longer than it, has its place."""
    assert drain(queue_of(0.01, [5000, 4000, 400, 900])) == [0, 1, 2, 3]


def test_room_that_is_used_up_does_not_come_back() -> None:
    queue = queue_of(0.1, [1000])
    for order in range(1, 50):
        queue.push(QueuePlace(inf, order), 30)
        if queue.head().order == 0:
            break
        queue.remove(order, served=True)
    assert order == 4


def test_what_is_given_up_uses_no_room() -> None:
    queue = queue_of(0.1, [1000])
    for order in range(1, 50):
        queue.push(QueuePlace(inf, order), 30)
        assert queue.head().order == order
        queue.remove(order, served=False)


def test_a_prompt_that_returns_longer_is_overtaken_by_its_old_size() -> None:
    queue = queue_of(0.1, [50, 50])
    queue.remove(0, served=False)
    queue.push(QueuePlace(inf, 0), 1000)
    assert drain(queue) == [1, 0]


def test_sizes_are_in_order_and_four_to_an_octave() -> None:
    sizes = [size_class(work) for work in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert len({size_class(work) for work in range(1024, 2048)}) == 4


@given(st.lists(WORK, max_size=30))
def test_without_a_share_it_is_first_come_first_served(work: list[int]) -> None:
    assert drain(queue_of(0.0, work)) == list(range(len(work)))


@settings(max_examples=100, deadline=None)
@given(SHARES, st.lists(st.tuples(WORK, st.integers(0, 3), st.booleans()), max_size=60))
def test_no_prompt_is_overtaken_by_more_than_its_share(share: float, arrivals: list[tuple[int, int, bool]]) -> None:
    """Each arrival is followed by some that leave: served, or one of any place given up."""
    queue, waiting = OvertakingQueue(share), {}
    allowed: dict[int, float] = {}
    overtaken: dict[int, int] = {}
    for order, (work, num_leaving, gives_up) in enumerate(arrivals):
        allowed[order], overtaken[order] = share * (sum(waiting.values()) + work), 0
        queue.push(QueuePlace(inf, order), work)
        waiting[order] = work
        if gives_up:
            other = min(waiting, key=lambda each: (each * 7919) % 31)
            queue.remove(other, served=False)
            del waiting[other]
        for _ in range(min(num_leaving, len(waiting))):
            served = queue.head().order
            queue.remove(served, served=True)
            taken = waiting.pop(served)
            for earlier in waiting:
                if earlier < served:
                    overtaken[earlier] += taken
                    assert overtaken[earlier] <= allowed[earlier]
        assert len(queue) == len(waiting)


class QueueAgainstSums(RuleBasedStateMachine):
    """The queue of a scheduler with prompts of all sizes, against the slow reference of `quire check`."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = WeightedFairShares({"b": 2.0})
        order = OrderPolicy(weights={"b": 2.0}, ageing_s=9.0, long_prompt=8, lane_patience_s=5.0, overtaking=0.4)
        self.queue = _CheckedQueue(order, self.shares)
        self.away: list[RequestGroup] = []
        self.num_arrived, self.now_s = 0, 0.0

    @rule(
        tenant=st.sampled_from("aab"),
        priority=st.sampled_from([0, 0, 1]),
        num_tokens=st.integers(1, 400),
        within_s=st.none() | st.integers(1, 9),
    )
    def arrive(self, tenant: str, priority: int, num_tokens: int, within_s: int | None) -> None:
        deadline_s = None if within_s is None else self.now_s + within_s
        new = group(self.num_arrived, tenant=tenant, priority=priority, num_tokens=num_tokens, deadline_s=deadline_s,
                    arrived_s=self.now_s)  # fmt: skip
        self.num_arrived += 1
        self.shares.arrive(tenant)
        self.queue.push(new, self.now_s)

    @rule(seconds=st.integers(0, 4))
    def tick(self, seconds: int) -> None:
        self.now_s += seconds

    @precondition(lambda self: len(self.queue) > 0)
    @rule(short=st.booleans(), data=st.data())
    def admit(self, short: bool, data: st.DataObject) -> None:
        found = self.queue.short_head(self.now_s) if short else None
        head = found or data.draw(st.sampled_from(self.queue.candidates(self.now_s)))
        self.queue.pop(head)
        head.was_assigned = True
        self.away.append(head)
        self.shares.charge(head.request.tenant, float(len(head.request.prompt)))

    @precondition(lambda self: self.away)
    @rule(data=st.data(), num_uncached=st.integers(1, 400))
    def come_back(self, data: st.DataObject, num_uncached: int) -> None:
        each = self.away.pop(data.draw(st.integers(0, len(self.away) - 1)))
        each.num_uncached = num_uncached
        self.queue.push(each, self.now_s)

    @invariant()
    def the_next_are_as_in_the_reference(self) -> None:
        if self.queue:
            self.queue.candidates(self.now_s)
            self.queue.short_head(self.now_s)


TestQueueAgainstSums = QueueAgainstSums.TestCase
TestQueueAgainstSums.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def _calls(num_waiting: int) -> int:
    """Of 100 rounds of arriving, asking and leaving."""
    lengths = [512 << order * 7919 % 8 for order in range(num_waiting + 100)]
    queue = queue_of(0.05, lengths[:num_waiting])
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    for turn in range(100):
        queue.push(QueuePlace(inf, num_waiting + turn), lengths[num_waiting + turn])
        queue.remove(queue.head().order, served=True)
    sys.setprofile(before)
    return calls


def test_the_cost_does_not_grow_with_the_number_waiting() -> None:
    assert _calls(20_000) <= 1.2 * _calls(500)
