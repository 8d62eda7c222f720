"""Rows with a grammar mask: every mask is computed from the tokens actually sampled, at any depth."""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import IntArray, RequestId, Row, SequenceId
from quire.core.oracle import total
from quire.core.request import Request, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason, Masks, Pending, StepLost, StepPlan, StepResult
from quire.core.step_output import StepOutput
from quire.kv.manager import KVManager
from quire.sched.audit import audit
from quire.sched.loop import Loop
from quire.sched.policy import Policy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from quire.sim.runners import OracleRunner, first_allowed
from tests.sched.inspection import state_of
from tests.tiers import examples

VOCAB = 40
NO_DRAFTS = SpeculationPolicy()
WORDS = 2


def mask_after(generated: Many[int], index: int) -> IntArray:
    """What may follow: a third of the vocabulary, another one after every token."""
    allowed = [(token + 7 * len(generated) + 3 * sum(generated) + index) % 3 == 0 for token in range(64)]
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


# What the grammar says is forced after these tokens of a request: right or not, the output is the same.
Forcing = Callable[[Request, int, list[int]], list[int]]


class Grammar:
    """Computes masks from the tokens passed to it."""

    def __init__(self, forcing: Forcing | None) -> None:
        self.forcing = forcing
        self.sampled: dict[SequenceId, list[int]] = {}
        self.concludes_after: dict[SequenceId, int] = {}
        self.fails_after: dict[SequenceId, int] = {}

    def masks(self, sequences: Many[Sequence], drafts: Many[IntArray]) -> Masks:
        passes: list[list[tuple[Row, IntArray]]] = [[]]
        for each, ahead in zip(sequences, drafts, strict=True):
            assert each.row is not None
            known = list(self.sampled.setdefault(each.id, []))
            if len(known) == self.fails_after.get(each.id):
                raise ZeroDivisionError
            passes[0].append((each.row, mask_after(known, each.index)))
            for number, token in enumerate(ahead.tolist(), 1):
                allowed = passes[number - 1][-1][1][token >> 5] >> (token & 31) & 1
                known.append(token)
                if not allowed or len(known) == self.concludes_after.get(each.id):
                    break
                passes[number:] = passes[number:] or [[]]
                passes[number].append((each.row, mask_after(known, each.index)))
        flat = [pair for each in passes for pair in each]
        starts = tuple(accumulate(len(each) for each in passes[:-1]))
        bits = np.array([bits for _, bits in flat], dtype=np.int32).reshape(-1, WORDS)
        return Masks(np.array([row for row, _ in flat], dtype=np.int32), bits, starts)

    def advance(self, output: StepOutput, scheduler: Scheduler) -> None:
        for number, token in zip(output.sequences.tolist(), output.tokens.tolist(), strict=True):
            tokens = self.sampled.setdefault(SequenceId(number), [])
            tokens.append(token)
            found = [s for group in scheduler.groups() for s in group.sequences if s.id == number]
            if len(tokens) == self.concludes_after.get(SequenceId(number)):
                scheduler.conclude(found[0], FinishReason.STOP)
            elif self.forcing is not None and found and found[0].request.sampling.masked:
                forced = self.forcing(found[0].request, found[0].index, tokens)
                start = len(found[0].request.prompt) + len(tokens)
                scheduler.expect(found[0], start, np.array(forced, dtype=np.int32))


class LoggedRunner:
    """The oracle, with the order of what the loop does to it, and a step that fails when it is sampled."""

    def __init__(self, num_blocks: int, events: list[str]) -> None:
        self.oracle = OracleRunner(num_blocks, 4, VOCAB)
        self.events = events
        self.fails_at: tuple[int, Exception] | None = None

    def launch(self, plan: StepPlan) -> "LoggedStep":
        self.events.append(f"launch {plan.step}")
        return LoggedStep(self, plan.step, self.oracle.launch(plan))


class LoggedStep(NamedTuple):
    runner: LoggedRunner
    step: int
    pending: Pending

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.pending.drafted

    def sample(self, masks: Masks) -> None:
        self.runner.events.append(f"masks {self.step}")
        fails_at = self.runner.fails_at
        if fails_at is not None and fails_at[0] == self.step:
            self.runner.fails_at = None
            raise fails_at[1]
        self.pending.sample(masks)

    def wait(self) -> StepResult:
        self.runner.events.append(f"wait {self.step}")
        return self.pending.wait()


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
        forcing: Forcing | None = None,
        speculation: SpeculationPolicy = NO_DRAFTS,
    ) -> None:
        self.scheduler = Scheduler(
            KVManager(num_blocks, 4, max_rows),
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            policy=Policy(overcommit=overcommit, speculation=speculation),
        )
        self.grammar = Grammar(forcing)
        self.events: list[str] = []
        self.runner = LoggedRunner(num_blocks, self.events)
        self.loop = Loop(self.scheduler, self.runner, depth, lambda: 0.0, self.grammar.masks, self._receive)
        self.sampled: dict[SequenceId, list[int]] = {}
        self.sequences: list[Sequence] = []

    def add(self, number: int, prompt: list[int], max_tokens: int, *, masked: bool, n: int = 1, ends: int = 0) -> None:
        sampling = RowSampling(masked=masked, end_ids=tuple(range(ends)))
        request = Request(RequestId(number), np.array(prompt, dtype=np.int32), max_tokens, sampling, num_sequences=n)
        self.sequences += self.scheduler.add(request)

    def turn(self) -> None:
        absorbed = self.loop.step()
        audit(self.scheduler)
        if absorbed is not None:
            for number, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
                self.sampled.setdefault(SequenceId(number), []).append(token)

    def _receive(self, output: StepOutput) -> StepOutput:
        self.grammar.advance(output, self.scheduler)
        return output

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
    assert not state_of(bench.scheduler).masked_rows and not bench.scheduler.has_masked


