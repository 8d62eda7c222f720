"""Billing, precedence and bookkeeping, each shown on one or two requests."""

from dataclasses import replace

import numpy as np
import pytest

from quire.core.errors import QueueFull
from quire.core.ids import RequestId
from quire.core.request import SequenceState
from quire.core.step import FinishReason, StepResult
from quire.kv.manager import KVManager
from quire.sched.cost_model import UNMEASURED, CostTable, StepShape
from quire.sched.fairness import ServiceCost
from quire.sched.policy import REGIMES, Policy
from quire.sched.prefix_dedup import PrefixWait
from quire.sched.queue import OrderPolicy
from quire.sched.scheduler import Scheduler
from tests.sched.inspection import state_of
from tests.sched.stepping import NEVER, OPTIMISTIC, Bench, counting

LONG = counting(1, 16)


def test_a_request_does_not_wait_for_a_prefix_of_another_partition() -> None:
    """Waiting for it would reveal the progress of another tenant's prompt."""
    for own, others in (("b", ""), ("", "b"), ("a", "b")):
        bench = Bench(oracle=True, budget=20, depth=1)
        bench.add(LONG, 5, partition=others)
        bench.turn()
        stranger = bench.add(LONG, 5, partition=own)
        bench.turn()
        assert (
            stranger.state is SequenceState.RUNNING and state_of(bench.scheduler).inflight_prefixes.num_followers == 0
        )
        bench.run()


def test_a_request_that_waited_for_a_prefix_keeps_its_age() -> None:
    """Two classes; ageing is 10 s. The follower arrives at 0 s and is requeued at 8 s: at 11 s its class is higher."""
    policy = replace(OPTIMISTIC, order=OrderPolicy(ageing_s=10.0))
    bench = Bench(oracle=True, budget=9, rows=1, depth=0, policy=policy)
    leader = bench.add(LONG, 3, priority=1)
    bench.turn()
    bench.now_s = 0.5
    follower = bench.add(LONG, 3, priority=1)
    state = state_of(bench.scheduler)
    state.waiting.pop(follower.group)
    state.inflight_prefixes.park(follower.group, PrefixWait(leader, 12))
    bench.now_s = state.now_s = 8.0
    state.inflight_prefixes.end(leader)
    state.requeue_ready()
    bench.now_s = 11.0
    head = state.waiting._head(11.0)
    assert head is not None and (head.key.aged_class, state.waiting.best_class) == (0, 1)
    bench.run()
    assert leader.finish_reason is FinishReason.LENGTH


def test_the_last_block_goes_to_the_earliest_request() -> None:
    """Two rows need a block in the same step, and there is one: the later one pauses, or goes."""
    bench = Bench(blocks=5, block_size=4, rows=2)
    first, second = bench.add([1, 2, 3, 4], 10), bench.add([5, 6, 7, 8], 10)
    bench.turns(5)
    assert len(bench.table(first)) == 3 or first.state is SequenceState.RUNNING
    bench.run()
    assert first.group.num_preemptions == 0 and second.group.num_preemptions >= 1
    order = [sequence.id for sequence in state_of(bench.scheduler).by_precedence([])]
    assert order == []


def test_rows_are_fed_by_class_and_then_by_arrival() -> None:
    bench = Bench(rows=4)
    late = [bench.add([number], 9, priority=number % 2) for number in range(4)]
    bench.turn()
    rows = [sequence.row for sequence in late if sequence.row is not None]
    fed = state_of(bench.scheduler).by_precedence(reversed(rows))
    assert [sequence.id for sequence in fed] == [late[0].id, late[2].id, late[1].id, late[3].id]


def test_what_a_client_cut_short_teaches_nothing_about_lengths() -> None:
    bench = Bench()
    lengths = state_of(bench.scheduler).output_lengths
    for _ in range(20):
        sequence = bench.add([1, 2, 3], 50)
        bench.turns(3)
        bench.scheduler.abort(sequence.request.id)
        bench.run_out()
    assert lengths.hedge(100) == 50, "nothing is learned: half of what it may generate"
    for _ in range(20):
        bench.add([1, 2, 3], 5)
        bench.run_out()
    assert lengths.hedge(100) == 5


def test_recomputed_tokens_are_counted() -> None:
    """Without a cache everything known before the preemption is computed again."""
    bench = Bench(blocks=5, block_size=4, rows=2, policy=OPTIMISTIC.with_regime(REGIMES["chunked"]))
    bench.add([1, 2, 3, 4], 10)
    second = bench.add([5, 6, 7, 8], 10)
    known = []
    while not bench.scheduler.idle:
        before = second.group.num_preemptions
        bench.turn()
        if second.group.num_preemptions > before:
            known.append(len(bench.emitted[second.id]) + 4)
    assert known and bench.scheduler.counters.recomputed_tokens == sum(known) - len(known)


