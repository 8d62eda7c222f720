"""The waiting queue against a plain list, and the cost of finding its head."""

import sys
from math import inf
from types import FrameType

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.ids import RequestId
from quire.core.request import Request, RequestGroup
from quire.sched.fairness import WeightedFairShares
from quire.sched.queue import Key, OrderPolicy, WaitingQueue
from tests.sched.waiting_groups import LONG, SAMPLING, group, queue_of


class RoomAgainstList(RuleBasedStateMachine):
    """Everything at once: classes, tenants, lanes, deadlines, charges, preemptions, and a clock that jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = OrderPolicy(weights={"b": 3.0}, ageing_s=5.0, long_prompt=LONG, lane_patience_s=7.0)
        self.shares = WeightedFairShares(self.policy.weights)
        self.queue = WaitingQueue(self.policy, self.shares)
        self.waiting: dict[int, tuple[RequestGroup, float]] = {}
        self.away: list[RequestGroup] = []
        self.num_arrived = 0
        self.now_s = 0.0

    def key(self, each: RequestGroup, aged: int) -> Key:
        request, since_s = each.request, self.waiting[each.order][1]
        patient = self.now_s - since_s < self.policy.lane_patience_s
        deadline_s = inf if request.deadline_s is None else request.deadline_s
        service = self.shares.service(request.tenant)
        return Key(aged, service, len(request.prompt) >= LONG and patient, deadline_s, each.order)

    def head_of_class(self, priority: int) -> tuple[Key, list[RequestGroup]]:
        sequences = [each for each, _ in self.waiting.values() if each.request.priority == priority]
        lanes = [[each for each in sequences if (len(each.request.prompt) >= LONG) is long] for long in (False, True)]
        # Within a lane patience does not count: the head alone stands for it.
        heads = [min(some, key=lambda each: self.key(each, 0)._replace(yields=False)) for some in lanes if some]
        waited_s = max(self.now_s - self.waiting[head.order][1] for head in heads)
        aged = priority - max(0, int(waited_s // self.policy.ageing_s))
        first = min(heads, key=lambda head: self.key(head, aged))
        others = [head for head in heads if head is not first and self.key(first, aged).yields]
        return self.key(first, aged), [first, *others]

    @rule(
        priority=st.integers(0, 2),
        tenant=st.sampled_from("abcd"),
        num_tokens=st.sampled_from([1, LONG]),
        patience_s=st.none() | st.integers(0, 30),
    )
    def arrive(self, priority: int, tenant: str, num_tokens: int, patience_s: int | None) -> None:
        deadline_s = None if patience_s is None else self.now_s + patience_s
        new = group(self.num_arrived, priority=priority, tenant=tenant, num_tokens=num_tokens, deadline_s=deadline_s)
        self.num_arrived += 1
        self.shares.arrive(tenant)
        self.queue.push(new, self.now_s)
        self.waiting[new.order] = (new, self.now_s)

    @rule(seconds=st.integers(0, 9) | st.sampled_from([1_000_000, -1_000_000, -3]))
    def tick(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(tenant=st.sampled_from("abcd"), cost=st.integers(1, 5))
    def charge(self, tenant: str, cost: int) -> None:
        self.shares.charge(tenant, cost)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), gives_up=st.booleans())
    def take_any(self, data: st.DataObject, gives_up: bool) -> None:
        each, since_s = data.draw(st.sampled_from(list(self.waiting.values())))
        del self.waiting[each.order]
        if gives_up:
            self.queue.discard(each)
            self.shares.depart(each.request.tenant)
        else:
            assert self.queue.pop(each) == since_s
            self.away.append(each)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit_head(self) -> None:
        head = self.queue.candidates(self.now_s)[0]
        self.queue.pop(head)
        del self.waiting[head.order]
        self.away.append(head)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        each = self.away.pop(data.draw(st.integers(0, len(self.away) - 1)))
        self.queue.push(each, self.now_s)
        self.waiting[each.order] = (each, self.now_s)

    @invariant()
    def the_next_are_as_documented(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_tokens == sum(len(each.request.prompt) for each, _ in self.waiting.values())
        assert all(each in self.queue for each, _ in self.waiting.values())
        assert not any(each in self.queue for each in self.away)
        candidates = list(self.queue.candidates(self.now_s))
        if not self.waiting:
            assert candidates == [] and self.queue._head(self.now_s) is None
            return
        classes = {each.request.priority for each, _ in self.waiting.values()}
        key, expected = min(map(self.head_of_class, classes), key=lambda head: head[0])
        assert candidates == expected
        head = self.queue._head(self.now_s)
        assert head is not None and head.key.aged_class == key.aged_class


TestRoomAgainstList = RoomAgainstList.TestCase
TestRoomAgainstList.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_aborted_groups_leave_no_entries() -> None:
    stays = [group(0, tenant="a", deadline_s=1.0), group(1, tenant="b")]
    queue = queue_of(stays)
    for order in range(2, 1000):
        new = group(order, tenant="b", deadline_s=float(2000 - order))
        queue.push(new, 0.0)
        queue.discard(new)
        assert queue.candidates(0.0)[0] is stays[0]
    lane = queue._classes[0].short
    (size,) = lane._tenants["b"]._sizes.values()
    assert len(lane._heap) + len(size._places) + len(size._limits) < 250


class _CountedOrder(int):
    """An arrival number that counts its comparisons."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        _CountedOrder.comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        _CountedOrder.comparisons += 1
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


def _work(num_waiting: int) -> tuple[int, int]:
    """Calls and comparisons of 60 rounds of admitting, arriving, giving up and asking, while all age."""
    shares = WeightedFairShares({})
    prompts = [np.zeros(1, dtype=np.int32), np.zeros(LONG, dtype=np.int32)]
    groups = []
    for order in range(num_waiting + 120):
        request = Request(
            RequestId(order),
            prompts[order % 5 == 0],
            4,
            SAMPLING,
            tenant="abcdefgh"[order % 8],
            priority=order % 3,
            deadline_s=1e9 + order if order % 7 == 0 else None,
        )
        groups.append(RequestGroup(request, _CountedOrder(order), 0.0))
    for tenant in "abcdefgh":
        shares.arrive(tenant)
    queue = queue_of(groups[:num_waiting], shares=shares)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    _CountedOrder.comparisons = 0
    before = sys.getprofile()
    sys.setprofile(count)
    for turn in range(60):
        now_s = turn * 7.0
        list(queue.candidates(now_s))
        head = queue.candidates(now_s)[0]
        queue.pop(head)
        shares.charge(head.request.tenant, 3.0)
        queue.discard(groups[num_waiting - 1 - turn])
        queue._head(now_s)
        queue.push(groups[num_waiting + turn], now_s)
    sys.setprofile(before)
    return calls, _CountedOrder.comparisons


def test_the_cost_does_not_grow_with_the_number_waiting() -> None:
    few_calls, few_comparisons = _work(200)
    many_calls, many_comparisons = _work(20_000)
    assert many_calls <= 1.2 * few_calls
    assert many_comparisons <= 3 * few_comparisons  # the logarithm