def right_drafts(request: Request, index: int, sampled: list[int]) -> list[int]:
    return expected(request, index)[len(sampled) :]


JUMPING = SpeculationPolicy(max_drafts=3, governed=False, text=False)


@settings(deadline=None, max_examples=examples(30, 150))
@given(st.integers(0, 1), st.integers(28, 60), st.lists(requests, min_size=1, max_size=5), st.integers(0, 10**6))
def test_what_a_grammar_forces_is_verified_and_changes_no_output(depth, num_blocks, requested, seed):
    """Forced tokens that are right, wrong, or right up to some place, of rows that end, fork and are preempted."""

    def forcing(request: Request, index: int, sampled: list[int]) -> list[int]:
        chance = random.Random(seed + sum(sampled) + len(sampled))
        forced = right_drafts(request, index, sampled)[: chance.randint(0, 5)]
        return [token if chance.random() < 0.8 else chance.randrange(VOCAB) for token in forced]

    bench = GrammarBench(depth, num_blocks, overcommit=Overcommit.OPTIMISTIC, forcing=forcing, speculation=JUMPING)
    for number, (prompt, max_tokens, masked, n, ends) in enumerate(requested):
        bench.add(number, prompt, max_tokens, masked=masked, n=n, ends=ends)
    bench.run()
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index), sequence
    assert not state_of(bench.scheduler).forced


@pytest.mark.parametrize(("depth", "num_accepted"), [(0, 15), (1, 14)])
def test_forced_tokens_are_emitted_in_one_step(depth, num_accepted):
    """One token of 21 comes with the prompt, then four in each step: 6 steps. With a step in flight, the grammar knows
    nothing yet when the second is planned."""
    bench = GrammarBench(depth, 60, forcing=right_drafts, speculation=JUMPING)
    bench.add(0, [5, 6], 21, masked=True)
    bench.run()
    (sequence,) = bench.sequences
    assert bench.sampled[sequence.id] == expected(sequence.request, 0)
    counters = bench.scheduler.counters
    assert counters.drafted_tokens == counters.accepted_tokens == num_accepted == sequence.group.num_accepted
    assert bench.scheduler.last_absorbed + 1 == 21 - num_accepted + depth, "and one in flight when it ended"


@pytest.mark.parametrize("depth", [0, 1])
def test_each_row_is_masked_behind_its_own_drafts(depth):
    bench = GrammarBench(depth, 60, forcing=right_drafts, speculation=JUMPING)
    for number, prompt in enumerate([[5, 6], [7, 1, 2], [9]]):
        bench.add(number, prompt, 18 + number, masked=True)
    bench.run()
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index), sequence
    counters = bench.scheduler.counters
    assert counters.drafted_tokens == counters.accepted_tokens > 30


def test_what_was_forced_is_forgotten_when_nothing_is():
    """Three wrong tokens of six are drafted once: then the grammar forces nothing."""
    bench = GrammarBench(
        0, 60, forcing=lambda request, index, sampled: [VOCAB] * 6 * (len(sampled) == 1), speculation=JUMPING
    )
    bench.add(0, [5, 6], 8, masked=True)
    bench.run()
    assert bench.scheduler.counters.drafted_tokens == 3 and not bench.scheduler.counters.accepted_tokens


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_behind_the_end_of_a_grammar_are_not_emitted(depth):
    bench = GrammarBench(depth, 60, forcing=right_drafts, speculation=JUMPING)
    bench.add(0, [5, 6], 21, masked=True)
    bench.grammar.concludes_after = {bench.sequences[0].id: 7}
    bench.run()
    (sequence,) = bench.sequences
    assert bench.sampled[sequence.id] == expected(sequence.request, 0)[:7]
    assert sequence.finish_reason is FinishReason.STOP


def test_only_rows_under_a_grammar_draft_where_nothing_else_is_drafted():
    bench = GrammarBench(0, 60, forcing=right_drafts, speculation=JUMPING)
    bench.add(0, [5, 6], 12, masked=False)
    bench.add(1, [7], 12, masked=True)
    bench.run()
    plain, masked = bench.sequences
    assert plain.group.num_drafted == 0 and masked.group.num_drafted > 0
    assert JUMPING.jumps and not SpeculationPolicy().jumps


