"""Guarantees of the scheduler for any batch, shown on steps and never on time."""

from dataclasses import replace

import pytest

from quire.core.errors import Draining, DuplicateRequest, NeverFits, QueueFull
from quire.core.ids import RequestId
from quire.core.request import EventKind, SequenceState
from quire.core.step import ChunkOutput, FinishReason
from quire.sched.cost_model import Constants, CostTable, StepShape
from quire.sched.pacing import StepBound
from quire.sched.policy import CapturedSizes, Policy
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit
from tests.sched.inspection import state_of
from tests.sched.stepping import NEVER, Bench, counting, events_of, toy_output

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


@DEPTHS
def test_the_toy_outputs_are_as_computed_by_hand(depth: int) -> None:
    bench = Bench(depth=depth)
    one, two = bench.add([1, 2, 3], 5), bench.add([7], 3)
    bench.run()
    assert bench.emitted[one.id] == toy_output([1, 2, 3], 5) == [6, 12, 24, 48, 96]
    assert bench.emitted[two.id] == [7, 14, 28]
    assert one.finish_reason is FinishReason.LENGTH


def test_a_short_request_beside_a_long_one_returns_after_its_own_steps() -> None:
    bench = Bench(blocks=200)
    long, short = bench.add([1] * 8, 200), bench.add([2] * 8, 10)
    bench.run()
    assert bench.finished[short.id] == 9  # its prompt and first token in step 0, then one token a step
    assert bench.finished[long.id] == 199


def test_sixty_four_mixed_requests_share_a_batch_that_reforms_every_step() -> None:
    bench = Bench(blocks=4000, rows=64, budget=512)
    prompts = [[100 + i] * (1 + i % 7) for i in range(64)]
    lengths = {bench.add(prompt, 1 + 3 * i).id: 1 + 3 * i for i, prompt in enumerate(prompts)}
    bench.run()
    assert all(bench.finished[sequence] == length - 1 for sequence, length in lengths.items())
    assert len(bench.plans) == max(lengths.values())
    for plan in bench.plans[1:]:
        assert plan.num_decoding == sum(length > plan.step for length in lengths.values())


def test_a_steady_decode_step_has_an_empty_diff() -> None:
    bench = Bench(blocks=100, block_size=8)
    for i in range(4):
        bench.add([1 + i] * 8, 40)
    bench.turns(2)
    quiet = [bench.plan for _ in range(6) if bench.turn()]
    assert len(quiet) == 6
    for plan in quiet:
        assert plan.num_decoding == 4
        assert not (plan.moves or plan.starts or plan.releases or plan.appends or plan.chunks or plan.pauses)
        assert len(plan.grants) == 0


def test_a_block_is_granted_in_the_step_that_first_writes_it() -> None:
    bench = Bench(block_size=4)
    bench.add([1] * 3, 11)
    bench.run()
    granted = [plan.step for plan in bench.plans for _ in plan.grants.rows]
    assert granted == [0, 2, 6, 10]  # position 4 is computed in step 2; 12, the last, in step 10


def test_a_prompt_is_chunked_by_what_the_decodes_leave_of_the_budget() -> None:
    bench = Bench(blocks=100, rows=4, budget=10)
    bench.add([1] * 4, 30)
    bench.turn()
    late = bench.add([2] * 25, 5)
    bench.run()
    chunks = [(chunk.start, chunk.length, chunk.output) for chunk in bench.chunks_of(late)]
    assert chunks == [(0, 9, ChunkOutput.NONE), (9, 9, ChunkOutput.NONE), (18, 7, ChunkOutput.SAMPLE)]
    assert bench.emitted[late.id] == toy_output([2] * 25, 5)


