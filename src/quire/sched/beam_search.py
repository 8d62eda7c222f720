"""Beam search: selects the live beams, and updates the rows and blocks of the group.

`BeamSearch` selects like transformers' `generate`. It does not depend on rows, blocks or tensors: it reads candidates
and keeps its whole state on the host, so a preemption loses nothing.

`BeamGroups` applies each selection to the scheduler. A beam that continues alone stays in its row and appends its
token. Where one beam becomes several, the others take the rows of dead beams: full blocks are shared, the partial one
is copied.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from quire.core.ids import FloatArray, IntArray, RequestId, SequenceId
from quire.core.request import BeamParams, EarlyStopping, RequestGroup, Sequence, SequenceState
from quire.core.step import AppendTokens, Candidates, FinishReason
from quire.kv.manager import KVManager, count_blocks
from quire.sched.rows import RowAllocator


class BeamStep(NamedTuple):
    """The next live beams, best first: beam i continues the current beam `parents[i]` with `tokens[i]`."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]


class BeamHypothesis(NamedTuple):
    """A finished continuation: its generated tokens, with the end token if there is one, and its normalised score."""

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
    """From the candidates of every live beam to the next live beams. All sums are float32, as in transformers."""

    __slots__ = ("_done", "_end_ids", "_finished", "_live", "_max_tokens", "_min_tokens", "_num_generated", "_params")

    def __init__(
        self, params: BeamParams, num_prompt: int, max_length: int, end_ids: Many[int], min_tokens: int = 0
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
        """How many candidates each row returns (all of them, in a smaller vocabulary).

        Even if every beam proposes every end token, `width` other continuations are left.
        """
        return max(2, 1 + len(self._end_ids)) * self._params.width

    @property
    def done(self) -> bool:
        return self._done

    @property
    def live(self) -> tuple[tuple[int, ...], ...]:
        """The generated tokens of each live beam, in order."""
        return tuple(_tokens(beam.path) for beam in self._live)

    def advance(self, candidates: Many[Candidates]) -> BeamStep | None:
        """Take one step with the candidates of each live beam, in order. None: the search is over.

        There are `width` live beams after the first step, or fewer if there are too few candidates.
        """
        assert not self._done and len(candidates) == len(self._live), (self._done, len(candidates), len(self._live))
        ranked = self._rank(candidates)
        self._num_generated += 1
        chosen: list[_Continuation] = []
        for rank, continuation in enumerate(ranked):
            reason = self._finish_reason(continuation.token)
            if reason is None:
                chosen.append(continuation)
            elif rank < self._params.width:  # the others only fill up the live beams
                self._finish(continuation, reason)
        del chosen[self._params.width :]
        self._live = tuple(_Beam(_Path(self._live[c.parent].path, c.token), c.score) for c in chosen)
        self._done = not self._live or self._cannot_improve()
        if self._done:
            self._live = ()
            return None
        return BeamStep(tuple(c.parent for c in chosen), tuple(c.token for c in chosen))

    def results(self) -> tuple[BeamHypothesis, ...]:
        """The best hypotheses, best first; fewer than requested only if too few continuations were possible."""
        assert self._done, self._num_generated
        best = self._finished[: self._params.num_returned]
        return tuple(BeamHypothesis(_tokens(one.path), float(one.score), one.finish_reason) for one in best)

    def _rank(self, candidates: Many[Candidates]) -> list[_Continuation]:
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
        """Whether `width` hypotheses are finished and no live beam is assumed to beat the worst of them."""
        if len(self._finished) < self._params.width:
            return False
        stopping = self._params.early_stopping
        if (
            stopping is EarlyStopping.WHEN_FULL or self._params.width == 1
        ):  # one beam is greedy decoding, as in transformers
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


class _GroupBeams:
    """The search of one group: the live beams in order, and their candidates of this step so far."""

    __slots__ = ("candidates", "live", "search")

    def __init__(self, group: RequestGroup) -> None:
        request = group.request
        assert request.beam is not None, group
        sampling = request.sampling
        self.search = BeamSearch(
            request.beam, len(request.prompt), request.max_length, sampling.end_ids, sampling.min_tokens
        )
        self.live: tuple[Sequence, ...] = group.sequences[:1]
        self.candidates: dict[SequenceId, Candidates] = {}


class BeamUpdate(NamedTuple):
    """What the rows of a group do next: rows that append a token, sequences that start; or the results of the search.

    `results` is None while the search continues.
    """

    appends: tuple[AppendTokens, ...]
    assigned: tuple[Sequence, ...]
    live: tuple[Sequence, ...]
    results: tuple[BeamHypothesis, ...] | None


class BeamGroups:
    """All beam searches of one scheduler."""

    __slots__ = ("_kv", "_rows", "_searches")

    def __init__(self, kv: KVManager, rows: RowAllocator) -> None:
        self._kv = kv
        self._rows = rows
        self._searches: dict[RequestId, _GroupBeams] = {}

    def live(self, group: RequestGroup) -> tuple[Sequence, ...]:
        """The beams that compute, in order; at first, the first sequence alone."""
        if group.request.id not in self._searches:
            self._searches[group.request.id] = _GroupBeams(group)
        return self._searches[group.request.id].live

    def offered(self, group: RequestGroup) -> frozenset[SequenceId]:
        """The live beams that have candidates and wait for the others."""
        beams = self._searches.get(group.request.id)
        return frozenset() if beams is None else frozenset(beams.candidates)

    @property
    def num_searches(self) -> int:
        return len(self._searches)

    def forget(self, group: RequestGroup) -> None:
        self._searches.pop(group.request.id, None)

    def clear_candidates(self, group: RequestGroup) -> None:
        """Preempted: every beam recomputes its tokens and its candidates."""
        beams = self._searches.get(group.request.id)
        if beams is not None:
            beams.candidates.clear()

    def add_candidates(self, sequence: Sequence, candidates: Candidates) -> BeamUpdate | None:
        """Add the candidates of one beam; with those of the last live beam, the next update."""
        beams = self._searches[sequence.request.id]
        beams.candidates[sequence.id] = candidates
        if len(beams.candidates) < len(beams.live):
            return None
        step = beams.search.advance([beams.candidates.pop(beam.id) for beam in beams.live])
        if step is None:
            return BeamUpdate((), (), (), beams.search.results())
        return self._follow(sequence.group, beams, step)

    def _follow(self, group: RequestGroup, beams: _GroupBeams, step: BeamStep) -> BeamUpdate:
        parents = [beams.live[index] for index in step.parents]
        parent_tokens = [parent.tokens for parent in parents]
        staying = {parent.id for parent in parents}
        vacant = [sequence for sequence in group.sequences if sequence.id not in staying]
        for sequence in vacant:
            self._clear(sequence)
        live: list[Sequence] = []
        appends: list[AppendTokens] = []
        assigned: list[Sequence] = []
        taken: set[SequenceId] = set()
        for parent, tokens, token in zip(parents, parent_tokens, step.tokens, strict=True):
            beam = parent
            if parent.id in taken:
                beam = vacant.pop()
                self._fork(parent, beam, len(tokens))
                assigned.append(beam)
            else:
                assert parent.row is not None, parent
                taken.add(parent.id)
                appends.append(AppendTokens(parent.row, (token,)))
            beam.tokens = np.append(tokens, np.int32(token))
            beam.caught_up = False
            live.append(beam)
        beams.live = tuple(live)
        return BeamUpdate(tuple(appends), tuple(assigned), beams.live, None)

    def _clear(self, sequence: Sequence) -> None:
        """A dead beam releases its blocks and keeps its row and its reservation."""
        assert sequence.row is not None and sequence.state is SequenceState.RUNNING, sequence
        owner = sequence.group.owner
        if self._kv.tables.lengths[sequence.row]:
            self._kv.close(sequence.row, owner, sequence.tokens[:0])
            self._rows.forget_row(sequence)
        else:
            self._kv.reserve(sequence.row, -int(self._kv.tables.reserved[sequence.row]))
        self._kv.reserve(sequence.row, self._whole(sequence))

    def _fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        assert parent.row is not None and child.row is not None, (parent, child)
        owner = parent.group.owner
        tokens = parent.tokens[:num_computed]
        self._kv.commit(parent.row, owner, tokens)
        num_full = num_computed // self._kv.block_size
        num_prompt_full = (len(parent.request.prompt) - 1) // self._kv.block_size
        self._kv.reserve(child.row, num_prompt_full - num_full)
        self._kv.fork(parent.row, child.row, owner, tokens)
        child.num_planned = child.num_computed = num_computed

    def _whole(self, sequence: Sequence) -> int:
        """Blocks that a beam can need beyond the shared blocks of the prompt."""
        shared = (len(sequence.request.prompt) - 1) // self._kv.block_size
        return count_blocks(sequence.last_position + 1, self._kv.block_size) - shared
