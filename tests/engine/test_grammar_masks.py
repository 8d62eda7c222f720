"""Grammars on the engine's loop: one that takes too long ends its own sequences only."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import Request, RequestGroup, Sequence
from quire.core.sampling import Grammar, GrammarKind, RowSampling, SamplingParams
from quire.core.step import FinishReason
from quire.core.step_output import StepOutput
from quire.engine import grammar_masks
from quire.engine.engine import Engine
from quire.engine.grammar_masks import GrammarMasks
from quire.engine.messages import AddRequest
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.request_validator import RequestValidator
from quire.grammar import limits
from quire.grammar.compiler import CompiledGrammar
from quire.grammar.matcher import GrammarMatcher, MatcherPool
from quire.grammar.vocabulary import GrammarVocabulary
from quire.kv.manager import KVManager
from quire.sched.audit import audit_rest
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy
from quire.sim.runners import ToyRunner

SLOW, OTHER = Grammar(GrammarKind.REGEX, "[a-z]+"), Grammar(GrammarKind.REGEX, "[0-9]+")


class Clock:
    """A CPU clock by which the next measured call takes `next_s`."""

    def __init__(self) -> None:
        self.next_s = 0.0
        self._now_s = 0.0
        self._within = False

    def __call__(self) -> float:
        if self._within:
            self._now_s += self.next_s
            self.next_s = 0.0
        self._within = not self._within
        return self._now_s


class FakeScheduler:
    """The part of the scheduler that grammars use."""

    def __init__(self) -> None:
        self.concluded: list[tuple[Sequence, FinishReason]] = []
        self.expected: list[tuple[Sequence, int, list[int]]] = []
        self.policy = Policy(speculation=SpeculationPolicy(max_drafts=4))

    def expect(self, sequence: Sequence, start: int, tokens: IntArray) -> None:
        self.expected.append((sequence, start, tokens.tolist()))

    def conclude(self, sequence: Sequence, reason: FinishReason) -> None:
        self.concluded.append((sequence, reason))


class TwoGrammars:
    """Two sequences of a grammar that will be slow, and one of another grammar."""

    def __init__(self, opened: OpenedModel) -> None:
        assert opened.tokenizer is not None
        self.clock = Clock()
        self.grammars = GrammarMasks(
            opened,
            opened.checkpoint.spec.vocab_size,
            cpu_time=self.clock,
            wall_time=self.clock,
            num_threads=2,
        )
        (self.letter,), (self.digit,) = opened.tokenizer.encode("a"), opened.tokenizer.encode("1")
        (self.brace,) = opened.tokenizer.encode('{"')
        self.slow, self.other = _group(0, 2), _group(1, 1)
        self.grammars.begin(self.slow, self.grammars.matchers(SLOW, 2))
        self.grammars.begin(self.other, self.grammars.matchers(OTHER, 1))
        self.scheduler = FakeScheduler()

    def rows_left(self) -> list[bool]:
        return [bool(row.any()) for row in self.masks([*self.slow.sequences, *self.other.sequences])]

    def masks(self, sequences: list[Sequence], drafts: list[list[int]] | None = None) -> IntArray:
        ahead = [np.array(each, np.int32) for each in drafts or [[]] * len(sequences)]
        return self.grammars.masks(sequences, ahead).bits

    def advance(self, sequence: Sequence, token: int) -> None:
        numbers, tokens = np.array([sequence.id], np.int64), np.array([token], np.int32)
        scheduler: Any = self.scheduler
        self.grammars.advance(StepOutput(0, numbers, tokens), scheduler)


def _group(number: int, num_sequences: int) -> RequestGroup:
    prompt = np.array([1], np.int32)
    group = RequestGroup(Request(RequestId(number), prompt, 4, RowSampling(), num_sequences), 10 * number, 0.0)
    for place, sequence in enumerate(group.sequences):
        sequence.row = Row(10 * number + place)
    return group


@pytest.fixture(scope="module")
def opened(default_model_path: object) -> Iterator[OpenedModel]:
    """Its vocabulary is read once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_masks, "GrammarVocabulary", cache(GrammarVocabulary))
        yield open_model(EngineConfig())


