"""KV blocks are taken back from a tenant above its share when one below its share waits, and only then."""

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import RequestId
from quire.core.request import BlockOwner, EventKind, Sequence, SequenceState, WaitCause
from quire.sched.policy import Policy
from quire.sched.preemption import TenantBlocks
from quire.sched.queue import OrderPolicy
from quire.sched.reference_checks import add_reference_checks
from quire.sched.reservation import Overcommit
from tests.sched.inspection import state_of
from tests.sched.stepping import NEVER, OPTIMISTIC, Bench, counting, events_of, oracle_output
from tests.tiers import long_only

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
AT_ONCE = OrderPolicy(share_patience_s=0.0)
AT_LENGTH = replace(NEVER, order=AT_ONCE)  # the whole length is reserved: what a request holds is known


def held(bench: Bench, *tenants: str) -> list[int]:
    state = state_of(bench.scheduler)
    blocks = TenantBlocks(state)
    return [blocks.num_above(each) + state.shares.part(each, state.kv.pool.num_in_service) for each in tenants]


@DEPTHS
def test_a_tenant_below_its_share_gets_blocks_of_one_above(depth: int) -> None:
    """One row of a long context holds 18 of 20 blocks, and has no row to spare."""
    bench = Bench(blocks=20, rows=8, depth=depth, policy=AT_LENGTH, oracle=True)
    large = bench.add(counting(1, 8), 65, tenant="large")
    bench.turns(3)
    assert held(bench, "large") == [18]
    small = bench.add(counting(500, 9), 12, tenant="small")  # 5 blocks
    bench.turns(depth + 2)
    assert small.state is SequenceState.RUNNING and large.state is SequenceState.WAITING
    counters = bench.scheduler.counters
    assert (counters.preemptions, counters.share_preemptions, counters.class_preemptions) == (1, 1, 0)
    bench.run()
    assert bench.num_preemptions == 1, "it waits until the small one has ended"
    assert bench.emitted[large.id] == oracle_output(counting(1, 8), 65)
    assert bench.emitted[small.id] == oracle_output(counting(500, 9), 12)


def test_a_request_beyond_the_share_of_its_tenant_waits_for_blocks_that_come_free() -> None:
    bench = Bench(blocks=20, rows=8, policy=AT_LENGTH)
    bench.add(counting(1, 8), 65, tenant="large")
    bench.turns(2)
    other = bench.add(counting(500, 9), 36, tenant="small")  # 11 blocks, and 10 are its share
    bench.turns(3)
    assert other.group.waits_for is WaitCause.BLOCKS and bench.num_preemptions == 0
    bench.run()


def test_blocks_are_waited_for_before_they_are_taken() -> None:
    bench = Bench(blocks=20, rows=8, policy=replace(NEVER, order=OrderPolicy()))
    bench.add(counting(1, 8), 65, tenant="large")
    bench.turns(2)
    small = bench.add(counting(500, 9), 12, tenant="small")
    bench.now_s = 0.09
    bench.turns(5)
    assert bench.num_preemptions == 0
    bench.now_s = 0.11
    bench.turns(2)
    assert small.row is not None and bench.num_preemptions == 1


def test_only_tenants_above_their_share_give_and_the_most_above_first() -> None:
    """Of 30 blocks each of three has a share of 10. The one with 15 gives before the one with 11, and the one with 2,
    which has least to lose, gives nothing."""
    bench = Bench(blocks=30, rows=8, policy=AT_LENGTH, budget=200)
    first = [bench.add(counting(100 * i, 8), 13, tenant="most") for i in range(3)]  # 5 blocks each
    second = bench.add(counting(400, 8), 37, tenant="some")  # 11 blocks
    modest = bench.add([7], 8, tenant="modest")  # 2 blocks
    bench.turns(3)
    assert held(bench, "most", "some", "modest") == [15, 11, 2]
    waiting = bench.add(counting(600, 8), 17, tenant="modest")  # 6 blocks: 8 with those it has
    bench.turns(2)
    assert waiting.row is not None
    assert [s.group.num_preemptions for s in (*first, second, modest)] == [0, 0, 1, 0, 0], "the newest of the first"


