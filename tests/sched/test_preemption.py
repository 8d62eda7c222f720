"""Preemption: what waits, what is preempted, in favour of what, and how often."""

import sys
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest

from quire.core.request import EventKind, Sequence, SequenceState, WaitCause
from quire.core.step import FinishReason
from quire.sched.policy import Policy
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit
from tests.sched.stepping import NEVER, OPTIMISTIC, Bench, counting, events_of, oracle_output, toy_output

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


# Blocks.


@DEPTHS
def test_pressure_loses_nothing_and_never_touches_the_first(depth: int) -> None:
    bench = Bench(blocks=6, block_size=4, rows=3, depth=depth, oracle=True)
    prompts = [[i + 1] * 4 for i in range(3)]
    sequences = [bench.add(prompt, 16) for prompt in prompts]
    bench.run()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.emitted[sequence.id] == oracle_output(prompt, 16)
    groups = [sequence.group for sequence in sequences]
    assert groups[0].num_preemptions == 0, "the first of all always advances"
    assert groups[2].num_preemptions > 0
    assert all(group.num_preemptions <= OPTIMISTIC.max_preemptions for group in groups)
    assert bench.num_preemptions == sum(group.num_preemptions for group in groups)


def test_the_least_lost_work_is_preempted() -> None:
    """The second has computed less than the third when blocks run out: it goes, though it came earlier."""
    bench = Bench(blocks=9, block_size=4, rows=3)
    bench.add([1] * 7, 30)
    small = bench.add([2] * 4, 20)
    large = bench.add([3] * 8, 20)
    while bench.num_preemptions == 0:
        bench.turn()
    assert (small.group.num_preemptions, large.group.num_preemptions) == (1, 0)
    (event,) = events_of(small, EventKind.PREEMPTED)
    assert event.tokens == 4 + len(bench.emitted[small.id]) - 1
    bench.run()


def test_the_lost_work_of_a_group_is_that_of_all_its_rows() -> None:
    """Each of its two rows has computed less than the single one, both together more."""
    bench = Bench(blocks=14, block_size=4, rows=4)
    bench.add([1] * 7, 30)
    first, _ = bench.add_group([2] * 8, 20, 2)
    single = bench.add([3] * 12, 20)
    while bench.num_preemptions == 0:
        bench.turn()
    assert (first.group.num_preemptions, single.group.num_preemptions) == (0, 1)
    bench.run()


def test_tokens_of_a_preempted_sequence_are_kept() -> None:
    bench = Bench(blocks=6, block_size=2, rows=2)
    bench.add([1, 1], 9)
    young = bench.add([2, 2], 9)
    while young.group.num_preemptions == 0:
        bench.turn()
    assert young.tokens.tolist() == [2, 2, *bench.emitted[young.id]]
    bench.run()


def test_law_b_a_denied_row_waits_if_blocks_are_on_their_way_back() -> None:
    bench = Bench(blocks=5, block_size=8, rows=3, depth=2, oracle=True)
    ending, going_on = bench.add([1] * 8, 9), bench.add([2] * 8, 17)
    bench.turns(5)
    bystander = bench.add([3], 8)
    bench.run()
    paused = [plan for plan in bench.plans if plan.pauses]
    assert paused and all(plan.num_decoding > 0 for plan in paused)
    assert bench.num_preemptions == 0
    assert bench.emitted[going_on.id] == oracle_output([2] * 8, 17)
    assert bench.emitted[ending.id] == oracle_output([1] * 8, 9)
    assert bench.emitted[bystander.id] == oracle_output([3], 8)


@DEPTHS
def test_law_c_a_step_in_which_a_row_was_denied_a_block_admits_no_request(depth: int) -> None:
    bench = Bench(blocks=6, block_size=4, rows=3, depth=depth)
    for i in range(6):
        bench.add([i + 1] * 4, 16)
    num_pressed = 0
    while not bench.scheduler.idle:
        num_preemptions, num_plans = bench.num_preemptions, len(bench.plans)
        bench.turn()
        if len(bench.plans) > num_plans and (bench.plan.pauses or bench.num_preemptions > num_preemptions):
            num_pressed += 1
            assert not bench.plan.starts
            assert bench.scheduler.wait_cause in (WaitCause.PRESSURE, None)
    assert num_pressed > 0