def test_decodes_come_before_prefills_and_those_before_new_work() -> None:
    bench = Bench(blocks=100, rows=3, budget=6)
    bench.add([1], 20)
    bench.turn()
    first, second = bench.add([2] * 9, 2), bench.add([3] * 2, 2)
    bench.turn()
    (chunk,) = bench.plan.chunks
    assert chunk.length == 5 and first.state is SequenceState.RUNNING and second.state is SequenceState.WAITING
    bench.turn()
    old, new = bench.plan.chunks
    assert (old.start, old.length, new.length) == (5, 4, 1)


def test_a_long_prefill_leaves_half_of_a_step_to_the_others_and_takes_what_they_do_not_need() -> None:
    """16 prompt tokens are long here, and a step has 8."""
    policy = Policy(order=OrderPolicy(long_prompt=16), overcommit=Overcommit.NEVER)
    bench = Bench(blocks=100, rows=3, budget=8, policy=policy)
    long = bench.add(counting(1, 40), 2)
    bench.turn()
    late = bench.add(counting(500, 9), 2)
    bench.turns(3)
    assert [chunk.length for chunk in bench.chunks_of(long)] == [8, 4, 4, 7]
    assert [chunk.length for chunk in bench.chunks_of(late)] == [4, 4, 1]
    bench.run()
    assert bench.emitted[late.id] == toy_output(counting(500, 9), 2)


LONG_FROM_16 = Policy(order=OrderPolicy(long_prompt=16, lane_patience_s=0.0), overcommit=Overcommit.NEVER)


def test_a_long_prompt_waits_for_one_in_progress_of_its_tenant_and_takes_what_it_leaves() -> None:
    bench = Bench(blocks=100, rows=4, budget=8, policy=LONG_FROM_16)
    first = bench.add(counting(1, 44), 2)
    bench.turn()
    second, chat = bench.add(counting(500, 20), 2), bench.add([7, 8, 9], 1)
    bench.turn()
    assert events_of(chat, EventKind.ADMITTED)[0].step == 1 and second.state is SequenceState.WAITING
    bench.run()
    assert [chunk.length for chunk in bench.chunks_of(first)] == [8, 5, 8, 8, 8, 7]
    assert [chunk.length for chunk in bench.chunks_of(second)] == [1, 7, 8, 4]
    assert bench.emitted[second.id] == toy_output(counting(500, 20), 2)


@pytest.mark.parametrize(("num_tokens", "tenant"), [(20, "other"), (20, ""), (30, "")])
def test_a_long_prompt_joins_one_of_another_tenant_and_one_that_is_sixteen_times_as_long(
    num_tokens: int, tenant: str
) -> None:
    bench = Bench(blocks=200, rows=4, budget=8, policy=LONG_FROM_16)
    longest = bench.add(counting(1, 400), 2)
    bench.turn()
    late = bench.add(counting(500, num_tokens), 2, tenant=tenant)
    bench.turn()
    joins = tenant == "other" or num_tokens < 400 / 16
    assert (late.assigned_step == 1) == joins
    assert [chunk.length for chunk in bench.chunks_of(longest)] == [8, 4 if joins else 8]


def test_long_prompts_in_progress_share_steps_by_tenant() -> None:
    bench = Bench(blocks=100, rows=4, budget=8, policy=LONG_FROM_16)
    first = bench.add(counting(1, 80), 2, tenant="a")
    bench.turns(3)
    second = bench.add(counting(500, 40), 2, tenant="b")
    bench.turns(6)
    computed = [sum(chunk.length for chunk in bench.chunks_of(each)) for each in (first, second)]
    assert sum(computed) == 9 * 8
    assert abs(computed[0] - 3 * 8 - computed[1]) <= 8, "the first goes on alone, or waits until the second is done"


def test_a_chunk_keeps_the_time_of_the_step_it_joins() -> None:
    """One second for every token: of a step that may take 20, one is a decode and 19 are left."""
    cost = CostTable(Constants(0.0, 0.0, 1.0, 0.0, 0.0))
    policy = Policy(overcommit=Overcommit.NEVER, itl_target_s=20.0)
    bench = Bench(blocks=100, rows=3, budget=64, policy=policy, cost=cost)
    bench.add([1] * 40, 30)
    bench.turn()
    assert bench.plan.chunks[0].length == 40, "no row decodes: there is no time target"
    late = bench.add([2] * 50, 2)
    bench.run()
    assert [chunk.length for chunk in bench.chunks_of(late)] == [19, 19, 12]