def test_what_was_not_computed_before_is_not_recomputed() -> None:
    """A prompt of 40 is preempted after 8 tokens of it, and computes 40 from the beginning: 8 of them again."""
    bench = Bench(budget=8, rows=1, policy=OPTIMISTIC.with_regime(REGIMES["chunked"]))
    low = bench.add(counting(1, 40), 4, priority=1)
    bench.turn()
    bench.add([99], 2)
    bench.run()
    assert low.group.num_preemptions == 1
    assert bench.scheduler.counters.recomputed_tokens == 8


def test_a_tenant_is_charged_for_prompt_output_and_blocks() -> None:
    service, block_size = ServiceCost(), 4
    bench = Bench(blocks=64, block_size=block_size)
    bench.add(counting(1, 8), 9, tenant="a")
    bench.turn()
    begun = 8 * service.prefill + service.decode + 2 * service.block_step
    assert state_of(bench.scheduler).shares.total("a") == pytest.approx(begun)
    bench.run()
    held = [3] * block_size + [4] * block_size  # blocks, in each of the 8 steps that gave the rest of the answer
    paid = sum(service.decode + service.block_step * blocks for blocks in held)
    assert state_of(bench.scheduler).shares.total("a") == pytest.approx(begun + paid)


def test_a_short_output_is_charged_by_the_token() -> None:
    """Outputs of 1 to 5 tokens within one block of 16: no row is granted a block, and every token is charged."""
    service = ServiceCost()
    for num_tokens in range(1, 6):
        bench = Bench(blocks=64, block_size=16)
        bench.add(counting(1, 8), num_tokens, tenant="a")
        bench.run()
        each = service.decode + service.block_step
        assert state_of(bench.scheduler).shares.total("a") == pytest.approx(8 * service.prefill + num_tokens * each)


def test_a_preempted_row_has_paid_for_what_it_computed() -> None:
    service = ServiceCost()
    bench = Bench(blocks=64, block_size=16, rows=1)
    bench.add([1, 2, 3], 9, tenant="a", priority=1)
    bench.turns(4)
    bench.add([4], 1, tenant="b")
    bench.turn()
    each = service.decode + service.block_step
    assert state_of(bench.scheduler).shares.total("a") == pytest.approx(3 * service.prefill + 4 * each)
    bench.run()


def test_beams_are_charged_for_tokens_and_blocks() -> None:
    """3 beams of 5 tokens after 4: the first step is one row's; the 4 others are 3 rows', of 1 + 1 blocks each."""
    service = ServiceCost()
    bench = Bench(blocks=64, block_size=4, policy=OPTIMISTIC)
    bench.add_beams([1, 2, 3, 4], 5, 3, tenant="a")
    bench.run()
    first = 4 * service.prefill + service.decode + service.block_step
    others = 4 * 3 * (service.decode + 2 * service.block_step)
    assert state_of(bench.scheduler).shares.total("a") == pytest.approx(first + others)


def test_the_cost_table_learns_from_every_step_that_took_time() -> None:
    """No target and no host tier: nothing asks for the prediction yet, and it is right when something does."""
    bench = Bench(depth=0)
    bench.add([1, 2, 3], 30)
    predicted_s = bench.scheduler.cost.predict_s(StepShape(1, 10))
    bench.turns(5)
    assert bench.scheduler.cost.version == 0, "no time passed"
    for number in range(5):
        plan = bench.scheduler.plan(float(number))
        assert plan is not None
        bench.scheduler.absorb(bench.recorder.launch(plan).wait(), number + 0.5)
    assert bench.scheduler.cost.predict_s(StepShape(1, 10)) == pytest.approx(0.5, rel=0.1) != predicted_s


def test_a_step_is_timed_from_the_one_before_it_when_they_overlap() -> None:
    """Two steps planned at 0 s; results at 1 s and 1.5 s: the second took half a second, not one and a half."""
    seen: list[float] = []

    class Watched(CostTable):
        def observe(self, shape: StepShape, seconds: float) -> None:
            seen.append(seconds)

    scheduler = Scheduler(
        KVManager(16, 4, 2),
        max_rows=2,
        max_step_tokens=8,
        policy=replace(NEVER, itl_target_s=9.0),
        cost=Watched(UNMEASURED),
    )
    bench = Bench()
    (sequence,) = bench.add_group([1, 2], 5, 1)
    scheduler.add(replace(sequence.request, id=RequestId(9)), 0.0)
    plans = [scheduler.plan(0.0), scheduler.plan(0.0)]
    row = np.array([0], np.int32)
    for plan, now_s in zip(plans, (1.0, 1.5), strict=True):
        assert plan is not None
        scheduler.absorb(StepResult(plan.step, row, row), now_s)
    assert seen == [1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "sealed", "padded", "contiguous", "chunked", "prefix"),
    [
        ("static", True, True, True, False, False),
        ("dynamic", True, True, True, False, False),
        ("continuous", False, False, True, False, False),
        ("paged", False, False, False, False, False),
        ("chunked", False, False, False, True, False),
        ("prefix", False, False, False, True, True),
    ],
)
def test_the_regimes_are_those_of_the_arc(
    name: str, sealed: bool, padded: bool, contiguous: bool, chunked: bool, prefix: bool
) -> None:
    regime = REGIMES[name]
    assert (regime.sealed, regime.padded, regime.contiguous) == (sealed, padded, contiguous)
    assert (regime.chunked, regime.prefix) == (chunked, prefix)
    assert (regime.window_s > 0) == (name == "dynamic")
    assert Policy().regime is REGIMES["prefix"]