def test_the_whole_length_is_reserved_after_too_many_preemptions() -> None:
    bench = Bench(blocks=7, block_size=4, rows=2, policy=replace(OPTIMISTIC, max_preemptions=1))
    bench.add([1] * 4, 17)
    young = bench.add([2] * 4, 17)  # 20 positions: 5 blocks
    while not young.finished:
        bench.turn()
        if young.state is SequenceState.RUNNING and young.row is not None:
            whole = len(bench.table(young)) + bench.scheduler.kv.tables.reserved[young.row]
            assert (whole == 5) == (young.group.num_preemptions == 1 or len(bench.table(young)) == 5)
    assert young.group.num_preemptions == 1
    bench.run()
    assert bench.emitted[young.id] == toy_output([2] * 4, 17)


# Classes.


def three_low(bench: Bench) -> list[Sequence]:
    """Three of a low class: the second has least to lose."""
    return [bench.add(counting(100 * i, length), 30, priority=5) for i, length in ((1, 8), (2, 4), (3, 12))]


@DEPTHS
def test_a_higher_class_preempts_the_lowest_class_with_least_to_lose(depth: int) -> None:
    bench = Bench(rows=3, depth=depth, oracle=True)
    low = three_low(bench)
    bench.turns(depth + 2)
    high = bench.add([50, 51], 4)
    bench.turn()
    assert [each.group.num_preemptions for each in low] == [0, 1, 0]
    assert bench.scheduler.counters.class_preemptions == 1
    assert events_of(low[1], EventKind.PREEMPTED)[0].other == high.request.id
    assert (high.state is SequenceState.RUNNING) == (depth == 0), "admitted at once if no step is in flight"
    bench.run()
    assert bench.num_preemptions == 1, "it is not preempted back"
    assert bench.finished[high.id] < bench.finished[low[0].id]
    for i, length in ((1, 8), (2, 4), (3, 12)):
        assert bench.emitted[low[i - 1].id] == oracle_output(counting(100 * i, length), 30)


def test_a_row_freed_by_preemption_goes_to_no_other_request() -> None:
    """At depth 2 the row comes back two steps later: a later request of a still higher class waits."""
    bench = Bench(rows=3, depth=2, oracle=True)
    three_low(bench)
    bench.turns(4)
    high = bench.add([50, 51], 4)
    bench.turn()
    higher = bench.add([60, 61], 4, priority=-1)
    bench.run()
    assert bench.finished[high.id] < bench.finished[higher.id] + 3
    assert high.group.num_preemptions == 0


def test_two_ageing_classes_do_not_preempt_each_other_for_ever() -> None:
    policy = Policy(order=OrderPolicy(ageing_s=1.0), overcommit=Overcommit.NEVER)
    bench = Bench(rows=1, oracle=True, policy=policy)
    low = bench.add([7], 20, priority=1)
    bench.turns(2)
    high = bench.add([8], 20)
    while not bench.scheduler.idle:
        bench.now_s += 5.0
        bench.turn()
    assert bench.num_preemptions == 1
    assert bench.finished[high.id] < bench.finished[low.id]


def test_a_preempted_request_ages_from_its_preemption() -> None:
    """It came 100 s ago and ran: it has not waited, so both of the higher class go first."""
    bench = Bench(rows=1, policy=replace(OPTIMISTIC, order=OrderPolicy(ageing_s=10.0)))
    low = bench.add([7], 6, priority=1)
    bench.turns(2)
    bench.now_s = 100.0
    highs = [bench.add([8], 2), bench.add([9], 2)]
    bench.run()
    assert low.group.num_preemptions == bench.num_preemptions == 1
    assert list(bench.finished) == [highs[0].id, highs[1].id, low.id]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_request_is_preempted_more_often_than_the_policy_allows(most: int) -> None:
    bench = Bench(rows=1, oracle=True, policy=replace(OPTIMISTIC, max_preemptions=most))
    low = bench.add([7, 8, 9], 12, priority=1)
    highs = []
    for i in range(4):
        bench.turns(2)
        highs.append(bench.add([20 + i], 1))
    bench.run()
    assert low.group.num_preemptions == most == bench.scheduler.counters.class_preemptions
    assert sum(bench.finished[high.id] < bench.finished[low.id] for high in highs) == most
    assert bench.emitted[low.id] == oracle_output([7, 8, 9], 12)


def test_an_equal_class_does_not_preempt() -> None:
    bench = Bench(rows=1)
    first, second = bench.add([7], 6), bench.add([8], 2)
    bench.run()
    assert bench.num_preemptions == 0 and bench.finished[first.id] < bench.finished[second.id]