@pytest.mark.parametrize(
    ("constants", "alone", "beside"),
    [
        (Constants(0.0, 0.0, 0.01, 0.0, 0.0), [50] * 4, [49] * 4 + [4]),
        (Constants(0.0, 0.0, 0.001, 0.0, 0.0), [200], [200]),
        (Constants(0.0, 0.0, 0.02, 0.0, 0.0), [32] * 6 + [8], [33] * 6 + [2]),  # 16 take 0.32 s: at most 0.64
        (Constants(2.0, 0.0, 0.1, 0.0, 0.0), [52, 52, 52, 44], [53, 53, 53, 41]),  # 16 take 3.6 s: at most 7.2
        (Constants(0.0, 0.0, 1e-3, 0.0, 1e-4), [90, 41, 31, 30, 8], [89, 41, 31, 30, 9]),  # deeper ones read more keys
    ],
)
def test_a_step_with_prompts_is_limited_in_time_alone_and_beside_a_decoding_row(
    constants: Constants, alone: list[int], beside: list[int]
) -> None:
    policy = Policy(overcommit=Overcommit.NEVER, max_step_s=0.5)
    for decoding, lengths in ((False, alone), (True, beside)):
        bench = Bench(blocks=100, rows=3, budget=512, policy=policy, cost=CostTable(constants))
        if decoding:
            bench.add([1], 60)
            bench.turn()
        late = bench.add([2] * 200, 2)
        bench.run()
        assert [chunk.length for chunk in bench.chunks_of(late)] == lengths, decoding


def test_chunks_shrink_as_soon_as_steps_prove_slow() -> None:
    """Three measurements of steps ten times slower than stated."""
    cost = CostTable(Constants(0.0, 0.0, 0.001, 0.0, 0.0))
    bench = Bench(blocks=1000, rows=3, budget=512, policy=Policy(max_step_s=0.5), cost=cost)
    long = bench.add([2] * 3000, 2)
    bench.turns(3)
    for chunk in bench.chunks_of(long):
        cost.observe(StepShape().with_chunk(chunk.start, chunk.length), 0.01 * chunk.length)
    bench.turn()
    assert [chunk.length for chunk in bench.chunks_of(long)] == [500, 500, 500, 50]


def test_where_rows_take_long_by_themselves_prompts_have_a_share_beside_them() -> None:
    """A token takes a second, and three rows decode: of 20 s they leave 17 to prompts, of 3 s nothing but the least."""
    cost = CostTable(Constants(0.0, 0.0, 1.0, 0.0, 0.0))
    for target_s, per_decode, length in ((20.0, 0.0, 17), (20.0, 6.0, 17), (20.0, 10.0, 27), (3.0, 0.0, 16)):
        policy = Policy(overcommit=Overcommit.NEVER, itl_target_s=target_s, itl_per_decode=per_decode)
        bench = Bench(blocks=100, rows=4, budget=64, policy=policy, cost=cost)
        for start in (1, 2, 3):
            bench.add([start] * 10, 30)
        bench.turn()
        late = bench.add([4] * 50, 2)
        bench.turn()
        assert [chunk.length for chunk in bench.chunks_of(late)] == [length], (target_s, per_decode)


