"""Admits waiting requests into rows: which groups get rows and blocks in this step, and with what cached prefix.

Blocks for the whole prompt are reserved; blocks for the output according to the overcommit policy. A group whose
prefix is being computed by another waits for it. A group of a higher priority class may preempt lower ones, and a group
of a tenant below its share of the rows those of tenants above theirs.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.fault_injection import FaultSite, trip
from quire.core.request import EventKind, RequestEvent, RequestGroup, Sequence, WaitCause
from quire.kv.radix_tree import PrefixMatch
from quire.sched.parallel_sampling import blocks_beyond
from quire.sched.plan_builder import PlanBuilder
from quire.sched.preemption import Preemption
from quire.sched.prefix_dedup import PrefixWait
from quire.sched.reservation import Overcommit, positions_to_reserve, shared_blocks
from quire.sched.state import SchedulerState

_log = logging.getLogger(__name__)

MAX_PARKED = 128  # groups per step: a few milliseconds; the next ones are tried in the next step


@dataclass(slots=True)
class Claim:
    """What a request group needs to be admitted, and what stands in its way."""

    leader: Sequence
    match: PrefixMatch | None
    leader_blocks: int  # beyond the match
    num_blocks: int  # of leader and siblings
    num_rows: int = 1
    siblings: tuple[Sequence, ...] = ()
    sibling_blocks: tuple[int, ...] = ()
    prefix_wait: PrefixWait | None = None  # a prefix in flight is worth waiting for
    missing: WaitCause | None = None  # rows or blocks


class Admission:
    """Admits groups while there is token budget, a row and enough blocks."""

    __slots__ = (
        "_deferred",
        "_num_parked",
        "_preemption",
        "_reserved_for",
        "_schedule_chunk",
        "_state",
        "_window_since_s",
        "batch_size",
        "cause",
    )  # fmt: skip

    def __init__(
        self, state: SchedulerState, preemption: Preemption, schedule_chunk: Callable[[Sequence, PlanBuilder], None]
    ) -> None:
        self._state = state
        self._preemption = preemption
        self._schedule_chunk = schedule_chunk
        self._num_parked = 0  # in this step
        self._deferred = False  # in this step: a long prompt is admitted after those in progress, with what they leave
        self._reserved_for: RequestGroup | None = None  # others were preempted for it: it is admitted next
        self._window_since_s: float | None = None  # a sealed batch waits for more requests
        self.cause: WaitCause | None = None  # what keeps the head of the queue out
        self.batch_size = 0  # of the sealed batch that runs

    def preempt_for_waiting(self, now_s: float) -> None:
        """Preempt others for the first group of the highest waiting class, if it cannot be admitted otherwise: lower
        classes, and tenants above their share of the rows if its own is below.

        A group of a lower class may have aged past it: that one gets the next row that comes free by itself.
        """
        waiting, preemption = self._state.waiting, self._preemption
        if self._reserved_for is not None and self._reserved_for not in waiting:
            self._reserved_for = None
        if not waiting or self._state.admissible is not None:
            return
        outranks = preemption.outranks(waiting.best_class)
        if not outranks and self._state.shares.num_active < 2:
            return
        group = waiting.best_class_head(now_s)
        below_share = preemption.is_below_share(group, now_s)
        claim = self._try(group) if outranks or below_share else None
        if claim is None or claim.missing is None:
            return
        shortage = self._state.kv.shortage(claim.match, claim.num_blocks)
        if preemption.preempt_for_waiting(group, claim.num_rows, shortage, below_share=below_share):
            self._reserved_for = group

    def admit(self, builder: PlanBuilder) -> None:
        """Admit as many as possible; `cause` says what kept the next one out. A long prompt behind one in progress of
        its tenant is left to `admit_deferred`: it would only share what that one can use alone."""
        self.cause = None
        self._deferred = False
        if not self._state.waiting:
            return
        if builder.pressure:
            self.cause = WaitCause.PRESSURE  # invariant (c)
        elif self._is_sealed(builder.now_s):
            self.cause = WaitCause.ROWS
        self._num_parked = 0
        while self._state.waiting and self.cause is None:
            self.cause = self._admit_next(builder)
        if builder.starts:
            self.batch_size = len(self._state.rows.assigned)

    def admit_deferred(self, builder: PlanBuilder) -> None:
        """Admit with the budget that long prompts in progress have left."""
        if not self._deferred:
            return
        self._deferred, self.cause = False, None
        builder.long_prefills = []
        while self._state.waiting and self.cause is None:
            self.cause = self._admit_next(builder)

    def _admit_next(self, builder: PlanBuilder) -> WaitCause | None:
        """Try the head of the queue and the groups that may overtake it. A cause ends admission; None: try again."""
        state = self._state
        if builder.budget <= 0:
            return WaitCause.BUDGET
        if state.rows.num_free == 0:
            return WaitCause.ROWS
        if self._num_parked == MAX_PARKED:
            return WaitCause.ORDER
        candidates, kept_out = self._candidates(builder.now_s), None
        for group in candidates:
            cause = self._admit_one(group, builder)
            if cause is None:
                return None
            kept_out = kept_out or cause
        if kept_out is WaitCause.ORDER and len(candidates) == 1:
            short = state.waiting.short_head(builder.now_s)
            return kept_out if short is None else self._admit_one(short, builder)
        return kept_out

    def _admit_one(self, group: RequestGroup, builder: PlanBuilder) -> WaitCause | None:
        """Try one group. None: it has left the queue; else what keeps it out."""
        state = self._state
        if state.admissible is not None and not state.may_admit(group):
            state.exclude(group)
            return None
        claim = self._try(group)
        if claim is None:
            return None
        if claim.prefix_wait is not None:
            self._park(group, claim.prefix_wait, builder.step)
            return None
        if claim.missing is not None:
            group.note(RequestEvent(builder.step, EventKind.WAITED, cause=claim.missing))
            return claim.missing
        if self._is_behind(group, claim, builder):
            self._deferred = True
            state.kv.touch(claim.match)
            return WaitCause.ORDER
        self._admit_group(group, claim, builder)
        return None

    def _is_behind(self, group: RequestGroup, claim: Claim, builder: PlanBuilder) -> bool:
        """Whether this is a long prompt, and its tenant has one in progress, of no lower class. A prompt that others
        were preempted for is admitted at once."""
        if group is self._reserved_for or not builder.long_prefills:
            return False
        request, num_tokens = group.request, len(claim.leader.tokens) - self._state.kv.num_found(claim.match)
        return num_tokens >= builder.least_long and any(
            each.request.tenant == request.tenant and each.request.priority <= request.priority
            for each in builder.long_prefills
        )

    def _park(self, group: RequestGroup, wait: PrefixWait, step: int) -> None:
        self._state.waiting.pop(group, served=False)
        self._state.inflight_prefixes.park(group, wait)
        if self._reserved_for is group:
            self._reserved_for = None  # while it waits others go first
        self._num_parked += 1
        group.note(RequestEvent(step, EventKind.WAITED, other=wait.leader.request.id, cause=WaitCause.PREFIX))

    def _candidates(self, now_s: float) -> tuple[RequestGroup, ...]:
        """The group that others were preempted for, while it waits; else as the queue says."""
        if self._reserved_for is not None and self._reserved_for in self._state.waiting:
            return (self._reserved_for,)
        return self._state.waiting.candidates(now_s)

    def _is_sealed(self, now_s: float) -> bool:
        """Whether a sealed batch is closed: the last one still runs, or its window has not passed."""
        regime, state = self._state.policy.regime, self._state
        if not regime.sealed:
            return False
        if state.rows.assigned:
            return True
        if self._window_since_s is None or now_s < self._window_since_s:  # clocks may jump
            self._window_since_s = now_s
        full = len(state.waiting) >= state.rows.num_free
        if not full and now_s < self._window_since_s + regime.window_s:
            return True
        self._window_since_s = None
        return False

    def _try(self, group: RequestGroup) -> Claim | None:
        """What the group needs and lacks. Assigns nothing. None: its look-up raised, and the group has failed."""
        try:
            trip(FaultSite.PREFIX_LOOKUP, group.request.id)
            claim = self._claim(group)
            trip(FaultSite.ALLOCATE, group.request.id)
        except Exception:
            _log.exception("admission of request %s failed", group.request.id)
            self._state.fail(group)
            return None
        state, kv, match = self._state, self._state.kv, claim.match
        if match is not None:
            claim.prefix_wait = state.inflight_prefixes.find(group, claim.leader.tokens, kv.num_found(match))
        if claim.prefix_wait is None:
            if claim.num_rows > state.rows.num_free:
                claim.missing = WaitCause.ROWS
            elif kv.shortage(match, claim.num_blocks) > 0:
                claim.missing = WaitCause.BLOCKS
            else:
                return claim
        kv.touch(match)  # it waits; an admitted group's match is touched when its table opens
        return claim

    def _claim(self, group: RequestGroup) -> Claim:
        state, kv = self._state, self._state.kv
        request = group.request
        unfinished = group.unfinished
        leader = unfinished[0] if request.beam is None else state.beams.live(group)[0]
        limit = 0 if request.sampling.prompt_wide else len(leader.tokens) - 1
        match = kv.match(group.owner, leader.tokens, limit)
        num_matched = 0 if match is None else len(match.blocks)
        leader_blocks = blocks_beyond(self._positions(leader), num_matched, kv.block_size)
        if len(unfinished) == 1:
            return Claim(leader, match, leader_blocks, leader_blocks)
        siblings = tuple([sequence for sequence in unfinished if sequence is not leader])
        shared = shared_blocks(request, kv.block_size)
        sibling_blocks = tuple([blocks_beyond(self._positions(sibling), shared, kv.block_size) for sibling in siblings])
        num_blocks = leader_blocks + sum(sibling_blocks)
        return Claim(leader, match, leader_blocks, num_blocks, len(unfinished), siblings, sibling_blocks)

    def _positions(self, sequence: Sequence) -> int:
        policy = self._state.policy
        overcommit = Overcommit.NEVER if policy.regime.contiguous else policy.overcommit
        immune = sequence.group.num_preemptions >= policy.max_preemptions
        return positions_to_reserve(sequence, overcommit, self._state.output_lengths, immune=immune)

    def _admit_group(self, group: RequestGroup, claim: Claim, builder: PlanBuilder) -> None:
        state, leader = self._state, claim.leader
        state.waiting.pop(group)
        row = state.rows.take_row()
        num_cached = state.kv.open(row, group.owner, claim.match, claim.leader_blocks)
        state.rows.assign(leader, row, builder.step, num_cached)
        builder.assign(leader, state.kv.tables.of(row).copy(), state.continuation(leader))
        state.rows.mark_started(row)
        if claim.siblings:
            self._assign_siblings(leader, claim, builder.step)
        state.inflight_prefixes.begin(leader)
        self._note_admitted(group, leader, num_cached, builder.step)
        if self._reserved_for is group:
            self._reserved_for = None
        self._schedule_chunk(leader, builder)
        if leader.num_planned < len(leader.tokens):
            state.add_prefill(leader)

    def _assign_siblings(self, leader: Sequence, claim: Claim, step: int) -> None:
        """Siblings get rows and reservations, and wait for the leader's prompt."""
        state, group = self._state, leader.group
        for sibling, num_blocks in zip(claim.siblings, claim.sibling_blocks, strict=True):
            sibling_row = state.rows.take_row()
            state.rows.assign(sibling, sibling_row, step, 0)
            state.kv.reserve(sibling_row, num_blocks)
        if group.request.beam is None:
            state.forks.wait_for_prompt(leader, claim.siblings)
        elif len(state.beams.live(group)) > 1:
            state.forks.wait_for_prompt(leader, tuple([beam for beam in state.beams.live(group) if beam is not leader]))

    def _note_admitted(self, group: RequestGroup, leader: Sequence, num_cached: int, step: int) -> None:
        counters, request = self._state.counters, group.request
        group.caught_up_s = None
        num_prompt = len(request.prompt)
        group.note(RequestEvent(step, EventKind.ADMITTED, num_cached))
        self._state.wait_history.note_admitted(step, group.order, request.id)
        if group.was_assigned:
            return
        group.was_assigned = True
        group.admitted_s = self._state.now_s
        group.num_cached = min(num_cached, num_prompt)
        counters.prompt_tokens += num_prompt
        counters.cached_tokens += group.num_cached
        self._state.load.admit(num_prompt, group.num_cached)
        kv = self._state.kv
        if kv.tree is not None and num_cached < num_prompt - 1:
            miss = kv.note_miss(group.owner, leader.tokens, num_cached)
            evictor, reason = (None, "less than a block") if miss is None else (miss.by, miss.text)
            group.note(RequestEvent(step, EventKind.MISSED, num_prompt - num_cached, evictor, None, reason))
