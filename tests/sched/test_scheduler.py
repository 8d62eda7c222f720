"""What the scheduler promises, shown on steps and never on time."""

import numpy as np
import pytest

from quire.core.ids import RequestId
from quire.core.request import State
from quire.core.step import FinishReason, Output
from quire.sched.audit import audit_rest
from quire.sched.scheduler import MAX_PREEMPTIONS
from tests.sched.helpers import Bench, toy_answer

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


@DEPTHS
def test_the_toy_answers_as_by_hand(depth: int) -> None:
    bench = Bench(depth=depth)
    one, two = bench.add([1, 2, 3], 5), bench.add([7], 3)
    bench.run()
    assert bench.heard[one.id] == toy_answer([1, 2, 3], 5) == [6, 12, 24, 48, 96]
    assert bench.heard[two.id] == [7, 14, 28]
    assert one.finish_reason is FinishReason.LENGTH
    audit_rest(bench.scheduler)


def test_a_short_request_beside_a_long_one_returns_after_its_own_steps() -> None:
    bench = Bench(blocks=200)
    long, short = bench.add([1] * 8, 200), bench.add([1] * 8, 10)
    bench.run()
    assert bench.finished[short.id] == 9  # its prompt and first token in step 0, then one token a step
    assert bench.finished[long.id] == 199


def test_sixty_four_mixed_requests_share_a_batch_that_reforms_every_step() -> None:
    bench = Bench(blocks=4000, rows=64, budget=512)
    lengths = {bench.add([3] * (1 + i % 7), 1 + 3 * i).id: 1 + 3 * i for i in range(64)}
    bench.run()
    assert all(bench.finished[sequence] == length - 1 for sequence, length in lengths.items())
    assert len(bench.recorder.plans) == max(lengths.values())
    for plan in bench.recorder.plans[1:]:
        assert plan.num_cruising == sum(length > plan.step for length in lengths.values())


def test_a_steady_step_mentions_nobody() -> None:
    bench = Bench(blocks=100, block_size=8)
    for _ in range(4):
        bench.add([1] * 8, 40)
    for _ in range(2):
        bench.turn()
    quiet = [bench.recorder.plans[-1] for _ in range(6) if bench.turn()]
    assert len(quiet) == 6
    for plan in quiet:
        assert plan.num_cruising == 4
        assert not (plan.seats or plan.leaves or plan.grants or plan.chunks or plan.pauses)


def test_a_prompt_is_chunked_by_what_the_decodes_leave_of_the_budget() -> None:
    bench = Bench(blocks=100, rows=4, budget=10)
    bench.add([1] * 4, 30)
    bench.turn()
    late = bench.add([1] * 25, 5)
    bench.run()
    chunks = [(c.length, c.output) for plan in bench.recorder.plans for c in plan.chunks if c.row != 0]
    assert chunks == [(9, Output.NONE), (9, Output.NONE), (7, Output.SAMPLE)]
    assert bench.heard[late.id] == toy_answer([1] * 25, 5)


def test_decodes_come_before_prefills_and_those_before_new_work() -> None:
    bench = Bench(blocks=100, rows=3, budget=6)
    bench.add([1], 20)
    bench.turn()
    first, second = bench.add([1] * 9, 2), bench.add([1] * 2, 2)
    bench.turn()
    (chunk,) = bench.recorder.plans[-1].chunks
    assert chunk.length == 5 and first.state is State.RUNNING and second.state is State.WAITING
    bench.turn()
    old, new = bench.recorder.plans[-1].chunks
    assert (old.start, old.length, new.length) == (5, 4, 1)


@DEPTHS
def test_pressure_preempts_the_youngest_and_loses_nothing(depth: int) -> None:
    bench = Bench(blocks=6, block_size=4, rows=3, depth=depth)
    prompts = [[i + 1] * 4 for i in range(3)]
    sequences = [bench.add(prompt, 16) for prompt in prompts]
    bench.run()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.heard[sequence.id] == toy_answer(prompt, 16)
    assert sequences[0].num_preemptions == 0, "the oldest always advances"
    assert sequences[2].num_preemptions > 0
    assert all(sequence.num_preemptions <= MAX_PREEMPTIONS for sequence in sequences)
    audit_rest(bench.scheduler)