def test_a_cut_chunk_has_a_captured_size_and_grows_while_prompts_queue() -> None:
    """A token takes a millisecond. As above, but that 16 take no less than 19, and steps grow while prompts wait."""
    cost = CostTable(Constants(0.0, 0.0, 1e-3, 0.0, 0.0))
    captured_sizes = (CapturedSizes(1, (16, 24, 32, 48)), CapturedSizes(4, (12, 20)))
    policy = Policy(overcommit=Overcommit.NEVER, itl_target_s=0.02, ttft_target_s=0.01, captured_sizes=captured_sizes)
    bench = Bench(blocks=100, rows=3, budget=64, policy=policy, cost=cost)
    bench.add([1] * 10, 30)
    bench.turn()
    late = bench.add([2] * 50, 2)
    bench.turn()
    assert [chunk.length for chunk in bench.chunks_of(late)] == [16], "no other prompt waits"
    bench.add([3] * 50, 2)
    bench.run()
    assert [chunk.length for chunk in bench.chunks_of(late)] == [16, 32, 2], "another prompt waits"
    strict = Bench(blocks=100, rows=3, budget=64, policy=replace(policy, ttft_target_s=None), cost=cost)
    strict.add([1] * 10, 30)
    strict.turn()
    late = strict.add([2] * 50, 2)
    strict.add([3] * 50, 2)
    strict.run()
    assert [chunk.length for chunk in strict.chunks_of(late)] == [16, 16, 16, 2]
    crowd = Bench(blocks=100, rows=6, budget=64, policy=replace(policy, itl_target_s=0.025), cost=cost)
    for start in (1, 5):
        crowd.add([start] * 10, 30)
    for _ in range(2):  # the efficient size holds one and a half of them
        crowd.turn()
    late = crowd.add([2] * 50, 2)
    crowd.run()
    assert [chunk.length for chunk in crowd.chunks_of(late)] == [20, 20, 10], "two decode: steps have other sizes"
    paced = crowd.scheduler.counters.paced_steps
    assert paced[StepBound.ITL] == 2, paced


def test_an_end_token_ends_a_sequence_and_counts_as_its_last() -> None:
    bench = Bench()
    sequence = bench.add([1, 2, 3], 50, end_ids=(24,))
    bench.run()
    assert bench.emitted[sequence.id] == [6, 12, 24]
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.tokens.tolist() == [1, 2, 3, 6, 12, 24]


def test_a_row_that_fails_in_its_first_step_has_no_first_token() -> None:
    bench = Bench()
    failing = bench.add([1, 2, 3], 5)
    bench.poison(failing)
    output = bench.turn()
    assert output is not None and not output.first_tokens
    assert failing.finish_reason is FinishReason.ERROR
    assert not events_of(failing, EventKind.FIRST_TOKEN)
    bench.run()


@DEPTHS
def test_a_sequence_alone_may_fill_the_pool_to_the_last_block(depth: int) -> None:
    bench = Bench(blocks=4, block_size=4, rows=1, depth=depth)
    sequence = bench.add([1] * 4, 13)  # 16 positions are computed: the last token is not
    bench.run()
    assert bench.emitted[sequence.id] == toy_output([1] * 4, 13)
    assert bench.num_preemptions == 0
    with pytest.raises(NeverFits, match="5 KV blocks"):
        bench.add([1] * 4, 14)


@DEPTHS
def test_law_a_nothing_goes_back_while_a_step_in_flight_touches_it(depth: int) -> None:
    bench = Bench(depth=depth, blocks=20)
    sequence = bench.add([1] * 8, 30)
    bench.turns(6)
    state = state_of(bench.scheduler)
    assert state.last_planned - state.last_absorbed == depth
    bench.scheduler.abort(sequence.request.id)
    pool = bench.scheduler.kv.pool
    assert (pool.num_free + pool.num_evictable < pool.num_blocks) == (depth > 0)
    assert (state.rows.num_free < 8) == (depth > 0)
    bench.run()


@DEPTHS
@pytest.mark.parametrize("turns", range(12))
def test_an_abort_is_legal_at_every_moment_and_idempotent(depth: int, turns: int) -> None:
    bench = Bench(blocks=7, block_size=2, rows=2, budget=3, depth=depth, oracle=True)
    victim, other = bench.add([5] * 6, 6), bench.add([2, 3], 6)
    expected = Bench(oracle=True)
    alone = expected.add([2, 3], 6)
    expected.run()
    bench.turns(turns)
    ended = bench.scheduler.abort(victim.request.id)
    assert ended == (() if victim.id in bench.finished else (victim,))
    assert bench.scheduler.abort(victim.request.id) == ()
    silence = len(bench.emitted[victim.id])
    bench.run()
    assert len(bench.emitted[victim.id]) == silence, "it emitted after its end"
    assert bench.emitted[other.id] == expected.emitted[alone.id]