@pytest.fixture
def two_grammars(opened: OpenedModel) -> TwoGrammars:
    return TwoGrammars(opened)


def test_a_slow_mask_ends_only_the_sequences_of_its_grammar(two_grammars: TwoGrammars) -> None:
    two_grammars.clock.next_s = limits.FOLLOWING_CPU_S
    assert two_grammars.rows_left() == [True, True, True], "all at once: the next ones are timed one by one"
    two_grammars.clock.next_s = 2 * limits.FOLLOWING_CPU_S
    assert two_grammars.rows_left() == [False, False, True], "the second was never computed"
    assert two_grammars.rows_left() == [False, False, True]


def test_tokens_of_many_sequences_are_consumed_at_once_and_a_slow_one_is_found_next_time(
    two_grammars: TwoGrammars,
) -> None:
    sequences = [*two_grammars.slow.sequences, *two_grammars.other.sequences]
    tokens = np.array([two_grammars.letter, two_grammars.letter, two_grammars.digit], np.int32)
    scheduler: Any = two_grammars.scheduler
    for taken_s, num_ended in ((0.0, 0), (2 * limits.FOLLOWING_CPU_S, 0), (2 * limits.FOLLOWING_CPU_S, 2)):
        two_grammars.clock.next_s = taken_s
        names = np.array([sequence.id for sequence in sequences], np.int64)
        two_grammars.grammars.advance(StepOutput(0, names, tokens), scheduler)
        assert [sequence for sequence, _ in scheduler.concluded] == sequences[:num_ended]