def test_law_b_a_denied_row_waits_if_blocks_are_on_their_way_back() -> None:
    bench = Bench(blocks=5, block_size=8, rows=3, depth=2)
    ending, going_on = bench.add([1] * 8, 9), bench.add([2] * 8, 17)
    for _ in range(5):
        bench.turn()
    bystander = bench.add([3], 8)
    bench.run()
    paused = [plan for plan in bench.recorder.plans if plan.pauses]
    assert paused and all(plan.num_cruising > 0 for plan in paused)
    assert bench.scheduler.num_preemptions == 0
    assert bench.heard[going_on.id] == toy_answer([2] * 8, 17)
    assert bench.heard[ending.id] == toy_answer([1] * 8, 9)
    assert bench.heard[bystander.id] == toy_answer([3], 8)


@DEPTHS
def test_law_a_nothing_goes_back_while_a_step_in_flight_touches_it(depth: int) -> None:
    bench = Bench(depth=depth, blocks=20)
    sequence = bench.add([1] * 8, 30)
    for _ in range(6):
        bench.turn()
    in_flight = bench.scheduler.last_planned - bench.scheduler.last_absorbed
    assert in_flight == depth
    bench.scheduler.abort(sequence.request.id)
    held = bench.scheduler.kv.pool.num_blocks - bench.scheduler.kv.pool.num_free
    assert (held > 0) == (depth > 0)
    bench.run()
    audit_rest(bench.scheduler)


@DEPTHS
@pytest.mark.parametrize("turns", range(12))
def test_an_abort_is_legal_at_every_moment_and_idempotent(depth: int, turns: int) -> None:
    bench = Bench(blocks=7, block_size=2, rows=2, budget=3, depth=depth)
    victim, other = bench.add([5] * 6, 6), bench.add([2, 3], 6)
    for _ in range(turns):
        bench.turn()
    ended = bench.scheduler.abort(victim.request.id)
    assert ended == (() if victim.id in bench.finished else (victim,))
    assert bench.scheduler.abort(victim.request.id) == ()
    silence = len(bench.heard[victim.id])
    bench.run()
    assert len(bench.heard[victim.id]) == silence, "it spoke after its end"
    assert bench.heard[other.id] == toy_answer([2, 3], 6)
    audit_rest(bench.scheduler)


def test_an_end_token_ends_a_sequence_and_counts_as_its_last() -> None:
    bench = Bench()
    sequence = bench.add([1, 2, 3], 50, end_ids=(24,))
    bench.run()
    assert bench.heard[sequence.id] == [6, 12, 24]
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.tokens.tolist() == [1, 2, 3, 6, 12, 24]


def test_a_sequence_alone_may_fill_the_pool_to_the_last_block() -> None:
    for depth in (0, 1, 2):
        bench = Bench(blocks=4, block_size=4, rows=1, depth=depth)
        sequence = bench.add([1] * 4, 13)  # 16 positions are computed: the last token is not
        bench.run()
        assert bench.heard[sequence.id] == toy_answer([1] * 4, 13)
        assert bench.scheduler.num_preemptions == 0


def test_an_unknown_request_can_be_aborted() -> None:
    assert Bench().scheduler.abort(RequestId(17)) == ()


def test_a_runner_refuses_a_plan_out_of_order() -> None:
    bench = Bench()
    bench.add([1], 3)
    bench.turn()
    with pytest.raises(AssertionError, match="was due"):
        bench.recorder.launch(bench.recorder.plans[0])


def test_tokens_of_a_preempted_sequence_are_kept() -> None:
    bench = Bench(blocks=6, block_size=2, rows=2)
    bench.add([1, 1], 9)
    young = bench.add([2, 2], 9)
    while young.num_preemptions == 0:
        bench.turn()
    known = np.concatenate([[2, 2], bench.heard[young.id]])
    assert young.tokens.tolist() == known.tolist()
