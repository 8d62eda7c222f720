"""New work: who of the waiting sits down in this step, with what of the cache, and at whose expense.

Whole prompts are reserved, outputs as the stance says. A family that computes what another is just computing waits
for it. A higher class may take seats from a lower one.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.core.events import EventKind, RequestEvent, WaitCause
from quire.core.fault_injection import FaultSite, trip
from quire.core.request import RequestGroup, Sequence
from quire.kv.radix_tree import PrefixMatch
from quire.sched.parallel_sampling import blocks_beyond
from quire.sched.plan_builder import PlanBuilder
from quire.sched.preemption import Preemption
from quire.sched.prefix_dedup import PrefixWait
from quire.sched.reservation import Overcommit, positions_to_reserve, shared_blocks
from quire.sched.state import SchedulerState

_log = logging.getLogger(__name__)

MOST_PARKED = 128  # followers of one step: a few milliseconds; whoever comes after them is looked at in the next


class Claim(NamedTuple):
    """What a family needs to sit down."""

    leader: Sequence
    match: PrefixMatch | None
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

    __slots__ = (
        "_num_parked",
        "_pressure",
        "_reserved_for",
        "_state",
        "_take_chunk",
        "_window_since_s",
        "batch_size",
        "cause",
    )  # fmt: skip

    def __init__(
        self, state: SchedulerState, pressure: Preemption, take_chunk: Callable[[Sequence, PlanBuilder], None]
    ) -> None:
        self._state = state
        self._pressure = pressure
        self._take_chunk = take_chunk
        self._num_parked = 0  # in this step
        self._reserved_for: RequestGroup | None = None  # seats were taken for it: nobody else gets them
        self._window_since_s: float | None = None  # a sealed batch waits for members
        self.cause: WaitCause | None = None  # what the first in the queue waits for
        self.batch_size = 0  # of the sealed batch that runs

    def preempt_for_class(self, now_s: float) -> None:
        """Let the first of the highest class that waits have seats of lower classes, if it cannot sit otherwise.

        Somebody of a lower class may have aged past it: that one has the next seat that comes free by itself.
        """
        room = self._state.room
        if self._reserved_for is not None and self._reserved_for not in room:
            self._reserved_for = None
        if not room or self._state.only is not None or not self._pressure.outranks(room.best_class):
            return
        group = room.first_of_best(now_s)
        claim = self._checked_claim(group)
        if claim is None:
            return
        lacks = self._lacks(claim) is not None and self._follow(group, claim) is None
        shortage = self._state.kv.shortage(claim.match, claim.num_blocks)
        if lacks and self._pressure.preempt_for_class(group, claim.num_rows, shortage):
            self._reserved_for = group

    def admit(self, draft: PlanBuilder) -> None:
        """Seat whoever can be seated; `cause` says what kept the next one out."""
        self.cause = None
        if not self._state.room:
            return
        if draft.pressure:
            self.cause = WaitCause.PRESSURE  # law (c)
        elif self._closed(draft.now_s):
            self.cause = WaitCause.ROWS
        self._num_parked = 0
        while self._state.room and self.cause is None:
            self.cause = self._admit_next(draft)
        if draft.starts:
            self.batch_size = len(self._state.rows.assigned)

    def _admit_next(self, draft: PlanBuilder) -> WaitCause | None:
        """Seat the first who can be seated; what keeps the head out, if nobody could."""
        state = self._state
        if draft.budget <= 0:
            return WaitCause.BUDGET
        if state.rows.num_free == 0:
            return WaitCause.ROWS
        if self._num_parked == MOST_PARKED:
            return WaitCause.ORDER
        kept_out: WaitCause | None = None
        for group in self._candidates(draft.now_s):
            if state.only is not None and not state.may_start(group):
                state.set_aside(group)
                return None
            claim = self._checked_claim(group)
            if claim is None:
                return None
            follow = self._follow(group, claim)
            if follow is not None:
                state.room.pop(group)
                state.leaders.park(group, follow)
                self._num_parked += 1
                group.note(
                    RequestEvent(draft.step, EventKind.WAITED, other=follow.leader.request.id, cause=WaitCause.PREFIX)
                )
                return None
            cause = self._lacks(claim)
            if cause is None:
                self._sit(group, claim, draft)
                return None
            group.note(RequestEvent(draft.step, EventKind.WAITED, cause=cause))
            kept_out = kept_out or cause
        return kept_out

    def _candidates(self, now_s: float) -> Iterable[RequestGroup]:
        """The one for whom seats were taken, as long as it waits for them; else as the queue says."""
        if self._reserved_for is not None and self._reserved_for in self._state.room:
            return (self._reserved_for,)
        return self._state.room.candidates(now_s)

    def _closed(self, now_s: float) -> bool:
        """Whether a sealed batch takes nobody yet: the last one still runs, or its window has not passed."""
        regime, state = self._state.policy.regime, self._state
        if not regime.sealed:
            return False
        if state.rows.assigned:
            return True
        if self._window_since_s is None or now_s < self._window_since_s:  # clocks may jump
            self._window_since_s = now_s
        full = len(state.room) >= state.rows.num_free
        if not full and now_s < self._window_since_s + regime.window_s:
            return True
        self._window_since_s = None
        return False

    def _checked_claim(self, group: RequestGroup) -> Claim | None:
        """None: its own look-up failed, and the family with it. Nothing was changed yet."""
        try:
            trip(FaultSite.PREFIX_LOOKUP, group.request.id)
            claim = self._claim(group)
            trip(FaultSite.ALLOCATE, group.request.id)
        except Exception:
            _log.exception("request %s broke its own admission", group.request.id)
            self._state.fail(group)
            return None
        return claim

    def _claim(self, group: RequestGroup) -> Claim:
        state, kv = self._state, self._state.kv
        request = group.request
        unfinished = group.unfinished
        leader = unfinished[0] if request.beam is None else state.beams.live(group)[0]
        limit = 0 if request.sampling.prompt_wide else leader.num_tokens - 1
        match = kv.match(group.owner, leader.tokens, limit)
        kv.touch(match)
        num_matched = 0 if match is None else len(match.blocks)
        leader_blocks = blocks_beyond(self._positions(leader), num_matched, kv.block_size)
        if len(unfinished) == 1:
            return Claim(leader, match, leader_blocks)
        siblings = tuple([sequence for sequence in unfinished if sequence is not leader])
        shared = shared_blocks(request, kv.block_size)
        sibling_blocks = [blocks_beyond(self._positions(sibling), shared, kv.block_size) for sibling in siblings]
        return Claim(leader, match, leader_blocks, siblings, tuple(sibling_blocks))

    def _positions(self, sequence: Sequence) -> int:
        policy = self._state.policy
        stance = Overcommit.NEVER if policy.regime.contiguous else policy.stance
        immune = sequence.group.num_preemptions >= policy.max_preemptions
        return positions_to_reserve(sequence, stance, self._state.lengths, immune=immune)

    def _lacks(self, claim: Claim) -> WaitCause | None:
        if claim.num_rows > self._state.rows.num_free:
            return WaitCause.ROWS
        return None if self._state.kv.shortage(claim.match, claim.num_blocks) <= 0 else WaitCause.BLOCKS

    def _follow(self, group: RequestGroup, claim: Claim) -> PrefixWait | None:
        if self._state.kv.tree is None or claim.leader.request.sampling.prompt_wide:
            return None
        return self._state.leaders.find(group, claim.leader.tokens, self._state.kv.num_found(claim.match))

    def _sit(self, group: RequestGroup, claim: Claim, draft: PlanBuilder) -> None:
        state, leader = self._state, claim.leader
        state.room.pop(group)
        row = state.rows.take_row()
        num_cached = state.kv.open(row, group.owner, claim.match, claim.leader_blocks)
        state.rows.assign(leader, row, draft.step, num_cached)
        draft.assign(leader, state.kv.tables.of(row).copy())
        state.rows.tell(row)
        if claim.siblings:
            self._sit_beside(leader, claim, draft.step)
        state.leaders.lead(leader)
        self._count(group, leader, num_cached, draft.step)
        if self._reserved_for is group:
            self._reserved_for = None
        self._take_chunk(leader, draft)
        if leader.num_planned < leader.num_tokens:
            state.prefill(leader)

    def _sit_beside(self, leader: Sequence, claim: Claim, step: int) -> None:
        """Siblings take their rows and wait for the leader's prompt."""
        state, group = self._state, leader.group
        for sibling, num_blocks in zip(claim.siblings, claim.sibling_blocks, strict=True):
            sibling_row = state.rows.take_row()
            state.rows.assign(sibling, sibling_row, step, 0)
            state.kv.reserve(sibling_row, num_blocks)
        if group.request.beam is None:
            state.forks.expect(leader, claim.siblings)
        elif len(state.beams.live(group)) > 1:
            state.forks.expect(leader, tuple([beam for beam in state.beams.live(group) if beam is not leader]))

    def _count(self, group: RequestGroup, leader: Sequence, num_cached: int, step: int) -> None:
        counters, request = self._state.counters, group.request
        group.note(RequestEvent(step, EventKind.ADMITTED, num_cached))
        self._state.stalls.note_seated(step, group.order, request.id)
        if group.was_assigned:
            return
        group.was_assigned = True
        group.admitted_s = self._state.now_s
        group.num_cached = min(num_cached, len(request.prompt))
        counters.prompt_tokens += len(request.prompt)
        counters.cached_tokens += group.num_cached
        tree = self._state.kv.tree
        if tree is not None and num_cached < len(request.prompt) - 1:
            num_whole = num_cached // self._state.kv.block_size * self._state.kv.block_size
            miss = tree.miss_reason(request.partition, leader.tokens, num_whole)
            evictor, reason = (None, "less than a block") if miss is None else (miss.by, miss.text)
            group.note(RequestEvent(step, EventKind.MISSED, len(request.prompt) - num_cached, evictor, None, reason))