@DEPTHS
def test_a_request_of_all_rows_gives_them_back(depth: int) -> None:
    """It has no row to spare, but its tenant is above its share. Blocks are not short."""
    bench = Bench(blocks=400, rows=4, depth=depth, policy=replace(OPTIMISTIC, order=AT_ONCE))
    large = bench.add_group([1, 2, 3], 40, 4, tenant="large")
    bench.turns(3)
    small = bench.add([7], 3, tenant="small")
    bench.turns(depth + 2)
    assert small.state is SequenceState.RUNNING and large[0].group.num_preemptions == 1
    bench.run()
    assert large[0].group.num_preemptions == 1


def test_no_more_is_taken_than_needed() -> None:
    """The request with the least to lose frees too few blocks; with the next one there are enough without it."""
    bench = Bench(blocks=20, rows=8, policy=AT_LENGTH, budget=200)
    large, little = bench.add(counting(1, 30), 23, tenant="x"), bench.add(counting(200, 4), 13, tenant="x")
    bench.turns(2)
    assert held(bench, "x") == [13 + 4]
    small = bench.add(counting(500, 9), 24, tenant="small")  # 8 blocks, and three are free
    bench.turns(2)
    assert small.row is not None
    assert [each.group.num_preemptions for each in (large, little)] == [1, 0]


def test_blocks_that_only_the_victims_share_are_freed_with_all_of_them() -> None:
    """Each of four rows with one long prompt frees its last block alone; together they hold 16 of 20 blocks."""
    bench = Bench(blocks=20, block_size=4, rows=8, policy=AT_LENGTH, budget=200)
    prompt = counting(1, 49)
    rows = [bench.add(prompt, 3, tenant="large")]
    bench.turn()
    rows += [bench.add(prompt, 3, tenant="large") for _ in range(3)]
    bench.turn()
    assert held(bench, "large") == [12 + 4] and len(state_of(bench.scheduler).rows.assigned) == 4
    small = bench.add(counting(500, 9), 32, tenant="small")  # 10 blocks
    bench.turns(2)
    assert small.state is SequenceState.RUNNING
    assert [row.group.num_preemptions for row in rows] == [1, 1, 1, 1]
    bench.run()


def test_a_tenant_that_grows_above_its_share_is_noticed() -> None:
    """One tenant is above its share and may not be preempted again. Another is at its share of 5 when the third comes,
    and grows: no row is assigned or released meanwhile."""
    order = replace(AT_ONCE, weights={"growing": 0.7})
    bench = Bench(blocks=21, block_size=4, rows=8, policy=replace(OPTIMISTIC, order=order))
    immune = bench.add(counting(1, 45), 12, tenant="immune")
    immune.group.num_preemptions = 3
    growing = bench.add(counting(200, 18), 30, tenant="growing")
    bench.turns(2)
    waiting = bench.add(counting(500, 9), 3, tenant="waiting")  # 3 blocks, and two are free
    bench.turn()
    assert held(bench, "immune", "growing") == [14, 5] and waiting.row is None
    bench.turns(6)
    assert growing.group.num_preemptions == 1 and len(bench.emitted[waiting.id]) > 0
    bench.run()


def test_a_row_denied_a_block_takes_it_from_a_tenant_above_its_share() -> None:
    """The large one has the most to lose and came first; the small ones are below their share."""
    bench = Bench(blocks=20, block_size=4, rows=8, policy=OPTIMISTIC)
    large = bench.add(counting(1, 44), 30, tenant="large")
    small = [bench.add(counting(500 + 20 * i, 8), 30, tenant="small") for i in range(2)]
    while not bench.num_preemptions:
        bench.turn()
    assert large.group.num_preemptions == 1 and not any(each.group.num_preemptions for each in small)
    bench.run()