def test_an_unknown_request_can_be_aborted() -> None:
    assert Bench().scheduler.abort(RequestId(17)) == ()


def test_a_finished_sequence_cannot_be_finished_again() -> None:
    bench = Bench()
    sequence = bench.add([1], 9)
    bench.turn()
    assert bench.scheduler.finish(sequence, FinishReason.STOP)
    assert not bench.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.finish_reason is FinishReason.STOP and sequence.tokens.tolist() == [1, 1]


def test_a_runner_refuses_a_plan_out_of_order() -> None:
    bench = Bench()
    bench.add([1], 3)
    bench.turn()
    with pytest.raises(AssertionError, match="was due"):
        bench.recorder.runner.launch(bench.plans[0])


def test_an_id_that_is_here_is_refused_and_may_come_again_later() -> None:
    bench = Bench()
    sequence = bench.add([1], 2)
    with pytest.raises(DuplicateRequest, match="0"):
        bench.scheduler.add(sequence.request)
    bench.run()
    bench.scheduler.add(sequence.request)


def test_a_full_queue_refuses() -> None:
    bench = Bench(rows=1, policy=Policy(max_waiting=2))
    for i in range(2):
        bench.add([i], 3)
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        bench.add([7], 3)
    bench.turn()
    bench.add([8], 3)  # one is running now


def test_a_queue_full_of_tokens_refuses_but_never_an_empty_one() -> None:
    bench = Bench(rows=1, policy=Policy(max_waiting_tokens=10))
    bench.add([1] * 12, 2)
    with pytest.raises(QueueFull, match="12 prompt tokens are waiting, the limit is 10"):
        bench.add([2], 2)
    bench.turn()
    bench.add([3] * 6, 2)
    bench.add([4] * 4, 2)
    with pytest.raises(QueueFull, match="10 prompt tokens"):
        bench.add([5], 2)


def test_a_draining_engine_finishes_accepted_requests_and_refuses_others() -> None:
    bench = Bench(rows=1)
    one, two = bench.add([1], 3), bench.add([2], 3)
    bench.turn()
    bench.scheduler.drain()
    with pytest.raises(Draining):
        bench.add([3], 3)
    bench.run()
    assert bench.emitted[one.id] == [1, 2, 4] and bench.emitted[two.id] == [2, 4, 8]


def test_more_continuations_than_rows_never_fit() -> None:
    with pytest.raises(NeverFits):
        Bench(rows=2).add_group([1], 2, 3)


def test_the_pool_shrinks_only_while_all_accepted_requests_fit() -> None:
    bench = Bench(blocks=12, block_size=4, policy=NEVER)
    small, large = bench.add([1] * 4, 5), bench.add([2] * 4, 13)  # 2 and 4 blocks
    assert bench.scheduler.shrink(20) == 8, "the larger needs four"
    bench.run()
    assert bench.scheduler.kv.pool.num_in_service == 4
    assert bench.emitted[small.id] == toy_output([1] * 4, 5)
    assert bench.emitted[large.id] == toy_output([2] * 4, 13)
    assert bench.scheduler.shrink(20) == 3, "one block stays in service at any rate"


def test_running_rows_keep_blocks_and_reservations_when_the_pool_shrinks() -> None:
    bench = Bench(blocks=12, block_size=4, policy=NEVER)
    bench.add([1] * 4, 5)
    bench.add([2] * 4, 13)
    bench.turn()
    assert bench.scheduler.shrink(20) == 6
    assert bench.scheduler.kv.num_available == 0
    bench.run()
