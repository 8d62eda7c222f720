"""Grammars on the engine's loop: whoever follows one that takes too long ends, and nobody else."""

from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core.grammar import Grammar, GrammarKind
from quire.core.ids import RequestId
from quire.core.request import Family, Request, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason
from quire.engine.grammars import Grammars
from quire.engine.opening import open_model
from quire.grammar import limits
from quire.sched.scheduler import Absorbed

SLOW, OTHER = Grammar(GrammarKind.REGEX, "[a-z]+"), Grammar(GrammarKind.REGEX, "[0-9]+")


class Clock:
    """The work of a thread, of which the next call that is looked at takes `next_s`."""

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


class Concluding:
    """Of a scheduler, what a grammar needs."""

    def __init__(self) -> None:
        self.concluded: list[tuple[Sequence, FinishReason]] = []

    def conclude(self, sequence: Sequence, reason: FinishReason) -> None:
        self.concluded.append((sequence, reason))


class World:
    """Two continuations of a grammar that will be slow, and one of another."""

    def __init__(self) -> None:
        opened = open_model(EngineConfig())
        assert opened.tokenizer is not None
        self.clock = Clock()
        self.grammars = Grammars(
            opened.tokenizer, opened.end_ids, opened.checkpoint.spec.vocab_size, cpu_time=self.clock
        )
        (self.letter,), (self.digit,) = opened.tokenizer.encode("a"), opened.tokenizer.encode("1")
        self.slow, self.other = _family(0, 2), _family(1, 1)
        self.grammars.begin(self.slow, SLOW)
        self.grammars.begin(self.other, OTHER)
        self.scheduler = Concluding()

    def rows_left(self) -> list[bool]:
        masks = self.grammars.masks([*self.slow.members, *self.other.members])
        return [bool(row.any()) for row in masks]

    def say(self, sequence: Sequence, token: int) -> None:
        numbers, tokens = np.array([sequence.id], np.int64), np.array([token], np.int32)
        scheduler: Any = self.scheduler
        self.grammars.advance(Absorbed(0, numbers, tokens, (), {}, {}, {}), scheduler)


def _family(number: int, num_sequences: int) -> Family:
    prompt = np.array([1], np.int32)
    return Family(Request(RequestId(number), prompt, 4, RowSampling(), num_sequences), 10 * number, 0.0)


@pytest.fixture
def world(default_model_path: object) -> World:
    return World()


def test_a_mask_that_takes_too_long_ends_all_who_follow_its_grammar_and_nobody_else(world: World) -> None:
    world.clock.next_s = limits.FOLLOWING_CPU_S
    assert world.rows_left() == [True, True, True]
    world.clock.next_s = 2 * limits.FOLLOWING_CPU_S
    assert world.rows_left() == [False, False, True], "the second was never computed"
    assert world.rows_left() == [False, False, True]


def test_a_token_that_takes_too_long_ends_all_who_follow_its_grammar_and_nobody_else(world: World) -> None:
    first = world.slow.members[0]
    world.clock.next_s = 2 * limits.FOLLOWING_CPU_S
    world.say(first, world.letter)
    assert world.scheduler.concluded == [(first, FinishReason.FAILED)]
    assert world.rows_left() == [False, False, True]


@pytest.mark.parametrize(("taken_s", "second_goes_on"), [(limits.FAILING_CPU_S, True), (0.1, False)])
def test_one_that_gives_up_late_takes_its_like_along(world: World, taken_s: float, second_goes_on: bool) -> None:
    world.clock.next_s = taken_s
    world.say(world.slow.members[0], world.digit)
    assert world.rows_left() == [False, second_goes_on, True]
