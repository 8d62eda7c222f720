"""What was computed before is found again: exactly, not too early, and never across partitions."""

from dataclasses import replace

import pytest

from quire.core.moves import Tier
from quire.core.request import EventKind, Sequence, WaitCause
from quire.core.sampling import RowSampling
from quire.core.step import ChunkOutput
from quire.sched.queue import OrderPolicy
from quire.sched.reference_checks import add_reference_checks
from tests.sched.stepping import NEVER, Bench, counting, events_of, oracle_output

SHARED = counting(1, 10)


def after(bench: Bench, prompt: list[int], max_tokens: int = 3) -> Sequence:
    """A request with this prompt has finished."""
    sequence = bench.add(prompt, max_tokens)
    bench.run_out()
    return sequence


def test_a_hit_is_exact_to_the_token_and_copies_the_partial_block() -> None:
    bench = Bench(oracle=True)
    after(bench, SHARED)
    prompt = [*SHARED[:9], 900, 901]
    second = bench.add(prompt, 4)
    bench.turn()
    (chunk,) = bench.plan.chunks
    (move,) = bench.plan.moves
    assert (chunk.start, chunk.length) == (9, 2)
    assert (move.src.tier, move.dst.tier) == (Tier.DEVICE, Tier.DEVICE)
    assert bench.table(second)[:2] == [1, 2], "whole blocks are shared"
    assert (move.src.block, move.dst.block) == (3, bench.table(second)[2]), "the partial one is copied"
    assert second.group.num_cached == 9
    assert events_of(second, EventKind.ADMITTED)[0].tokens == 9
    bench.run()
    assert bench.emitted[second.id] == oracle_output(prompt, 4)


def test_at_least_one_token_is_always_computed() -> None:
    bench = Bench(oracle=True)
    after(bench, SHARED)
    again = bench.add(SHARED, 4)
    bench.run()
    (chunk,) = bench.chunks_of(again)
    assert (chunk.start, chunk.length, chunk.output) == (9, 1, ChunkOutput.SAMPLE)
    assert bench.emitted[again.id] == oracle_output(SHARED, 4)


def test_the_prefix_of_a_request_that_waits_is_used_by_it() -> None:
    """Of two cached prompts the older one is that of a request which waits for two rows: the other is evicted."""
    bench = Bench(blocks=10, rows=2, oracle=True)
    after(bench, SHARED[:8], max_tokens=1)
    after(bench, counting(400, 8), max_tokens=1)
    bench.add(counting(600, 4), 22)
    bench.turn()
    first, _ = bench.add_group([*SHARED[:8], 900], 2, 2)
    bench.run()
    assert first.group.num_cached == 8


def test_a_follow_up_hits_the_generated_tokens_too() -> None:
    bench = Bench(oracle=True)
    first = after(bench, SHARED, max_tokens=6)
    prompt = [*first.tokens.tolist(), 7]
    second = bench.add(prompt, 4)
    bench.run()
    assert bench.chunks_of(second)[0].start == 15, "all but the last token of the answer was computed"
    assert bench.emitted[second.id] == oracle_output(prompt, 4)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_is_found_before_the_step_that_wrote_it_is_absorbed(depth: int) -> None:
    """The second is of a higher class: it does not wait for the first."""
    bench = Bench(oracle=True, depth=depth)
    first = bench.add(SHARED, 9, priority=1)
    bench.turn()
    second = bench.add([*SHARED, 5], 9, priority=0)
    bench.run()
    assert bench.chunks_of(second)[0].start == (8 if depth == 0 else 0)
    assert bench.emitted[first.id] == oracle_output(SHARED, 9)
    assert bench.emitted[second.id] == oracle_output([*SHARED, 5], 9)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_output_is_matched_only_when_no_step_in_flight_writes_it(depth: int) -> None:
    bench = Bench(oracle=True, depth=depth)
    first = bench.add(SHARED, 40)
    bench.turns(10)
    emitted = list(bench.emitted[first.id])
    assert len(emitted) == 10 - depth
    bench.scheduler.abort(first.request.id)
    prompt = [*SHARED, *emitted, 5]
    second = bench.add(prompt, 3)
    bench.turn()
    assert bench.chunks_of(second)[0].start == (8 if depth else len(SHARED) + len(emitted) - 1)
    bench.run()
    assert bench.emitted[second.id] == oracle_output(prompt, 3)


