"""Rows with a grammar mask: every mask is computed from the tokens actually sampled, at any depth."""

from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import IntArray, RequestId, SequenceId
from quire.core.oracle import total
from quire.core.request import Request, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason
from quire.kv.manager import KVManager
from quire.sched.audit import audit
from quire.sched.loop import Loop
from quire.sched.policy import Policy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler
from quire.sim.runners import OracleRunner, first_allowed
from tests.sched.inspection import state_of
from tests.tiers import examples

VOCAB = 40
WORDS = 2


def mask_after(generated: Many[int], index: int) -> IntArray:
    """What may follow: a third of the vocabulary, another one after every token."""
    allowed = [(token + 7 * len(generated) + 3 * sum(generated) + index) % 3 == 0 for token in range(64)]
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


class Grammar:
    """Computes masks from the tokens passed to it."""

    def __init__(self) -> None:
        self.sampled: dict[SequenceId, list[int]] = {}

    def masks(self, sequences: Many[Sequence]) -> IntArray:
        return np.stack([mask_after(self.sampled.setdefault(each.id, []), each.index) for each in sequences])


def expected(request: Request, index: int) -> list[int]:
    """By hand: the oracle's token, or the next that the mask allows."""
    sampled: list[int] = []
    while len(sampled) < request.max_tokens:
        token = (total(np.concatenate([request.prompt, np.array(sampled, dtype=np.int32)])) + index) % VOCAB
        if request.sampling.masked:
            token = first_allowed(token, mask_after(sampled, index), VOCAB)
        sampled.append(token)
        if token in request.sampling.end_ids:
            break
    return sampled


class GrammarBench:
    def __init__(
        self,
        depth: int,
        num_blocks: int,
        max_rows: int = 4,
        max_step_tokens: int = 12,
        overcommit: Overcommit = Overcommit.HEDGE,
    ) -> None:
        self.scheduler = Scheduler(
            KVManager(num_blocks, 4, max_rows),
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            policy=Policy(overcommit=overcommit),
        )
        self.grammar = Grammar()
        runner = OracleRunner(num_blocks, 4, VOCAB)
        self.loop = Loop(self.scheduler, runner, depth, lambda: 0.0, self.grammar.masks)
        self.sampled: dict[SequenceId, list[int]] = {}
        self.sequences: list[Sequence] = []

    def add(self, number: int, prompt: list[int], max_tokens: int, *, masked: bool, n: int = 1, ends: int = 0) -> None:
        sampling = RowSampling(masked=masked, end_ids=tuple(range(ends)))
        request = Request(RequestId(number), np.array(prompt, dtype=np.int32), max_tokens, sampling, num_sequences=n)
        self.sequences += self.scheduler.add(request)

    def turn(self) -> None:
        absorbed = self.loop.step()
        audit(self.scheduler)
        if absorbed is None:
            return
        for number, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
            self.sampled.setdefault(SequenceId(number), []).append(token)
            self.grammar.sampled.setdefault(SequenceId(number), []).append(token)

    def run(self) -> None:
        for _ in range(2000):
            if self.scheduler.idle:
                return
            self.turn()
        raise AssertionError("they never finished")


requests = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=18),
    st.integers(1, 14),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2),
)


@settings(deadline=None, max_examples=examples(50, 150))
@given(st.integers(0, 2), st.integers(28, 60), st.lists(requests, min_size=1, max_size=6), st.data())
def test_every_token_follows_its_mask_and_the_oracle(depth, num_blocks, requested, data):
    bench = GrammarBench(depth, num_blocks)
    for number, (prompt, max_tokens, masked, n, ends) in enumerate(requested):
        bench.add(number, prompt, max_tokens, masked=masked, n=n, ends=ends)
    aborted = data.draw(st.sets(st.integers(0, len(requested) - 1), max_size=1))
    for number in aborted:
        for _ in range(data.draw(st.integers(0, 20))):
            bench.turn()
        bench.scheduler.abort(RequestId(number))
    bench.run()
    for sequence in bench.sequences:
        right = expected(sequence.request, sequence.index)
        sampled = bench.sampled.get(sequence.id, [])
        if sequence.finish_reason is FinishReason.ABORT:
            assert sampled == right[: len(sampled)]
        else:
            assert sampled == right, sequence
    assert not len(state_of(bench.scheduler).grammar_rows)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_grammar_row_samples_in_every_step_that_can_know_its_last_token(depth):
    """Between two of its tokens lie as many steps as fly ahead; the others lose none."""
    bench = GrammarBench(depth, 60)
    bench.add(0, [5, 6], 8, masked=True)
    bench.add(1, [7], 8 * (depth + 1), masked=False)
    bench.run()
    assert [len(bench.sampled[sequence.id]) for sequence in bench.sequences] == [8, 8 * (depth + 1)]
    assert bench.scheduler.last_absorbed + 1 <= 8 * (depth + 1) + depth


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_lost_step_loses_no_mask(depth):
    bench = GrammarBench(depth, 60)
    bench.add(0, [5, 6], 12, masked=True, n=2)
    for turn in range(6):
        bench.turn()
        if turn == 4:
            bench.loop._in_flight.clear()
            bench.scheduler.lose_steps(keep_cache=True)
    bench.run()
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index)


def test_a_row_is_preempted_while_it_waits_for_its_mask() -> None:
    """What it computed is charged and counted once: the step that it would have skipped is not one of them."""
    bench = GrammarBench(depth=1, num_blocks=3, max_rows=2, overcommit=Overcommit.OPTIMISTIC)
    bench.add(0, [1, 2, 3, 4], 9, masked=False)
    for _ in range(4):  # it holds two blocks and needs the third in step 5
        bench.turn()
    bench.add(1, [30, 31, 32], 4, masked=True)
    bench.turn()  # the last block
    assert bench.scheduler.counters.preemptions == 0
    bench.turn()
    assert bench.scheduler.counters.preemptions == 1, "its first token is in flight"
    bench.run()
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index)
    assert bench.scheduler.counters.recomputed_tokens == 3


def test_a_row_that_waits_for_its_mask_uses_no_budget() -> None:
    bench = GrammarBench(depth=1, num_blocks=20, max_rows=2, max_step_tokens=4)
    bench.add(0, [1], 9, masked=True)
    bench.add(1, list(range(17)), 1, masked=False)
    computed = []
    for _ in range(4):
        before = bench.scheduler.counters.computed_tokens
        bench.turn()
        computed.append(bench.scheduler.counters.computed_tokens - before)
    assert computed == [4, 4, 4, 4], "3 tokens of the prompt beside the row, and 4 while it waits"
    bench.run()
