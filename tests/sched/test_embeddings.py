"""Pooled prompts (embeddings): every position is computed once, one sum, no token; other requests are unaffected."""

from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.oracle import pooled
from quire.core.request import EventKind, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import ChunkOutput, FinishReason
from quire.sched.fairness import ServiceCost
from quire.sched.policy import Policy
from tests.sched.inspection import state_of
from tests.sched.stepping import Bench, counting, events_of, oracle_output

PROMPT = counting(5, 10)


def embed(bench: Bench, prompt: Many[int], **also: object) -> Sequence:
    (sequence,) = bench.add_request(prompt, 1, RowSampling(pooled=True), **also)
    return sequence


def closed_form(prompt: Many[int]) -> float:
    return pooled(np.array(prompt, np.int32))


def test_the_sum_by_hand() -> None:
    """The toy's hidden states are the sums so far: 3, 7, 12."""
    bench = Bench()
    sequence = embed(bench, [3, 4, 5])
    bench.run()
    assert bench.pooled == {sequence.id: 22.0}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [1, 3, 4, 10, 64])
def test_one_sum_and_no_token_whatever_the_chunks(depth: int, budget: int) -> None:
    bench = Bench(oracle=True, depth=depth, budget=budget, rows=1)
    sequence = embed(bench, PROMPT)
    bench.run()
    assert bench.pooled == {sequence.id: closed_form(PROMPT)}
    assert bench.emitted[sequence.id] == [] and sequence.tokens.tolist() == PROMPT
    assert sequence.finish_reason is FinishReason.STOP and sequence.id in bench.finished
    assert not events_of(sequence, EventKind.FIRST_TOKEN)
    assert all(chunk.output is ChunkOutput.POOLED for chunk in bench.chunks_of(sequence))
    assert bench.scheduler.counters.computed_tokens == len(PROMPT)


def test_nothing_is_taken_from_the_cache_and_all_is_left_to_it() -> None:
    bench = Bench(oracle=True)
    bench.add(PROMPT, 2)
    bench.run_out()
    sequence = embed(bench, PROMPT)
    bench.run_out()
    assert [chunk.start for chunk in bench.chunks_of(sequence)] == [0]
    other = embed(bench, counting(40, 9))
    bench.run_out()
    later = bench.add([*counting(40, 9), 1], 2)
    bench.run()
    assert other.id in bench.pooled
    assert [chunk.start for chunk in bench.chunks_of(later)] == [9], "all that it computed was found"


def test_it_waits_for_no_other_prefix() -> None:
    bench = Bench(oracle=True, budget=12, rows=3)
    first, second = bench.add(PROMPT, 3), embed(bench, PROMPT)
    bench.turn()
    assert [chunk.length for chunk in bench.plan.chunks] == [10, 2], "both are computed in the same step"
    bench.run()
    assert bench.pooled[second.id] == closed_form(PROMPT) and bench.emitted[first.id] == oracle_output(PROMPT, 3)


def test_a_tenant_pays_for_the_prompt_alone() -> None:
    bench, prices = Bench(oracle=True), ServiceCost()
    embed(bench, PROMPT, tenant="a")
    bench.run()
    assert state_of(bench.scheduler).shares.total("a") == pytest.approx(10 * prices.prefill + 3 * prices.block_step)


def test_output_lengths_are_learned_from_requests_that_sample() -> None:
    bench = Bench(oracle=True)
    lengths = state_of(bench.scheduler).output_lengths
    before = lengths.hedge(40, 0)
    for first in range(0, 80, 4):  # more than it takes to count as learned
        embed(bench, counting(first, 5))
    bench.run()
    assert lengths.hedge(40, 0) == before


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_preempted_embedding_starts_from_the_beginning(depth: int) -> None:
    bench = Bench(oracle=True, rows=1, budget=4, depth=depth)
    prompt = counting(5, 40)
    low = embed(bench, prompt, priority=1)
    bench.turns(1 + depth)
    high = bench.add([50], 2, priority=0)
    bench.run()
    assert bench.pooled == {low.id: closed_form(prompt)} and bench.emitted[high.id] == oracle_output([50], 2)
    assert [chunk.start for chunk in bench.chunks_of(low)].count(0) == 2


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_aborted_embedding_is_not_reported(depth: int) -> None:
    bench = Bench(oracle=True, depth=depth, budget=10)
    sequence = embed(bench, PROMPT)
    if depth:  # its only step is in flight
        assert bench.turn() is None
    bench.scheduler.abort(sequence.request.id)
    bench.run()
    assert bench.pooled == {} and sequence.finish_reason is FinishReason.ABORT


def test_a_non_finite_embedding_fails_alone() -> None:
    bench = Bench(oracle=True)
    sequence, other = embed(bench, PROMPT), bench.add([7], 3)
    bench.poison(sequence)
    bench.run()
    assert sequence.finish_reason is FinishReason.ERROR and bench.pooled == {}
    assert bench.emitted[other.id] == oracle_output([7], 3)


def test_lost_steps_are_computed_again() -> None:
    bench = Bench(oracle=True, budget=4, rows=2)
    sequence = embed(bench, PROMPT)
    bench.turns(2)
    bench.scheduler.lose_steps(keep_cache=True)
    bench.run()
    assert bench.pooled == {sequence.id: closed_form(PROMPT)}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), depth=st.sampled_from([0, 1, 2]), budget=st.integers(4, 12), blocks=st.integers(8, 20))
def test_among_others_in_a_small_pool(data: st.DataObject, depth: int, budget: int, blocks: int) -> None:
    """Any mix of requests, in any order, with any aborts: a finished one equals the closed form."""
    bench = Bench(oracle=True, depth=depth, budget=budget, blocks=blocks, rows=4, policy=Policy(max_preemptions=3))
    asked: list[tuple[Sequence, list[int], int | None]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=16))
        num_tokens = data.draw(st.none() | st.integers(1, 8))
        priority = data.draw(st.integers(0, 1))
        made = (
            embed(bench, prompt, priority=priority)
            if num_tokens is None
            else bench.add(prompt, num_tokens, priority=priority)
        )
        asked.append((made, prompt, num_tokens))
        bench.turns(data.draw(st.integers(0, 3)))
        if data.draw(st.integers(0, 5)) == 0:
            bench.scheduler.abort(data.draw(st.sampled_from(asked))[0].request.id)
    bench.run()
    for sequence, prompt, num_tokens in asked:
        if sequence.finish_reason is FinishReason.ABORT:
            continue
        if num_tokens is None:
            assert bench.pooled[sequence.id] == closed_form(prompt)
            assert sequence.finish_reason is FinishReason.STOP and bench.emitted[sequence.id] == []
        else:
            assert sequence.id not in bench.pooled
            assert bench.emitted[sequence.id] == oracle_output(prompt, num_tokens)