def test_a_matcher_that_panics_ends_its_own_sequence(
    two_grammars: TwoGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others were computed beside it, in the same call: they go on as if it had not been there."""
    bad, good, other = [*two_grammars.slow.sequences, *two_grammars.other.sequences]
    names = np.array([bad.id, good.id, other.id], np.int64)
    before = two_grammars.masks([bad, good, other]).copy()

    class Panic(BaseException):
        """As pyo3's."""

    def advance(pool: MatcherPool, matchers: list[GrammarMatcher], tokens: list[int]) -> list[bool]:
        matchers[1].advance(tokens[1])
        raise Panic

    one_advance = GrammarMatcher.advance
    _, broken = two_grammars.grammars._matchers[bad.id]

    def advance_one(matcher: GrammarMatcher, token: int) -> bool:
        if matcher is broken:
            raise Panic
        return one_advance(matcher, token)

    scheduler: Any = two_grammars.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(MatcherPool, "advance", advance)
        patch.setattr(GrammarMatcher, "advance", advance_one)
        two_grammars.grammars.advance(
            StepOutput(0, names, np.array([two_grammars.letter] * 2 + [two_grammars.digit], np.int32)), scheduler
        )
    assert scheduler.concluded == [(bad, FinishReason.FAILED)]
    after = two_grammars.masks([bad, good, other])
    alone = two_grammars.grammars.matchers(SLOW, 1)[0]
    alone.advance(two_grammars.letter)
    expected = np.zeros_like(after[1])
    assert alone.fill_mask(expected) and (after[1] == expected).all() and (after[2] != before[2]).any()


def test_drafts_have_masks_up_to_the_first_that_the_grammar_does_not_allow(two_grammars: TwoGrammars) -> None:
    """Row by row those of a matcher that consumed them, and the sequences are where they were."""
    one, two, other = sequences = [*two_grammars.slow.sequences, *two_grammars.other.sequences]
    letter, digit = two_grammars.letter, two_grammars.digit
    drafts = [np.array(each, np.int32) for each in ([letter] * 2, [], [digit, letter, digit])]
    alone = two_grammars.masks([other]).copy()
    found = two_grammars.grammars.masks(sequences, drafts)
    assert found.rows.tolist() == [one.row, two.row, other.row, one.row, other.row, one.row] and found.passes == (3, 5)
    matcher = two_grammars.grammars.matchers(OTHER, 1)[0]
    assert matcher.advance(digit)
    right = np.zeros_like(alone[0])
    assert matcher.fill_mask(right) and (found.of_pass(1).bits[1] == right).all() and (right != alone[0]).any()
    assert (found.of_pass(0).bits[2] == alone[0]).all() and (two_grammars.masks([other]) == alone).all()
    assert not len(found.of_pass(3).rows)


def test_a_grammar_that_a_draft_completes_has_no_mask_behind_it(two_grammars: TwoGrammars, opened: OpenedModel) -> None:
    assert opened.tokenizer is not None
    group = _group(3, 1)
    two_grammars.grammars.begin(group, two_grammars.grammars.matchers(Grammar(GrammarKind.CHOICE, '["aa"]'), 1))
    (end, *_), letter = opened.end_ids, two_grammars.letter
    for drafts, num_masks in (([letter, letter, end], 2), ([end], 1), ([letter, end], 2)):
        assert len(two_grammars.masks(list(group.sequences), [drafts])) == num_masks, drafts


def test_a_copy_that_fails_leaves_fewer_masks_and_the_sequence_as_it_was(
    two_grammars: TwoGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other,) = two_grammars.other.sequences

    def fail(matcher: GrammarMatcher, token: int) -> bool:
        raise RuntimeError("no lexer")

    with monkeypatch.context() as patch:
        patch.setattr(GrammarMatcher, "advance", fail)
        assert len(two_grammars.masks([other], [[two_grammars.digit] * 3])) == 1
    assert len(two_grammars.masks([other], [[two_grammars.digit] * 3])) == 4


def test_several_tokens_of_a_sequence_are_consumed_in_order_and_what_is_forced_is_named(
    two_grammars: TwoGrammars, opened: OpenedModel
) -> None:
    assert opened.tokenizer is not None
    group, tokenizer = _group(3, 2), opened.tokenizer
    text = Grammar(GrammarKind.REGEX, "[ab]1 favourite_colour: [0-9]")
    two_grammars.grammars.begin(group, two_grammars.grammars.matchers(text, 2))
    first, second = group.sequences
    scheduler: Any = two_grammars.scheduler
    names, letter, digit = [first.id, second.id, first.id], two_grammars.letter, two_grammars.digit
    tokens = np.array([letter, letter, digit], np.int32)
    two_grammars.grammars.advance(StepOutput(0, np.array(names, np.int64), tokens), scheduler)
    forced = tokenizer.encode(" favourite_colour")
    assert not scheduler.concluded
    assert [(sequence, start) for sequence, start, _ in scheduler.expected] == [(first, 1 + 2), (second, 1 + 1)]
    assert scheduler.expected[0][2][: len(forced)] == forced
    assert scheduler.expected[1][2][: 1 + len(forced)] == [digit, *forced]
    rest = tokenizer.encode(" favourite_colour: ")
    two_grammars.grammars.advance(
        StepOutput(1, np.array([first.id] * len(rest), np.int64), np.array(rest, np.int32)), scheduler
    )
    assert scheduler.expected[2:] == [(first, 3 + len(rest), [])], "nothing is forced any more"


def test_a_grammar_whose_forced_text_takes_long_is_not_asked_again(two_grammars: TwoGrammars) -> None:
    group = _group(3, 1)
    forcing = Grammar(GrammarKind.CHOICE, '["a1a1a1a1"]')
    two_grammars.grammars.begin(group, two_grammars.grammars.matchers(forcing, 1))
    (sequence,) = group.sequences
    clock, expected = two_grammars.clock, two_grammars.scheduler.expected
    two_grammars.advance(sequence, two_grammars.letter)
    assert expected[-1][2]
    slow, times = iter([0.0, 2 * limits.FAILING_CPU_S]), []  # of consuming a token, and of the text that it forces

    def timed() -> float:
        if not clock._within:
            clock.next_s = next(slow, 0.0)
            times.append(clock.next_s)
        return clock()

    two_grammars.grammars._cpu_time = timed
    two_grammars.advance(sequence, two_grammars.digit)
    two_grammars.advance(sequence, two_grammars.letter)
    assert len(times) == 4 and expected[-1][2] == [] and not two_grammars.scheduler.concluded
    assert two_grammars.rows_left() == [True, True, True]


def test_a_slow_token_ends_only_the_sequences_of_its_grammar(two_grammars: TwoGrammars) -> None:
    first = two_grammars.slow.sequences[0]
    two_grammars.clock.next_s = 2 * limits.FOLLOWING_CPU_S
    two_grammars.advance(first, two_grammars.letter)
    assert two_grammars.scheduler.concluded == [(first, FinishReason.GRAMMAR_FAILED)]
    assert two_grammars.rows_left() == [False, False, True]


def test_a_grammar_beyond_its_limits_is_the_clients_mistake_and_a_token_that_no_mask_allowed_is_ours(
    two_grammars: TwoGrammars,
) -> None:
    """The first token of this grammar has a mask; after it, the parser's row is too long."""
    alternatives: dict[str, object] = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
    }
    for _ in range(3):
        alternatives = {"anyOf": [alternatives] * 6}
    too_large = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(alternatives))
    group = _group(2, 1)
    two_grammars.grammars.begin(group, two_grammars.grammars.matchers(too_large, 1))
    two_grammars.advance(group.sequences[0], two_grammars.brace)
    two_grammars.advance(two_grammars.other.sequences[0], two_grammars.brace)
    assert two_grammars.scheduler.concluded == [
        (group.sequences[0], FinishReason.GRAMMAR_FAILED),
        (two_grammars.other.sequences[0], FinishReason.FAILED),
    ]