def test_partitions_never_share() -> None:
    bench = Bench(oracle=True)
    bench.add(SHARED, 3, partition="a")
    bench.run_out()
    other = bench.add(SHARED, 3, partition="b")
    same = bench.add(SHARED, 3, partition="a")
    bench.turn()
    assert bench.chunks_of(other)[0].start == 0 and bench.chunks_of(same)[0].start == 9
    (miss,) = events_of(other, EventKind.MISSED)
    assert miss.tokens == 10 and miss.detail == "other partition"
    assert events_of(same, EventKind.MISSED) == []
    bench.run()


def test_two_partitions_do_not_wait_for_each_other() -> None:
    bench = Bench(oracle=True)
    one, other = bench.add(SHARED, 3, partition="a"), bench.add(SHARED, 3, partition="b")
    bench.turn()
    assert bench.chunks_of(one)[0].length == bench.chunks_of(other)[0].length == 10
    bench.run()


def test_scores_of_the_prompt_are_never_taken_from_the_cache() -> None:
    bench = Bench(oracle=True)
    after(bench, SHARED)
    (scored,) = bench.add_request(SHARED, 2, RowSampling(num_prompt_logprobs=0))
    bench.run()
    (chunk,) = bench.chunks_of(scored)
    assert chunk.start == 0 and ChunkOutput.PROMPT_LOGPROBS in chunk.output


def test_a_preempted_sequence_finds_its_own_past() -> None:
    bench = Bench(oracle=True, rows=1)
    low = bench.add(SHARED, 9, priority=1)
    bench.turns(4)
    bench.add([50], 2, priority=0)
    bench.run()
    assert [chunk.start for chunk in bench.chunks_of(low)] == [0, 13], "13 known, and the 14th computed anew"
    assert bench.emitted[low.id] == oracle_output(SHARED, 9)
    assert bench.scheduler.counters.recomputed_tokens == 0


def test_a_reset_cache_finds_nothing() -> None:
    bench = Bench(oracle=True)
    after(bench, SHARED)
    assert bench.scheduler.reset_cache() == 3
    again = bench.add(SHARED, 2)
    bench.run()
    assert bench.chunks_of(again)[0].start == 0


def test_what_a_poisoned_sequence_wrote_is_never_found() -> None:
    bench = Bench(oracle=True)
    poisoned = bench.add(SHARED, 9)
    bench.turns(3)
    bench.poison(poisoned)
    bench.turn()
    again = bench.add(SHARED, 3)
    bench.run()
    assert bench.chunks_of(again)[0].start == 0
    assert bench.emitted[again.id] == oracle_output(SHARED, 3)


def test_a_row_that_shares_a_prefix_with_a_failed_one_keeps_it_intact() -> None:
    bench = Bench(oracle=True)
    after(bench, SHARED[:8])
    poisoned = bench.add([*SHARED, 1, 2], 9)
    bench.turns(2)
    bench.poison(poisoned)
    bench.turn()
    again = bench.add([*SHARED, 1, 2], 3)
    bench.run()
    assert bench.chunks_of(again)[0].start == 8, "the first two blocks were another's"
    assert bench.emitted[again.id] == oracle_output([*SHARED, 1, 2], 3)


# The host tier.


def test_evicted_blocks_go_to_the_host_and_return_on_a_hit() -> None:
    bench = Bench(oracle=True, blocks=4, host=4)
    after(bench, counting(1, 8), 1)
    large = bench.add(counting(100, 16), 1)
    bench.turn()
    assert [(move.src.tier, move.dst.tier) for move in bench.plan.moves] == [(Tier.DEVICE, Tier.HOST)] * 2
    bench.run_out()
    prompt = [*counting(1, 8), 5]
    back = bench.add(prompt, 2)
    bench.turn()
    assert [(move.src.tier, move.dst.tier) for move in bench.plan.moves] == [(Tier.HOST, Tier.DEVICE)] * 2
    assert bench.chunks_of(back)[0].start == 8
    bench.run()
    assert bench.emitted[back.id] == oracle_output(prompt, 2)
    assert bench.emitted[large.id] == oracle_output(counting(100, 16), 1)


