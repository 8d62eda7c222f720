"""New work: who of the waiting sits down in this step, with what of the cache, and at whose expense.

Whole prompts are reserved, outputs as the stance says. A family that computes what another is just computing waits
for it. A higher class may take seats from a lower one.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.core.events import Cause, Event, What
from quire.core.faults import Site, trip
from quire.core.request import Family, Sequence
from quire.kv.answers import Match
from quire.kv.ghosts import Miss
from quire.kv.radix_node import NO_BLOCKS
from quire.sched.books import Books
from quire.sched.draft import Draft
from quire.sched.forks import blocks_beyond
from quire.sched.leaders import Follow
from quire.sched.pressure import Pressure
from quire.sched.reserve import Stance, positions_to_reserve, shared_blocks

_log = logging.getLogger(__name__)

MOST_PARKED = 128  # followers of one step: a few milliseconds; whoever comes after them is looked at in the next


class Claim(NamedTuple):
    """What a family needs to sit down."""

    leader: Sequence
    match: Match | None
    leader_blocks: int  # beyond the match
    siblings: tuple[Sequence, ...] = ()
    sibling_blocks: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return 1 + len(self.siblings)

    @property
    def num_blocks(self) -> int:
        return self.leader_blocks + sum(self.sibling_blocks) if self.siblings else self.leader_blocks


class Admission:
    """Seats families as long as there is budget, a row and room in the cache."""

    __slots__ = ("_books", "_num_parked", "_pressure", "_promised_to", "_take_chunk", "_window_since_s", "batch_size",
                 "cause")  # fmt: skip

    def __init__(self, books: Books, pressure: Pressure, take_chunk: Callable[[Sequence, Draft], None]) -> None:
        self._books = books
        self._pressure = pressure
        self._take_chunk = take_chunk
        self._num_parked = 0  # in this step
        self._promised_to: Family | None = None  # seats were taken for it: nobody else gets them
        self._window_since_s: float | None = None  # a sealed batch waits for members
        self.cause: Cause | None = None  # what the first in the queue waits for
        self.batch_size = 0  # of the sealed batch that runs

    def take_seats(self, now_s: float) -> None:
        """Let the first of the highest class that waits have seats of lower classes, if it cannot sit otherwise.

        Somebody of a lower class may have aged past it: that one has the next seat that comes free by itself.
        """
        room = self._books.room
        if self._promised_to is not None and self._promised_to not in room:
            self._promised_to = None
        if not room or self._books.only is not None or not self._pressure.outranks(room.best_class):
            return
        family = room.first_of_best(now_s)
        claim = self._checked_claim(family)
        if claim is None:
            return
        lacks = self._lacks(claim) is not None and self._follow(family, claim) is None
        shortage = self._books.kv.shortage(claim.match, claim.num_blocks)
        if lacks and self._pressure.take_seats(family, claim.num_rows, shortage):
            self._promised_to = family

    def admit(self, draft: Draft) -> None:
        """Seat whoever can be seated; `cause` says what kept the next one out."""
        self.cause = None
        if not self._books.room:
            return
        if draft.pressure:
            self.cause = Cause.PRESSURE  # law (c)
        elif self._closed(draft.now_s):
            self.cause = Cause.SEATS
        self._num_parked = 0
        while self._books.room and self.cause is None:
            self.cause = self._admit_next(draft)
        if draft.seats:
            self.batch_size = len(self._books.seating.seated)

    def _admit_next(self, draft: Draft) -> Cause | None:
        """Seat the first who can be seated; what keeps the head out, if nobody could."""
        books = self._books
        if draft.budget <= 0:
            return Cause.BUDGET
        if books.seating.num_free == 0:
            return Cause.SEATS
        if self._num_parked == MOST_PARKED:
            return Cause.ORDER
        kept_out: Cause | None = None
        for family in self._candidates(draft.now_s):
            if books.only is not None and not books.may_sit(family):
                books.set_aside(family)
                return None
            claim = self._checked_claim(family)
            if claim is None:
                return None
            follow = self._follow(family, claim)
            if follow is not None:
                books.room.pop(family)
                books.leaders.park(family, follow)
                self._num_parked += 1
                family.note(Event(draft.step, What.WAITED, other=follow.leader.request.id, cause=Cause.PREFIX))
                return None
            cause = self._lacks(claim)
            if cause is None:
                self._sit(family, claim, draft)
                return None
            family.note(Event(draft.step, What.WAITED, cause=cause))
            kept_out = kept_out or cause
        return kept_out

    def _candidates(self, now_s: float) -> Iterable[Family]:
        """The one for whom seats were taken, as long as it waits for them; else as the queue says."""
        if self._promised_to is not None and self._promised_to in self._books.room:
            return (self._promised_to,)
        return self._books.room.candidates(now_s)

    def _closed(self, now_s: float) -> bool:
        """Whether a sealed batch takes nobody yet: the last one still runs, or its window has not passed."""
        regime, books = self._books.policy.regime, self._books
        if not regime.sealed:
            return False
        if books.seating.seated:
            return True
        if self._window_since_s is None or now_s < self._window_since_s:  # clocks may jump
            self._window_since_s = now_s
        full = len(books.room) >= books.seating.num_free
        if not full and now_s < self._window_since_s + regime.window_s:
            return True
        self._window_since_s = None
        return False

    def _checked_claim(self, family: Family) -> Claim | None:
        """None: its own look-up failed, and the family with it. Nothing was changed yet."""
        try:
            trip(Site.PREFIX_LOOKUP, family.request.id)
            claim = self._claim(family)
            trip(Site.ALLOCATE, family.request.id)
        except Exception:
            _log.exception("request %s broke its own admission", family.request.id)
            self._books.fail(family)
            return None
        return claim

    def _claim(self, family: Family) -> Claim:
        books, kv = self._books, self._books.kv
        request = family.request
        unfinished = family.unfinished
        leader = unfinished[0] if request.beam is None else books.beams.live(family)[0]
        limit = 0 if request.sampling.prompt_wide else leader.num_tokens - 1
        match = kv.match(family.owner, leader.tokens, limit)
        num_matched = 0 if match is None else len(match.blocks)
        leader_blocks = blocks_beyond(self._positions(leader), num_matched, kv.block_size)
        if len(unfinished) == 1:
            return Claim(leader, match, leader_blocks)
        siblings = tuple([member for member in unfinished if member is not leader])
        shared = shared_blocks(request, kv.block_size)
        sibling_blocks = [blocks_beyond(self._positions(sibling), shared, kv.block_size) for sibling in siblings]
        return Claim(leader, match, leader_blocks, siblings, tuple(sibling_blocks))

    def _positions(self, sequence: Sequence) -> int:
        policy = self._books.policy
        stance = Stance.NEVER if policy.regime.contiguous else policy.stance
        immune = sequence.family.num_preemptions >= policy.max_preemptions
        return positions_to_reserve(sequence, stance, self._books.lengths, immune=immune)

    def _lacks(self, claim: Claim) -> Cause | None:
        if claim.num_rows > self._books.seating.num_free:
            return Cause.SEATS
        return None if self._books.kv.shortage(claim.match, claim.num_blocks) <= 0 else Cause.BLOCKS

    def _follow(self, family: Family, claim: Claim) -> Follow | None:
        if self._books.kv.tree is None or claim.leader.request.sampling.prompt_wide:
            return None
        return self._books.leaders.find(family, claim.leader.tokens, self._books.kv.num_found(claim.match))

    def _sit(self, family: Family, claim: Claim, draft: Draft) -> None:
        books, leader = self._books, claim.leader
        books.room.pop(family)
        row = books.seating.take_row()
        num_cached = books.kv.open(row, family.owner, claim.match, claim.leader_blocks)
        books.seating.sit(leader, row, draft.step, num_cached)
        draft.seat(leader, books.kv.tables.of(row).copy() if num_cached else NO_BLOCKS)
        books.seating.tell(row)
        if claim.siblings:
            self._sit_beside(leader, claim, draft.step)
        books.leaders.lead(leader)
        self._count(family, leader, num_cached, draft.step)
        if self._promised_to is family:
            self._promised_to = None
        self._take_chunk(leader, draft)
        if leader.num_planned < leader.num_tokens:
            books.prefill(leader)

    def _sit_beside(self, leader: Sequence, claim: Claim, step: int) -> None:
        """Siblings take their rows and wait for the leader's prompt."""
        books, family = self._books, leader.family
        for sibling, num_blocks in zip(claim.siblings, claim.sibling_blocks, strict=True):
            sibling_row = books.seating.take_row()
            books.seating.sit(sibling, sibling_row, step, 0)
            books.kv.promise(sibling_row, num_blocks)
        if family.request.beam is None:
            books.forks.expect(leader, claim.siblings)
        elif len(books.beams.live(family)) > 1:
            books.forks.expect(leader, tuple([beam for beam in books.beams.live(family) if beam is not leader]))

    def _count(self, family: Family, leader: Sequence, num_cached: int, step: int) -> None:
        tally, request = self._books.tally, family.request
        family.note(Event(step, What.SEATED, num_cached))
        self._books.stalls.note_seated(step, family.order, request.id)
        if family.was_seated:
            return
        family.was_seated = True
        family.seated_s = self._books.now_s
        family.num_cached = min(num_cached, len(request.prompt))
        tally.prompt_tokens += len(request.prompt)
        tally.cached_tokens += family.num_cached
        tree = self._books.kv.tree
        if tree is not None and num_cached < len(request.prompt) - 1:
            num_whole = num_cached // self._books.kv.block_size * self._books.kv.block_size
            miss = tree.miss_reason(request.partition, leader.tokens, num_whole)
            evictor = None if miss is None else miss.by
            family.note(Event(step, What.MISSED, len(request.prompt) - num_cached, evictor, None, _why(miss)))


def _why(miss: Miss | None) -> str:
    if miss is None:
        return "less than a block"
    return miss.kind.value if miss.step is None else f"{miss.kind.value} in step {miss.step}"
