"""Beam search over one request: which continuations live on, which are finished, and when to end.

The selection is that of transformers' `generate`. Knows nothing of rows, blocks or tensors: it reads candidates,
keeps its whole state on the host, and so loses nothing when its beams are preempted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quire.core.ids import FloatArray, IntArray
from quire.core.request import BeamParams, EarlyStopping
from quire.core.step import Candidates, FinishReason


class BeamStep(NamedTuple):
    """The next live beams, best first: beam i continues the present beam `parents[i]` with `tokens[i]`."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]


class Hypothesis(NamedTuple):
    """A finished continuation: what was generated, with its end token if it has one, and its normalised score."""

    tokens: tuple[int, ...]
    score: float
    finish_reason: FinishReason


class _Path(NamedTuple):
    """Generated tokens as a chain, so that a step costs the same at any length."""

    before: "_Path | None"
    token: int


class _Beam(NamedTuple):
    path: _Path | None
    score: np.float32  # the sum of log-probabilities, not normalised


class _Finished(NamedTuple):
    path: _Path
    score: np.float32  # normalised
    finish_reason: FinishReason


class _Continuation(NamedTuple):
    parent: int
    token: int
    score: np.float32


class BeamSearch:
    """Told the candidates of every live beam, says which beams live next. All sums are float32, as in transformers."""

    __slots__ = ("_done", "_end_ids", "_finished", "_live", "_max_tokens", "_min_tokens", "_num_generated", "_params")

    def __init__(
        self, params: BeamParams, num_prompt: int, max_length: int, end_ids: Sequence[int], min_tokens: int = 0
    ) -> None:
        assert 1 <= params.num_returned <= params.width and max_length > num_prompt, params
        self._params = params
        self._max_tokens = max_length - num_prompt
        self._min_tokens = min_tokens
        self._end_ids = frozenset(end_ids)
        self._live: tuple[_Beam, ...] = (_Beam(None, np.float32(0)),)
        self._finished: list[_Finished] = []  # best first, `width` at most
        self._num_generated = 0
        self._done = False

    @property
    def num_candidates(self) -> int:
        """How many candidates each row gives back (all it has, in a smaller vocabulary).

        Even if every beam proposes every end token, `width` other continuations are left.
        """
        return max(2, 1 + len(self._end_ids)) * self._params.width

    @property
    def done(self) -> bool:
        return self._done

    @property
    def live(self) -> tuple[tuple[int, ...], ...]:
        """What each live beam has generated so far, in their order."""
        return tuple(_tokens(beam.path) for beam in self._live)

    def advance(self, candidates: Sequence[Candidates]) -> BeamStep | None:
        """Take one step, given the candidates of each live beam in order. None: the search is over.

        There are `width` live beams after the first step, or fewer where the candidates do not suffice for so many.
        """
        assert not self._done and len(candidates) == len(self._live), (self._done, len(candidates), len(self._live))
        ranked = self._rank(candidates)
        self._num_generated += 1
        chosen: list[_Continuation] = []
        for rank, continuation in enumerate(ranked):
            reason = self._finish_reason(continuation.token)
            if reason is None:
                chosen.append(continuation)
            elif rank < self._params.width:  # the others are there only to fill up the live beams
                self._finish(continuation, reason)
        del chosen[self._params.width :]
        self._live = tuple(_Beam(_Path(self._live[c.parent].path, c.token), c.score) for c in chosen)
        self._done = not self._live or self._cannot_improve()
        if self._done:
            self._live = ()
            return None
        return BeamStep(tuple(c.parent for c in chosen), tuple(c.token for c in chosen))

    def results(self) -> tuple[Hypothesis, ...]:
        """The best hypotheses, best first; fewer than asked for only if too few continuations were possible."""
        assert self._done, self._num_generated
        best = self._finished[: self._params.num_returned]
        return tuple(Hypothesis(_tokens(one.path), float(one.score), one.finish_reason) for one in best)

    def _rank(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        """The best continuations of all beams together, best first; among equals the better beam's."""
        ids: IntArray = np.concatenate([row.ids for row in candidates])
        parents = np.repeat(np.arange(len(candidates)), [len(row.ids) for row in candidates])
        sums = [beam.score + row.logprobs.astype(np.float32) for beam, row in zip(self._live, candidates, strict=True)]
        scores: FloatArray = np.concatenate(sums)
        possible = np.isfinite(scores)  # a forbidden token has the log-probability -inf
        if self._num_generated < self._min_tokens:
            possible &= ~np.isin(ids, list(self._end_ids))
        order = np.argsort(np.where(possible, -scores, np.inf), kind="stable")
        best = order[: min(self.num_candidates, int(possible.sum()))]
        return [_Continuation(int(parents[i]), int(ids[i]), scores[i]) for i in best]

    def _finish_reason(self, token: int) -> FinishReason | None:
        if token in self._end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._num_generated == self._max_tokens else None

    def _finish(self, continuation: _Continuation, reason: FinishReason) -> None:
        """Keep it if it is among the `width` best; of equals the older stays."""
        path = _Path(self._live[continuation.parent].path, continuation.token)
        score = self._normalised(continuation.score, self._num_generated)
        self._finished.append(_Finished(path, score, reason))
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self._params.width :]

    def _normalised(self, score: np.float32, num_generated: int) -> np.float32:
        return np.float32(score / np.float32(num_generated**self._params.length_penalty))

    def _cannot_improve(self) -> bool:
        """Whether the finished hypotheses are `width`, and no live beam is taken to be able to beat the worst."""
        if len(self._finished) < self._params.width:
            return False
        stopping = self._params.early_stopping
        if stopping is EarlyStopping.WHEN_FULL or self._params.width == 1:  # one beam is greedy decoding, as there
            return True
        longest = stopping is EarlyStopping.NEVER and self._params.length_penalty > 0
        best = self._normalised(self._live[0].score, self._max_tokens if longest else self._num_generated)
        return not best > self._finished[-1].score


def _tokens(path: _Path | None) -> tuple[int, ...]:
    return tuple(_backwards(path))[::-1]


def _backwards(path: _Path | None) -> Iterator[int]:
    while path is not None:
        yield path.token
        path = path.before
