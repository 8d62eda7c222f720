"""Beam search inside the engine: candidates in, and each beam's row and table made to follow the choice.

A beam that goes on alone stays in its row and is told its token. Where one beam becomes several, the others take the
rows of beams that died: full blocks shared, the partial one copied. Which beams live is `sched/beam.py`'s affair.
"""

from typing import NamedTuple

import numpy as np

from quire.core.ids import RequestId, SequenceId
from quire.core.request import Family, Sequence, State
from quire.core.step import Candidates, Tell
from quire.kv.manager import KVManager, count_blocks
from quire.sched.beam import BeamSearch, BeamStep, Hypothesis
from quire.sched.seating import Seating


class _Beams:
    """One family's search: the living beams in order, and what they have offered so far."""

    __slots__ = ("live", "offers", "search")

    def __init__(self, family: Family) -> None:
        request = family.request
        assert request.beam is not None, family
        sampling = request.sampling
        self.search = BeamSearch(
            request.beam, len(request.prompt), request.max_length, sampling.end_ids, sampling.min_tokens
        )
        self.live: tuple[Sequence, ...] = family.members[:1]
        self.offers: dict[SequenceId, Candidates] = {}


class Turn(NamedTuple):
    """What a family's rows must do next: those told a token, those seated anew; or the results of a search that ended.

    `results` is None while it goes on.
    """

    tells: tuple[Tell, ...]
    seated: tuple[Sequence, ...]
    live: tuple[Sequence, ...]
    results: tuple[Hypothesis, ...] | None


class BeamFamilies:
    """All beam searches of one scheduler."""

    __slots__ = ("_kv", "_of", "_seating")

    def __init__(self, kv: KVManager, seating: Seating) -> None:
        self._kv = kv
        self._seating = seating
        self._of: dict[RequestId, _Beams] = {}

    def live(self, family: Family) -> tuple[Sequence, ...]:
        """The members that compute, in order; the first time, the first alone."""
        if family.request.id not in self._of:
            self._of[family.request.id] = _Beams(family)
        return self._of[family.request.id].live

    def offered(self, family: Family) -> frozenset[SequenceId]:
        """The living beams that have offered and wait for the others."""
        beams = self._of.get(family.request.id)
        return frozenset() if beams is None else frozenset(beams.offers)

    @property
    def num_searches(self) -> int:
        return len(self._of)

    def forget(self, family: Family) -> None:
        self._of.pop(family.request.id, None)

    def rest(self, family: Family) -> None:
        """Preempted: every beam will compute again what it knows, and offer again."""
        beams = self._of.get(family.request.id)
        if beams is not None:
            beams.offers.clear()

    def offer(self, sequence: Sequence, candidates: Candidates) -> Turn | None:
        """One beam's candidates; when all living beams have offered, what follows."""
        beams = self._of[sequence.request.id]
        beams.offers[sequence.id] = candidates
        if len(beams.offers) < len(beams.live):
            return None
        offers = [beams.offers.pop(beam.id) for beam in beams.live]
        step = beams.search.advance(offers)
        if step is None:
            return Turn((), (), (), beams.search.results())
        return self._follow(sequence.family, beams, step)

    def _follow(self, family: Family, beams: _Beams, step: BeamStep) -> Turn:
        parents = [beams.live[index] for index in step.parents]
        parent_tokens = [parent.tokens for parent in parents]
        staying = {parent.id for parent in parents}
        vacant = [member for member in family.members if member.id not in staying]
        for member in vacant:
            self._clear(member)
        live: list[Sequence] = []
        tells: list[Tell] = []
        seated: list[Sequence] = []
        taken: set[SequenceId] = set()
        for parent, tokens, token in zip(parents, parent_tokens, step.tokens, strict=True):
            beam = parent
            if parent.id in taken:
                beam = vacant.pop()
                self._fork(parent, beam, len(tokens))
                seated.append(beam)
            else:
                assert parent.row is not None, parent
                taken.add(parent.id)
                tells.append(Tell(parent.row, (token,)))
            beam.tokens = np.append(tokens, np.int32(token))
            beam.caught_up = False
            live.append(beam)
        beams.live = tuple(live)
        return Turn(tuple(tells), tuple(seated), beams.live, None)

    def _clear(self, member: Sequence) -> None:
        """A dead beam gives its blocks back and keeps its row and its promise."""
        assert member.row is not None and member.state is State.RUNNING, member
        owner = member.family.owner
        if self._kv.tables.lengths[member.row]:
            self._kv.close(member.row, owner, member.tokens[:0])
            self._seating.forget_row(member)
        else:
            self._kv.promise(member.row, -int(self._kv.promised[member.row]))
        self._kv.promise(member.row, self._whole(member))

    def _fork(self, parent: Sequence, child: Sequence, num_computed: int) -> None:
        assert parent.row is not None and child.row is not None, (parent, child)
        owner = parent.family.owner
        tokens = parent.tokens[:num_computed]
        self._kv.commit(parent.row, owner, tokens)
        num_full = num_computed // self._kv.block_size
        num_prompt_full = (len(parent.request.prompt) - 1) // self._kv.block_size
        self._kv.promise(child.row, num_prompt_full - num_full)
        self._kv.fork(parent.row, child.row, owner, tokens)
        child.num_planned = child.num_computed = num_computed

    def _whole(self, member: Sequence) -> int:
        """What a beam may come to need beyond the prompt's shared blocks."""
        shared = (len(member.request.prompt) - 1) // self._kv.block_size
        return count_blocks(member.last_position + 1, self._kv.block_size) - shared