def test_out_of_memory_ends_a_request_that_was_admitted() -> None:
    """The waiting request could become the largest, but it was not part of the step that was too large."""
    bench = Bench(blocks=400, rows=2)
    small, large = bench.add([1] * 8, 20), bench.add([2] * 40, 40)
    bench.turn()
    waiting = bench.add([3], 900)
    bench.turn()
    bench.scheduler.lose_steps(keep_cache=True)
    bench.scheduler.fail_largest()
    assert large.finish_reason is FinishReason.OUT_OF_MEMORY
    assert waiting.finish_reason is None and small.finish_reason is None


def test_followers_count_among_the_waiting_tokens() -> None:
    bench = Bench(oracle=True, budget=9, policy=replace(OPTIMISTIC, max_waiting_tokens=20), depth=1)
    bench.add(LONG, 5)
    bench.turn()
    bench.add(LONG, 5)
    bench.turn()
    assert state_of(bench.scheduler).inflight_prefixes.num_followers == 1
    with pytest.raises(QueueFull):
        bench.add(LONG, 5)
    bench.run()


def test_preempting_a_group_frees_blocks_that_only_its_sequences_share() -> None:
    """10 prompt tokens in blocks of 4: two are shared by three, each has a tail of its own."""
    bench = Bench(oracle=True)
    sequences = bench.add_group(counting(1, 10), 9, 3)
    bench.turns(2)
    blocks = {block for sequence in sequences for block in bench.table(sequence)}
    reserved = sum(
        int(bench.scheduler.kv.tables.reserved[sequence.row]) for sequence in sequences if sequence.row is not None
    )
    assert len(blocks) == 5
    assert state_of(bench.scheduler).num_freed(sequences[0].group) == 5 + reserved
    reader = bench.add(counting(1, 10), 9)
    bench.turn()
    assert bench.table(reader)[:2] == bench.table(sequences[0])[:2]
    reserved = sum(
        int(bench.scheduler.kv.tables.reserved[sequence.row]) for sequence in sequences if sequence.row is not None
    )
    assert state_of(bench.scheduler).num_freed(sequences[0].group) == 3 + reserved, "another reads the prompt too"
    bench.run()


def test_the_lowest_class_counts_assigned_rows_alone() -> None:
    bench = Bench()
    bench.add([1], 9, priority=2)
    bench.add([2], 2, priority=7)
    lowest = []
    for _ in range(4):
        bench.turn()
        lowest.append(state_of(bench.scheduler).rows.lowest_class)
    assert lowest == [7, 2, 2, 2]
    bench.run()
    assert state_of(bench.scheduler).rows.lowest_class == 0


def test_recomputed_tokens_of_siblings_are_counted() -> None:
    """Without a cache: the leader computes all it knew again, a sibling all but what it shares of the prompt."""
    policy = OPTIMISTIC.with_regime(REGIMES["chunked"])
    bench = Bench(blocks=12, block_size=2, rows=3, policy=policy)
    bench.add([1, 2], 12)
    sequences = bench.add_group([3, 4, 5], 8, 2)
    again = 0
    while not bench.scheduler.idle:
        before = sequences[0].group.num_preemptions
        bench.turn()
        if sequences[0].group.num_preemptions > before:
            known = [3 + len(bench.emitted[sequence.id]) for sequence in sequences]
            again += known[0] - 1 + known[1] - 1 - 2
    assert again and bench.scheduler.counters.recomputed_tokens == again


def test_a_row_preempted_in_the_step_of_its_grant_does_not_pay_for_the_block() -> None:
    """All three need a block in step 5, and there are two. The second gets one, and is then preempted for the third."""
    bench = Bench(blocks=9, rows=3)
    bench.add(counting(1, 4), 9, tenant="first")
    victim = bench.add(counting(20, 4), 9, tenant="victim")
    bench.add(counting(40, 8), 9, tenant="third")
    bench.turns(6)
    assert victim.group.num_preemptions == 1 and victim.row is None
    prompt, output = 4 * 1.0 + 2.0 + 0.04, 4 * (2.0 + 2 * 0.04)
    assert state_of(bench.scheduler).shares.total("victim") == pytest.approx(prompt + output)
    bench.run()