def test_a_class_takes_blocks_too() -> None:
    """6 of 8 blocks are reserved for the low class, the high one needs 4."""
    bench = Bench(blocks=8, rows=4, policy=NEVER)
    low = bench.add([1] * 4, 21, priority=1)
    bench.turn()
    high = bench.add([2] * 4, 13)
    bench.turn()
    assert low.group.num_preemptions == 1 and high.state is SequenceState.RUNNING
    bench.run()
    assert bench.emitted[low.id] == toy_output([1] * 4, 21)


def test_a_class_takes_blocks_even_if_what_is_free_is_its_own_prefix() -> None:
    """3 of 8 blocks are to be had, but 2 of them hold the prefix that the high one needs beside 2 more."""
    bench = Bench(blocks=8, rows=4, policy=NEVER, oracle=True)
    bench.add(counting(1, 8), 1)
    bench.run_out()
    low = bench.add([200] * 4, 17, priority=1)
    bench.turn()
    high = bench.add([*counting(1, 8), 5, 6], 4)
    bench.turn()
    assert low.group.num_preemptions == 1 and high.state is SequenceState.RUNNING
    bench.run()


def test_no_preemption_for_a_request_that_would_wait_for_a_prefix() -> None:
    """The first computes 16 tokens, six at most in a step. One of its class asks the same, and no row is free."""
    bench = Bench(oracle=True, rows=2, budget=6)
    low = bench.add([900], 30, priority=5)
    bench.turn()
    first = bench.add(counting(1, 16), 9)
    bench.turn()
    second = bench.add(counting(1, 16), 2)
    while first.num_computed < 12:
        bench.turn()
        assert low.group.num_preemptions == 0
    while second.state is SequenceState.WAITING:
        bench.turn()
    assert low.group.num_preemptions == 1 and bench.chunks_of(second)[0].start >= 12
    bench.run()
    assert bench.emitted[second.id] == oracle_output(counting(1, 16), 2)


def test_free_rows_reduce_the_number_of_victims() -> None:
    """Two rows of a lower class run and one row is free: a group of two needs one more."""
    bench = Bench(rows=3)
    low = [bench.add([number], 9, priority=5) for number in (1, 2)]
    bench.turn()
    sequences = bench.add_group([3, 4], 2, 2)
    bench.run()
    assert sorted(sequence.group.num_preemptions for sequence in low) == [0, 1]
    assert all(bench.finished[member.id] < bench.finished[low[0].id] for member in sequences)


def test_no_preemption_if_it_would_not_help() -> None:
    """The first is of the same class and stays: with what the low one frees there is still too little."""
    bench = Bench(blocks=8, rows=4, policy=NEVER)
    bench.add([1] * 4, 17)  # 5 blocks
    low = bench.add([2] * 4, 5, priority=1)  # 2 blocks
    bench.turn()
    high = bench.add([3] * 4, 13)  # 4 blocks
    bench.turn()
    assert low.group.num_preemptions == 0 and high.state is SequenceState.WAITING
    assert high.group.waits_for is WaitCause.BLOCKS
    bench.run()


# The queue.


def test_no_request_overtakes_a_short_head_that_lacks_blocks() -> None:
    bench = Bench(blocks=10, rows=4, policy=NEVER)
    bench.add([1] * 4, 21)  # 6 of 10 blocks
    bench.turn()
    head, behind = bench.add([2] * 12, 9), bench.add([3] * 4, 5)  # 5 blocks and 2
    bench.turn()
    assert head.state is behind.state is SequenceState.WAITING
    assert head.group.waits_for is WaitCause.BLOCKS
    bench.run()
    assert events_of(head, EventKind.ADMITTED)[0].step <= events_of(behind, EventKind.ADMITTED)[0].step


@pytest.mark.parametrize(("patience_s", "overtakes"), [(100.0, True), (0.0, False)])
def test_only_the_short_lane_overtakes_a_long_head_that_has_patience(patience_s: float, overtakes: bool) -> None:
    """Tenant x was served already, so that the long prompt of y is the head. It lacks blocks."""
    order = OrderPolicy(long_prompt=16, lane_patience_s=patience_s, ageing_s=0.0, share_patience_s=100.0)
    bench = Bench(blocks=16, rows=6, policy=Policy(order=order, overcommit=Overcommit.NEVER))
    bench.add([1] * 4, 37, tenant="x")  # 10 of 16 blocks
    bench.turn()
    head = bench.add([2] * 24, 5, tenant="y")  # 7 blocks
    long = bench.add([3] * 16, 5, tenant="x")  # 5 blocks: they would fit
    short = bench.add([4] * 4, 5, tenant="x")  # 2 blocks
    bench.now_s = 1.0
    bench.turn()
    assert head.state is SequenceState.WAITING and head.group.waits_for is WaitCause.BLOCKS
    assert long.state is SequenceState.WAITING, "a long prompt does not overtake"
    assert (short.state is SequenceState.RUNNING) == overtakes
    bench.run()