def test_a_partial_block_on_the_host_is_copied_from_there() -> None:
    bench = Bench(oracle=True, blocks=3, host=4)
    after(bench, counting(1, 7), 1)
    after(bench, counting(100, 12), 1)
    prompt = [*counting(1, 6), 500, 501]
    back = bench.add(prompt, 2)
    bench.turn()
    assert bench.chunks_of(back)[0].start == 6
    sources = [move.src.tier for move in bench.plan.moves]
    assert sources == [Tier.HOST, Tier.HOST]
    bench.run()
    assert bench.emitted[back.id] == oracle_output(prompt, 2)


def test_a_block_on_the_host_is_not_overwritten_while_it_is_copied_from() -> None:
    """One block here and one there: to bring the partial block back, what lies here is dropped, not swapped."""
    bench = Bench(oracle=True, blocks=1, host=1)
    after(bench, counting(1, 3), 1)
    after(bench, counting(100, 3), 1)
    back = bench.add([1, 2, 500], 1)
    bench.run()
    assert bench.chunks_of(back)[0].start == 2
    assert bench.emitted[back.id] == oracle_output([1, 2, 500], 1)


def test_two_blocks_that_go_to_the_same_place_in_one_plan_go_there_in_order() -> None:
    bench = Bench(oracle=True, blocks=2, host=1)
    for first in (1, 100):
        after(bench, counting(first, 3), 1)
    for first in (200, 300):
        bench.add(counting(first, 3), 1)
    bench.run_out()
    assert [move.dst.block for move in bench.plan.moves] == [1, 1]
    back = bench.add([100, 101, 500], 1)
    bench.run()
    assert bench.chunks_of(back)[0].start == 2
    assert bench.emitted[back.id] == oracle_output([100, 101, 500], 1)


def test_a_full_host_forgets_the_least_recently_used() -> None:
    bench = Bench(oracle=True, blocks=2, host=2)
    host = bench.scheduler.kv.host
    assert host is not None
    oldest, old, young = counting(1, 8), counting(100, 8), counting(200, 8)
    for prompt in (oldest, old, young):
        after(bench, prompt, 1)
        assert host.num_cached <= 2
    assert host.num_cached == 2
    again = bench.add(old, 1)
    bench.run_out()
    assert bench.chunks_of(again)[0].start == 7
    forgotten = bench.add(oldest, 1)
    bench.run_out()
    assert bench.chunks_of(forgotten)[0].start == 0
    (miss,) = events_of(forgotten, EventKind.MISSED)
    assert miss.detail.startswith("evicted in step")
    bench.run()


def test_without_a_host_tier_the_cache_miss_names_the_evictor() -> None:
    bench = Bench(oracle=True, blocks=2)
    after(bench, counting(1, 8), 1)
    evictor = after(bench, counting(100, 8), 1)
    again = after(bench, counting(1, 8), 1)
    (miss,) = events_of(again, EventKind.MISSED)
    assert (miss.detail, miss.other) == ("evicted in step 1", evictor.request.id)
    assert all(not plan.moves for plan in bench.plans)
    assert not any(event.cause is WaitCause.PREFIX for event in again.group.events)


def test_a_long_prompt_that_is_cached_but_for_its_end_waits_with_the_short_ones() -> None:
    """One row is taken; the long prompts yield to the chat behind them, unless the cache holds them."""
    policy = replace(NEVER, order=OrderPolicy(long_prompt=16, lane_patience_s=100.0))
    bench = Bench(blocks=40, rows=1, policy=policy)
    after(bench, counting(1, 20))
    bench.add([7, 8], 5)
    bench.turn()
    new, cached, chat = bench.add(counting(300, 20), 1), bench.add(counting(1, 19), 1), bench.add([9], 1)
    assert (new.group.num_uncached, cached.group.num_uncached) == (20, 1)
    bench.run_out()
    started = [events_of(sequence, EventKind.ADMITTED)[0].step for sequence in (cached, chat, new)]
    assert started == sorted(started)


def test_a_long_prompt_that_returns_to_the_queue_keeps_its_lane() -> None:
    """Its prompt is cached by then. In another lane, its old place would count again."""
    policy = replace(NEVER, order=OrderPolicy(long_prompt=16, lane_patience_s=100.0))
    bench = Bench(blocks=40, rows=2, policy=policy)
    add_reference_checks(bench.scheduler)
    long = bench.add(counting(1, 20), 9)
    bench.turns(3)
    bench.scheduler.withdraw_all()
    bench.turn()
    chats = [bench.add([number], 2) for number in (5, 6, 7)]
    bench.run_out()
    assert long.group.num_uncached == 20 and all(chat.finished for chat in (long, *chats))