def test_with_one_tenant_the_oldest_is_never_preempted_and_the_least_work_is() -> None:
    bench = Bench(blocks=20, block_size=4, rows=8, policy=OPTIMISTIC)
    large = bench.add(counting(1, 44), 30)
    small = [bench.add(counting(500 + 20 * i, 8), 30) for i in range(2)]
    while not bench.num_preemptions:
        bench.turn()
    assert [each.group.num_preemptions for each in (large, *small)] == [0, 0, 1]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_limit_of_preemptions_holds(most: int) -> None:
    """A request that may not be preempted again keeps what it has, however much."""
    bench = Bench(blocks=20, rows=8, policy=replace(AT_LENGTH, max_preemptions=most))
    large = bench.add(counting(1, 8), 65, tenant="large")
    for i in range(6):
        bench.turns(4)
        bench.add(counting(500 + 20 * i, 9), 3, tenant="small")
    bench.run()
    assert large.group.num_preemptions == most


@pytest.mark.parametrize("depth", [1, *long_only([0, 2])])
def test_one_tenant_with_long_contexts_does_not_starve_another(depth: int) -> None:
    """As an attacker does it: few rows, all blocks, one request after the other. The other tenant's requests wait for
    a few steps each, not for the end of a context."""
    bench = Bench(blocks=60, rows=8, depth=depth, policy=replace(OPTIMISTIC, order=AT_ONCE), budget=256)
    add_reference_checks(bench.scheduler)
    for i in range(12):
        bench.add(counting(100 * i, 80), 150, tenant="flood")
    bench.turns(10)
    waits = []
    for i in range(10):
        quiet = bench.add(counting(5000 + 20 * i, 10), 3, tenant="quiet")
        waits.append(turns_until_admitted(bench, quiet))
        bench.turns(6)
    assert max(waits) <= 2 * (depth + 2), waits
    bench.run()


def turns_until_admitted(bench: Bench, sequence: Sequence) -> int:
    for count in range(1, 1000):
        bench.turn()
        if events_of(sequence, EventKind.ADMITTED):
            return count
    raise AssertionError(f"{sequence} was not admitted")


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=4, max_size=12),
    st.sampled_from([Overcommit.NEVER, Overcommit.OPTIMISTIC]),
    st.integers(0, 2),
)
def test_none_that_is_due_blocks_waits_while_another_is_above_its_share(
    weights: Many[float], lengths: Many[tuple[int, int]], overcommit: Overcommit, depth: int
) -> None:
    """The reference checks judge every search. Outputs stay exact, and each request is preempted a few times only."""
    names = [f"t{i}" for i in range(len(weights))]
    order = replace(AT_ONCE, weights=dict(zip(names, weights, strict=True)))
    policy = Policy(order=order, overcommit=overcommit)
    bench = Bench(blocks=16, block_size=4, rows=12, depth=depth, policy=policy, oracle=True)
    add_reference_checks(bench.scheduler)
    sequences = []
    for i, (num_prompt, num_output) in enumerate(lengths):
        tenant = names[i * i % len(names)]
        sequences.append(bench.add(counting(30 * i, num_prompt), num_output, tenant=tenant))
        bench.turns(i % 3)
    bench.run()
    for sequence in sequences:
        expected = oracle_output(sequence.request.prompt.tolist(), sequence.request.max_tokens)
        assert bench.emitted[sequence.id] == expected
        assert sequence.group.num_preemptions <= policy.max_preemptions


def test_blocks_that_other_engines_hold_are_waited_for() -> None:
    """Nothing runs that could be preempted, and the first request of two tenants does not fit beside a held prefix."""
    bench = Bench(blocks=20, rows=8, policy=AT_LENGTH)
    held = bench.scheduler.hold_prefix(
        BlockOwner(RequestId(9), "", 0), np.array(counting(900, 40), np.int32), with_room=True
    )
    assert held is not None and len(held.room) == 10
    waiting = [bench.add(counting(100 * i, 8), 37, tenant=str(i)) for i in (1, 2)]  # 11 blocks each
    bench.turns(3)
    assert waiting[0].group.waits_for is WaitCause.BLOCKS and bench.num_preemptions == 0
    bench.scheduler.release_prefix(held.number, written=False)
    bench.run()
    assert all(each.finished for each in waiting)
