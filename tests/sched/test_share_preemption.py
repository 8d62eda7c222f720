"""Rows are taken back from a tenant above its share when one below its share waits, and only then."""

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.request import Sequence, SequenceState
from quire.core.step import FinishReason
from quire.sched.policy import CHUNKED, STATIC, Policy
from quire.sched.queue import OrderPolicy
from tests.sched.stepping import OPTIMISTIC, Bench, counting, oracle_output

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
AT_ONCE = OrderPolicy(share_patience_s=0.0)
LENGTH = 60


def policy_of(order: OrderPolicy = AT_ONCE, **also: object) -> Policy:
    return replace(OPTIMISTIC, order=order, **also)  # type: ignore[arg-type]


def flood(bench: Bench, count: int, tenant: str = "flood", num_prompt: int = 4, **also: object) -> list[Sequence]:
    first = 50 * len(bench.emitted) + 1
    return [
        bench.add(counting(first + 20 * i, num_prompt), LENGTH, tenant=tenant, **also)  # type: ignore[arg-type]
        for i in range(count)
    ]


def rows_of(bench: Bench) -> Counter[str]:
    running = [s for group in bench.scheduler.running_groups() for s in group.sequences]
    return Counter(s.request.tenant for s in running if s.state is SequenceState.RUNNING)


@DEPTHS
def test_a_tenant_below_its_share_gets_a_row_of_one_above(depth: int) -> None:
    bench = Bench(blocks=400, rows=4, depth=depth, policy=policy_of(), oracle=True)
    hostile = flood(bench, 6)
    bench.turns(5)
    assert rows_of(bench) == {"flood": 4}
    quiet = bench.add([7, 8], 3, tenant="quiet")
    bench.turns(depth + 2)
    assert quiet.state is SequenceState.RUNNING
    counters = bench.scheduler.counters
    assert (counters.preemptions, counters.share_preemptions, counters.class_preemptions) == (1, 1, 0)
    bench.run()
    for sequence in hostile:
        assert bench.emitted[sequence.id] == oracle_output(sequence.request.prompt.tolist(), LENGTH)
    assert bench.emitted[quiet.id] == oracle_output([7, 8], 3)