@pytest.mark.parametrize(("taken_s", "second_goes_on"), [(limits.FAILING_CPU_S, True), (0.1, False)])
def test_a_late_failure_ends_all_sequences_of_its_grammar(
    two_grammars: TwoGrammars, taken_s: float, second_goes_on: bool
) -> None:
    two_grammars.clock.next_s = taken_s
    two_grammars.advance(two_grammars.slow.sequences[0], two_grammars.digit)
    assert two_grammars.rows_left() == [False, second_goes_on, True]


def test_a_request_whose_grammar_cannot_start_is_not_registered(
    two_grammars: TwoGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = RequestValidator(vocab_size=50, end_ids=(), max_length=40, max_rows=4, num_blocks=20, block_size=4)
    scheduler = Scheduler(KVManager(20, 4, 4), max_rows=4, max_step_tokens=8)
    grammars = GrammarMasks(*two_grammars.grammars._vocabulary)
    engine = Engine(scheduler, ToyRunner(50), validator, depth=1, seed=0, clock=lambda: 0.0, grammars=grammars)
    first = engine.submit(AddRequest(0, [1, 2], SamplingParams(max_tokens=4)))
    matcher, made = CompiledGrammar.matcher, []

    def break_the_second(self: CompiledGrammar) -> GrammarMatcher:
        made.append(matcher(self))
        if len(made) == 2:
            raise RuntimeError("no lexer")
        return made[-1]

    order = AddRequest(1, [1, 2], SamplingParams(max_tokens=4, n=2, grammar=OTHER))
    with monkeypatch.context() as patch:
        patch.setattr(CompiledGrammar, "matcher", break_the_second)
        with pytest.raises(RuntimeError, match="no lexer"):
            engine.submit(order)
    assert grammars.num_sequences == 0
    assert [group.request.id for group in scheduler.groups()] == [RequestId(0)]
    assert engine.number_of(first.first_sequence + 1) is None
    outputs = [progress for _ in range(20) if (progress := engine.step()) is not None]
    assert [over.number for progress in outputs for over in progress.finished] == [0]
    audit_rest(scheduler)
    assert engine.submit(order).first_sequence == first.first_sequence + 1, "no sequence id was consumed"
    assert grammars.num_sequences == 2