@pytest.mark.parametrize("depth", [0, 1])
def test_where_graphs_verify_drafts_a_row_under_a_grammar_drafts_only_what_it_forces(depth):
    """Beside a row that drafts from its text; where nothing is forced, it has no drafts."""

    def forcing(request: Request, index: int, sampled: list[int]) -> list[int]:
        return right_drafts(request, index, sampled) if len(sampled) % 8 < 3 else []

    bench = GrammarBench(depth, 60, forcing=forcing, speculation=SpeculationPolicy(3, governed=False, max_verified=9))
    bench.add(0, [5, 6], 20, masked=True)
    bench.add(1, [7], 20, masked=False)
    plans, launch = [], bench.runner.oracle.launch
    bench.runner.oracle.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    bench.run()
    masked, plain = bench.sequences
    for plan in plans:
        drafting, forced = set(plan.drafts.rows.tolist()), {span.row for span in plan.forced}
        assert drafting & set(plan.masked) == forced
        assert not plan.chunks or not drafting
    assert any(plan.forced and len(plan.drafts) == 2 for plan in plans)
    assert masked.group.num_accepted > 3, plain
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_grammar_row_gets_a_token_in_every_step(depth):
    """It neither skips a step nor makes the rows beside it skip one, and its tokens are those of depth 0."""
    bench = GrammarBench(depth, 60)
    bench.add(0, [5, 6], 20, masked=True)
    bench.add(1, [7], 20, masked=False)
    bench.run()
    assert [len(bench.sampled[sequence.id]) for sequence in bench.sequences] == [20, 20]
    assert bench.scheduler.last_absorbed + 1 == 20
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_forward_pass_is_launched_before_its_masks_are_known(depth):
    """Order of events: the device has the next step while the host reads the last one and computes masks."""
    bench = GrammarBench(depth, 60)
    bench.add(0, [5, 6], 6, masked=True)
    bench.run()
    steps = [f"launch {step} wait {step - 1} masks {step}" for step in range(1, 6)]
    assert " ".join(bench.events) == " ".join(["launch 0 masks 0", *steps, "wait 5"])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_without_a_grammar_run_ahead_as_before(depth):
    bench = GrammarBench(depth, 60)
    bench.add(0, [5, 6], 6, masked=False)
    bench.turn()
    assert [event for event in bench.events if event.startswith("wait")] == ["wait 0"][depth > 0 :]
    for _ in range(depth):
        bench.turn()
    assert bench.events[-1] == "wait 0" and len(bench.loop._in_flight) == depth
    bench.add(1, [7], 6, masked=True)
    bench.run()
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_lost_step_loses_no_mask(depth):
    bench = GrammarBench(depth, 60)
    bench.add(0, [5, 6], 12, masked=True, n=2)
    for turn in range(6):
        bench.turn()
        if turn == 4:
            bench.loop._forget_steps()
            bench.scheduler.lose_steps(keep_cache=True)
    bench.run()
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("error", [StepLost("gone"), ZeroDivisionError()])
def test_masks_that_arrive_for_a_failing_step_lose_no_token(depth, error):
    """The step before was absorbed in the same turn: its tokens are returned."""
    bench = GrammarBench(depth, 60)
    bench.runner.fails_at = 4, error
    bench.add(0, [5, 6], 12, masked=True)
    bench.add(1, [8], 12, masked=False)
    bench.run()
    for sequence in bench.sequences:
        assert bench.sampled[sequence.id] == expected(sequence.request, sequence.index)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_lost_step_that_was_the_last_waits_for_no_masks(depth):
    bench = GrammarBench(depth, 60)
    bench.runner.fails_at = 4, StepLost("no memory", too_large=True)
    bench.add(0, [5, 6], 12, masked=True)
    bench.run()
    (sequence,) = bench.sequences
    assert sequence.finish_reason is FinishReason.OUT_OF_MEMORY
    assert bench.sampled[sequence.id] == expected(sequence.request, 0)[:4]
    num_events = len(bench.events)
    bench.turn()
    assert len(bench.events) == num_events


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_grammar_that_ends_a_sequence_needs_no_further_mask(depth):
    """Its next step is already launched: it samples without a mask, and the token is dropped."""
    bench = GrammarBench(depth, 60)
    bench.add(0, [5, 6], 12, masked=True)
    bench.add(1, [8], 12, masked=True)
    bench.grammar.concludes_after = {bench.sequences[0].id: 5}
    bench.run()
    first, second = bench.sequences
    assert bench.sampled[first.id] == expected(first.request, 0)[:5] and first.finish_reason is FinishReason.STOP
    assert bench.sampled[second.id] == expected(second.request, 0)


def test_a_request_whose_masks_cannot_be_computed_fails_alone() -> None:
    bench = GrammarBench(1, 60)
    bench.add(0, [5, 6], 12, masked=True)
    bench.add(1, [8], 12, masked=True)
    bench.grammar.fails_after = {bench.sequences[0].id: 5}
    bench.run()
    first, second = bench.sequences
    assert first.finish_reason is FinishReason.FAILED and second.finish_reason is FinishReason.LENGTH
    assert bench.sampled[second.id] == expected(second.request, 0)


def test_a_preempted_row_continues_under_the_mask_of_all_its_tokens() -> None:
    """Its last token is in flight when it is preempted."""
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