@DEPTHS
def test_two_floods_settle_at_their_shares_and_stay_there(depth: int) -> None:
    """Each row changes hands once: neither tenant preempts the other back."""
    bench = Bench(
        blocks=4000, rows=8, depth=depth, policy=policy_of(OrderPolicy(weights={"b": 3.0}, share_patience_s=0))
    )
    flood(bench, 30, "a")
    bench.turns(4)
    flood(bench, 30, "b")
    bench.turns(6 * (depth + 2))
    assert rows_of(bench) == {"a": 2, "b": 6}
    assert bench.scheduler.counters.share_preemptions == 6
    bench.turns(LENGTH // 2)
    assert rows_of(bench) == {"a": 2, "b": 6}
    assert bench.scheduler.counters.share_preemptions == 6


def test_a_row_that_is_part_of_no_share_stays_where_it_is() -> None:
    """Three rows, two tenants: a tenant with one row has its share in whole rows."""
    bench = Bench(blocks=4000, rows=3, policy=policy_of())
    flood(bench, 9, "a")
    bench.turns(4)
    flood(bench, 9, "b")
    bench.turns(LENGTH // 2)
    assert rows_of(bench) == {"a": 2, "b": 1}
    assert bench.scheduler.counters.share_preemptions == 1


def test_a_share_that_shrinks_is_seen_although_no_row_changed() -> None:
    """Of 8 the weight 6 is three rows of four, of 9 it is two."""
    bench = Bench(blocks=400, rows=4, policy=policy_of(OrderPolicy(weights={"a": 6.0}, share_patience_s=0.0)))
    flood(bench, 3, "a")
    flood(bench, 1, "b")
    bench.turns(4)
    third = bench.add([7], 3, tenant="c")
    bench.turns(4)
    assert bench.num_preemptions == 0
    bench.add([8], 3, tenant="d")
    bench.turns(2)
    assert third.row is not None and bench.scheduler.counters.share_preemptions == 1


def test_only_the_tenant_above_its_share_gives_and_the_least_lost_work_goes() -> None:
    bench = Bench(blocks=400, rows=6, policy=policy_of(), budget=200)
    modest = [bench.add([i + 900], LENGTH, tenant="modest") for i in range(2)]  # the least to lose of all
    long, short = flood(bench, 2, num_prompt=15), flood(bench, 2, num_prompt=3)
    bench.turns(2)
    assert rows_of(bench) == {"modest": 2, "flood": 4}
    quiet = bench.add([7], 3, tenant="quiet")
    bench.turns(2)
    assert quiet.row is not None
    assert [s.group.num_preemptions for s in (*modest, *long)] == [0, 0, 0, 0]
    assert sorted(s.group.num_preemptions for s in short) == [0, 1]


def test_rows_of_lower_classes_that_go_anyway_are_no_spare_rows() -> None:
    """Nine rows, three tenants. x has two rows of a lower class, which go first, and then its share of three: though
    these have the least to lose, the third row comes from z, which has four."""
    bench = Bench(blocks=400, rows=9, policy=policy_of(), budget=200)
    low = [bench.add([i + 800], LENGTH, tenant="x", priority=1) for i in range(2)]
    of_x, of_z = flood(bench, 3, "x", num_prompt=3), flood(bench, 4, "z", num_prompt=15)
    bench.turns(2)
    assert rows_of(bench) == {"x": 5, "z": 4}
    waiting = bench.add_group([7], 3, 3, tenant="y")
    bench.turns(2)
    assert all(each.row is not None for each in waiting)
    assert [each.group.num_preemptions for each in (*low, *of_x)] == [1, 1, 0, 0, 0]
    assert sum(each.group.num_preemptions for each in of_z) == 1


def test_a_row_is_taken_that_frees_enough_blocks() -> None:
    """The flood can spare one row of three. The one with the least to lose frees one block too few: the other goes."""
    bench = Bench(blocks=14, block_size=4, rows=4, policy=policy_of(), budget=200)
    large, small = bench.add(counting(1, 18), 12, tenant="flood"), bench.add(counting(300, 10), 12, tenant="flood")
    older = bench.add(counting(500, 10), 12, tenant="flood")
    bench.turns(2)
    assert [len(bench.table(each)) for each in (large, small, older)] == [5, 3, 3]
    quiet = bench.add(counting(700, 26), 3, tenant="quiet")  # 7 blocks, and three are free
    bench.turn()
    assert quiet.state is SequenceState.RUNNING
    assert [each.group.num_preemptions for each in (large, small, older)] == [1, 0, 0]
    bench.run()


def test_a_search_is_repeated_when_a_waiting_request_needs_fewer_rows() -> None:
    """Two of its three rows can be taken back; then one of its sequences is stopped. The others have been granted
    blocks meanwhile, so that no fewer are missing than before."""
    order = OrderPolicy(weights={"quiet": 3.0}, share_patience_s=0.0)
    bench = Bench(blocks=400, rows=4, policy=policy_of(order, max_preemptions=1))
    immune, other = flood(bench, 2), flood(bench, 2)
    for sequence in immune:
        sequence.group.num_preemptions = 1
    bench.turns(2)
    first, *others = bench.add_group([7], 3, 3, tenant="quiet")
    bench.turns(8)  # no period of searches begins soon after
    assert bench.num_preemptions == 0 and first.row is None
    assert bench.scheduler.finish(others[0], FinishReason.STOP)
    bench.turns(2)
    assert first.state is SequenceState.RUNNING
    assert [each.group.num_preemptions for each in (*immune, *other)] == [1, 1, 1, 1]


@pytest.mark.parametrize(("count", "num_taken"), [(3, 3), (4, 0)])
def test_a_group_gets_its_rows_if_all_of_them_are_within_the_share(count: int, num_taken: int) -> None:
    """Three of seven rows. A group of four waits until rows come free by themselves, though four could be spared."""
    bench = Bench(blocks=400, rows=7, policy=policy_of())
    flood(bench, 7)
    bench.turns(4)
    first, *_ = bench.add_group([7], LENGTH, count, tenant="quiet")
    bench.turns(6)
    assert (first.row is not None, bench.scheduler.counters.share_preemptions) == (num_taken > 0, num_taken)


def test_a_row_is_waited_for_before_it_is_taken() -> None:
    bench = Bench(blocks=400, rows=2, policy=policy_of(OrderPolicy()))
    flood(bench, 4)
    bench.turns(2)
    quiet = bench.add([7], 3, tenant="quiet")
    bench.turns(5)
    bench.now_s = 0.09
    bench.turns(5)
    assert bench.num_preemptions == 0
    bench.now_s = 0.11
    bench.turns(2)
    assert quiet.row is not None and bench.num_preemptions == 1


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_limit_of_preemptions_holds(most: int) -> None:
    """Within a time slice, which does not end here."""
    bench = Bench(blocks=400, rows=2, policy=policy_of(max_preemptions=most))
    hostile = flood(bench, 2)
    for i in range(8):
        bench.turns(3)
        bench.add([700 + i], 1, tenant="quiet")
    bench.run()
    assert max(s.group.num_preemptions for s in hostile) == most
    assert bench.scheduler.counters.share_preemptions == 2 * most


@pytest.mark.parametrize("priority", [0, 1])
def test_a_request_of_all_rows_that_was_preempted_too_often_keeps_them_for_a_time_slice(priority: int) -> None:
    """The others are of its class, or of a higher one. It loses its rows once a slice, and ends all the same."""
    order = OrderPolicy(share_patience_s=0.0, share_slice_s=5.0, ageing_s=0.0)
    bench = Bench(blocks=400, rows=4, policy=policy_of(order, max_preemptions=0), oracle=True)
    bench.now_s = 1.0
    large = bench.add_group([7, 8, 9], 30, 4, tenant="large", priority=priority)
    bench.turns(3)
    quiet = [bench.add([20 + i], 2, tenant="quiet") for i in range(2)]
    bench.now_s = 5.9
    bench.turns(2 * bench.scheduler.kv.block_size)
    assert bench.num_preemptions == 0 and rows_of(bench) == {"large": 4}
    bench.now_s = 6.0
    bench.turns(bench.scheduler.kv.block_size + 2)
    assert bench.num_preemptions == 1 and all(each.id in bench.finished for each in quiet)
    bench.turns(3)
    assert rows_of(bench) == {"large": 4}
    late = bench.add([30], 2, tenant="quiet")
    bench.now_s = 10.9
    bench.turns(bench.scheduler.kv.block_size + 2)
    assert bench.num_preemptions == 1, "the next slice began when its tokens were computed again"
    bench.now_s = 11.0
    bench.turns(bench.scheduler.kv.block_size + 2)
    assert bench.num_preemptions == 2
    bench.run()
    assert [bench.emitted[each.id] for each in large] == [oracle_output([7, 8, 9], 30, each.index) for each in large]
    assert bench.emitted[late.id] == oracle_output([30], 2)


def test_the_time_slice_of_beams_ends_though_they_have_a_new_token_in_every_step() -> None:
    order = OrderPolicy(share_patience_s=0.0, share_slice_s=5.0, ageing_s=0.0)
    bench = Bench(blocks=400, rows=4, policy=policy_of(order, max_preemptions=0), oracle=True)
    beams = bench.add_beams([7, 8, 9], 60, 4, tenant="large")
    quiet = bench.add([20], 2, tenant="quiet")
    for second in range(30):
        bench.now_s = float(second)
        bench.turn()
    assert quiet.id in bench.finished and beams[0].group.num_preemptions == 1
    bench.run()
    assert all(beam.id in bench.finished for beam in beams)


def test_a_slice_begins_although_a_sibling_ended_before_it_had_computed_its_tokens() -> None:
    """It leaves its row to another tenant, which is due a second one."""
    order = OrderPolicy(share_patience_s=0.0, share_slice_s=1.0, ageing_s=0.0)
    policy = policy_of(order, max_preemptions=1, regime=CHUNKED)
    bench = Bench(blocks=400, rows=4, budget=5, policy=policy, oracle=True)
    *others, last = bench.add_group([7, 8, 9], 90, 4, tenant="large")
    bench.turns(8)
    bench.add([30], 1, tenant="large", priority=-1)  # takes all rows
    while not last.group.num_preemptions or last.row is None:
        bench.turn()
    while not all(each.caught_up for each in others):
        bench.turn()
    assert last.row is not None and not last.caught_up
    assert bench.scheduler.finish(last, FinishReason.STOP)
    bench.add([20, 21], 90, tenant="quiet")
    second = bench.add([22], 2, tenant="quiet")
    bench.now_s = 2.0
    bench.turns(bench.scheduler.kv.block_size + 8)
    assert second.id in bench.finished


def test_within_its_share_a_request_that_was_preempted_too_often_keeps_its_rows() -> None:
    """Six rows, three tenants. No slice is left to any; the two rows that are due come from the one with four, though
    the other is of a lower class."""
    order = OrderPolicy(share_patience_s=0.0, share_slice_s=0.0)
    bench = Bench(blocks=400, rows=6, policy=policy_of(order, max_preemptions=0))
    modest = bench.add_group([7, 8, 9], LENGTH, 2, tenant="modest", priority=1)
    flood(bench, 4, "flood", num_prompt=15)
    bench.turns(3)
    flood(bench, 2, "quiet")
    bench.turns(bench.scheduler.kv.block_size + 2)
    assert rows_of(bench) == {"modest": 2, "flood": 2, "quiet": 2}
    assert modest[0].group.num_preemptions == 0


@pytest.mark.parametrize(
    ("policy", "tenants", "priority"),
    [
        (policy_of(replace(AT_ONCE, fair=False)), ("flood", "quiet"), 0),
        (policy_of(regime=STATIC), ("flood", "quiet"), 0),
        (policy_of(), ("flood", "flood"), 0),
        (policy_of(), ("flood", "quiet"), 1),  # a lower class takes no row, whatever its share
    ],
    ids=["unfair", "sealed", "one tenant", "lower class"],
)
def test_nothing_is_taken(policy: Policy, tenants: tuple[str, str], priority: int) -> None:
    bench = Bench(blocks=400, rows=2, policy=policy, budget=200)
    flood(bench, 2, tenants[0])
    bench.turns(2)
    bench.add([7], 3, tenant=tenants[1], priority=priority)
    bench.run()
    assert bench.num_preemptions == 0


@pytest.mark.parametrize(("count", "num_preemptions"), [(1, 1), (2, 2), (3, 0)])
def test_a_group_takes_rows_within_the_share_or_none(count: int, num_preemptions: int) -> None:
    """A larger one would be above its share itself: it waits for rows that come free."""
    bench = Bench(blocks=400, rows=4, policy=policy_of())
    flood(bench, 4)
    bench.turns(2)
    bench.add_group([7], 3, count, tenant="quiet")
    bench.turns(5)
    assert bench.num_preemptions == num_preemptions
    bench.run()


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 8),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=6),
    st.integers(0, 2),
)
def test_tenants_settle_at_their_shares(num_rows: int, weights: Many[float], depth: int) -> None:
    """One after another comes with more than enough. In the end none is below its share in whole rows, which is at
    least one, unless all others have no more than their own."""
    names = [f"t{i}" for i in range(len(weights))]
    order = OrderPolicy(weights=dict(zip(names, weights, strict=True)), share_patience_s=0.0)
    bench = Bench(blocks=4000, rows=num_rows, depth=depth, policy=policy_of(order, max_preemptions=99), budget=200)
    for name in names:
        for i in range(num_rows):
            bench.add([1 + i], 200, tenant=name)
        bench.turns(6)
    bench.turns(num_rows * (depth + 3))
    held, num_before = rows_of(bench), bench.num_preemptions
    assert sum(held.values()) == num_rows
    shares = {name: max(1, int(num_rows * weight / sum(weights) + 1e-6)) for name, weight in order.weights.items()}
    below = [name for name in names if held[name] < shares[name]]
    above = [name for name in names if held[name] > shares[name]]
    assert not below or not above, (held, shares)
    bench.turns(10)
    assert bench.num_preemptions == num_before, "it settles"
