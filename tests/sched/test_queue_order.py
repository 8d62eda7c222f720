"""Properties of the order: precedence, yielding, and no starvation."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import QuireError
from quire.core.request import RequestGroup
from quire.sched.fairness import WeightedFairShares
from quire.sched.queue import Key, Lane, OrderPolicy, WaitingQueue, aged_class, lane, yields
from tests.sched.waiting_groups import LONG, drain, group, queue_of


def test_a_class_rises_by_one_for_each_ageing_time_waited() -> None:
    assert [aged_class(3, waited_s, 30.0) for waited_s in (-5.0, 0.0, 29.9, 30.0, 95.0)] == [3, 3, 3, 2, 0]
    assert aged_class(3, 1e9, 0.0) == 3


def test_a_long_prompt_yields_until_its_patience_ends() -> None:
    assert [lane(num_tokens, 8) for num_tokens in (7, 8)] == [Lane.SHORT, Lane.LONG]
    assert [yields(Lane.LONG, waited_s, 10.0) for waited_s in (0.0, 9.9, 10.0)] == [True, True, False]
    assert not yields(Lane.SHORT, 0.0, 10.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": {"a": 0.0}},
        {"weights": {"a": nan}},
        {"weights": {"a": inf}},
        {"ageing_s": -1.0},
        {"ageing_s": nan},
        {"lane_patience_s": inf},
        {"long_prompt": 0},
        {"overtaking": -0.1},
        {"overtaking": inf},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(QuireError):
        OrderPolicy(**wrong)  # type: ignore[arg-type]


@given(st.permutations(range(30)), st.sets(st.integers(0, 29)))
def test_with_one_class_tenant_and_lane_it_is_first_come_first_served(pushed: list[int], given_up: set[int]) -> None:
    groups = [group(order) for order in pushed]
    queue = queue_of(groups)
    for each in groups:
        if each.order in given_up:
            queue.discard(each)
    assert drain(queue) == sorted(set(pushed) - given_up)


@given(
    st.lists(
        st.tuples(
            st.integers(-2, 2),
            st.sampled_from("abc"),
            st.sampled_from([1, LONG]),
            st.none() | st.integers(1, 9).map(float),
        ),
        max_size=30,
    ),
    st.booleans(),
    st.sampled_from([0.0, 10.0]),
)
def test_the_queue_drains_in_the_documented_order(
    asked: list[tuple[int, str, int, float | None]], fair: bool, patience_s: float
) -> None:
    shares = WeightedFairShares({"b": 2.0})
    for tenant, cost in (("a", 10.0), ("b", 10.0), ("c", 5.0)):  # b and c are equal by weight
        shares.arrive(tenant)
        shares.charge(tenant, cost)
    groups = [
        group(order, priority=priority, tenant=tenant, num_tokens=num_tokens, deadline_s=deadline_s)
        for order, (priority, tenant, num_tokens, deadline_s) in enumerate(asked)
    ]
    policy = OrderPolicy(fair=fair, ageing_s=0.0, long_prompt=LONG, lane_patience_s=patience_s)

    def key(each: RequestGroup) -> Key:
        return Key(
            each.request.priority,
            shares.service(each.request.tenant) if fair else 0.0,
            len(each.request.prompt) >= LONG and patience_s > 0,
            inf if each.request.deadline_s is None else each.request.deadline_s,
            each.order,
        )

    assert drain(queue_of(groups, policy, shares)) == [each.order for each in sorted(groups, key=key)]


def test_a_preempted_group_returns_to_its_old_place() -> None:
    first, second, third = group(0), group(1), group(2)
    queue = queue_of([first, second, third])
    queue.pop(first)
    queue.push(first, 50.0)
    assert drain(queue, 50.0) == [0, 1, 2]


def test_between_equal_tenants_the_earlier_deadline_goes_first_whenever_it_comes() -> None:
    queue = queue_of([group(0, tenant="a", deadline_s=9.0), group(1, tenant="b")])
    assert queue.candidates(0.0)[0].order == 0
    queue.push(group(2, tenant="b", deadline_s=5.0), 0.0)
    assert drain(queue) == [2, 0, 1]


def test_the_lowest_class_gets_through_a_steady_stream_of_the_highest() -> None:
    low = group(0, priority=4)
    queue = queue_of([low], OrderPolicy(ageing_s=10.0))
    for second in range(1, 100):
        queue.push(group(second, priority=0), float(second))
        head = queue.candidates(float(second))[0]
        queue.pop(head)
        if head is low:
            break
    assert second == 40  # 4 classes of 10 s; then it is of the same class, and older
    assert len(queue) == 1


def test_an_ageing_head_keeps_its_base_class() -> None:
    queue = queue_of([group(0, priority=2)], OrderPolicy(ageing_s=10.0))
    head = queue._head(35.0)
    assert head is not None and head.key.aged_class == -1 and queue.best_class == 2


def test_a_long_prompt_yields_to_chats_and_is_not_starved() -> None:
    long = group(0, num_tokens=LONG)
    queue = queue_of([long], OrderPolicy(long_prompt=LONG, lane_patience_s=10.0))
    admitted = []
    for second in range(20):
        queue.push(group(second + 1), float(second))
        admitted.append(queue.candidates(float(second))[0])
        queue.pop(admitted[-1])
    assert admitted.index(long) == 10


def test_only_a_long_patient_head_is_overtaken_and_only_by_the_short_lane() -> None:
    shares = WeightedFairShares({})
    for tenant in "ab":
        shares.arrive(tenant)
    shares.charge("b", 1.0)
    long = group(0, tenant="a", num_tokens=LONG)
    later = [
        group(1, tenant="a", num_tokens=LONG),
        group(2, tenant="b"),
        group(3, tenant="b"),
        group(4, tenant="b", priority=1),
    ]
    queue = queue_of([long, *later], OrderPolicy(long_prompt=LONG, lane_patience_s=10.0), shares)
    assert list(queue.candidates(9.0)) == [long, later[1]]
    assert list(queue.candidates(10.0)) == [long]


@pytest.mark.parametrize(("weights", "tolerance"), [({}, 0.10), ({"quiet": 3.0}, 0.05), ({"flood": 2.5}, 0.05)])
def test_a_flood_takes_no_more_than_its_share(weights: dict[str, float], tolerance: float) -> None:
    policy = OrderPolicy(weights=weights)
    shares = WeightedFairShares(weights)
    queue = WaitingQueue(policy, shares)
    random = np.random.default_rng(5)
    num_arrived = 0

    def arrive(tenant: str, now_s: float) -> None:
        nonlocal num_arrived
        shares.arrive(tenant)
        queue.push(group(num_arrived, tenant=tenant), now_s)
        num_arrived += 1

    for _ in range(2000):
        arrive("flood", 0.0)
    for _ in range(3):
        arrive("quiet", 0.0)
    for second in range(1500):
        head = queue.candidates(float(second))[0]
        queue.pop(head)
        shares.charge(head.request.tenant, float(random.integers(1, 200)))
        if head.request.tenant == "quiet":
            arrive("quiet", float(second))
        shares.depart(head.request.tenant)
    weight = {tenant: weights.get(tenant, 1.0) for tenant in ("flood", "quiet")}
    for tenant in weight:
        got = shares.total(tenant) / (shares.total("flood") + shares.total("quiet"))
        assert got == pytest.approx(weight[tenant] / sum(weight.values()), rel=tolerance)