def test_a_request_not_admitted_before_its_deadline_expires() -> None:
    bench = Bench(rows=1)
    bench.add([1], 20)
    bench.turn()
    late = bench.add([2], 3, deadline_s=5.0)
    bench.now_s = 4.9
    bench.turn()
    assert not late.finished
    bench.now_s = 5.0
    absorbed = bench.turn()
    assert absorbed is not None and [over.sequence for over in absorbed.finished] == [late.id]
    assert late.finish_reason is FinishReason.EXPIRED and bench.emitted[late.id] == []
    bench.run()


def test_a_request_admitted_before_its_deadline_has_met_it_for_good() -> None:
    bench = Bench(rows=1, oracle=True)
    low = bench.add([7], 6, priority=1, deadline_s=5.0)
    bench.turns(2)
    bench.add([8], 6)
    bench.turn()
    assert low.state is SequenceState.WAITING
    bench.now_s = 9.0
    bench.run()
    assert bench.emitted[low.id] == oracle_output([7], 6)


def test_of_equals_the_earlier_deadline_goes_first() -> None:
    bench = Bench(rows=1)
    bench.add([1], 3)
    bench.turn()
    calm, urgent = bench.add([2], 2, deadline_s=900.0), bench.add([3], 2, deadline_s=800.0)
    bench.run()
    assert bench.finished[urgent.id] < bench.finished[calm.id]


@pytest.mark.parametrize("most", [0, 3])
def test_a_failed_victim_search_is_not_repeated_until_rows_change(most: int) -> None:
    """No group may be preempted, or all together do not suffice: every row is assigned, and 10 are needed."""

    def work(num_rows: int) -> tuple[int, int]:
        bench = Bench(
            blocks=400, block_size=64, rows=num_rows, policy=replace(OPTIMISTIC, max_preemptions=most), budget=999
        )
        for i in range(num_rows):
            bench.add([i + 1], 50, priority=1 if most == 0 or i < 3 else 0)
        bench.turns(2)
        bench.add_group([900], 5, 10)
        bench.turn()
        calls = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        plan = bench.scheduler.plan()
        sys.setprofile(None)
        assert plan is not None
        bench.scheduler.absorb(bench.recorder.launch(plan).wait())
        return calls, bench.scheduler.counters.class_preemptions

    (few, none), (many, also_none) = work(16), work(128)
    assert none == also_none == 0
    assert many <= 1.1 * few


def test_a_failed_victim_search_is_repeated_after_a_release() -> None:
    """Two of the low class may not be preempted any more; when one is done, the other's kind gives way."""
    bench = Bench(rows=2, policy=replace(OPTIMISTIC, max_preemptions=1))
    first, second = bench.add([7], 6, priority=1), bench.add([8], 30, priority=1)
    first.group.num_preemptions = second.group.num_preemptions = 1
    bench.turn()
    pair = bench.add_group([9], 4, 2)
    bench.turns(3)
    assert pair[0].state is SequenceState.WAITING
    second.group.num_preemptions = 0
    bench.turn()
    assert pair[0].state is SequenceState.WAITING, "no row was assigned or released"
    while not first.finished:
        bench.turn()
    bench.turns(2)
    assert pair[0].state is SequenceState.RUNNING
    bench.run()


def test_a_failed_victim_search_is_repeated_when_less_is_missing() -> None:
    """The high one needs 6 of 10 blocks: 4 are another's, 2 the low one's and 2 held for another engine."""
    bench = Bench(blocks=10, rows=4, policy=NEVER)
    bench.add([1] * 4, 13)
    low = bench.add([2] * 4, 5, priority=1)
    bench.turn()
    high = bench.add([3] * 4, 21)
    held = bench.scheduler.hold_prefix(high.group.owner, np.array([4] * 8, np.int32), with_room=True)
    assert held is not None
    bench.turn()
    assert low.group.num_preemptions == 0 and high.state is SequenceState.WAITING
    bench.scheduler.release_prefix(held.number, written=False)
    bench.turn()
    assert low.group.num_preemptions == 1 and high.state is SequenceState.RUNNING
    bench.run()
