"""The scheduler's mutable state, shared by planning, absorbing, admission, batching and preemption.

Request groups enter by `add`. They leave by `finish`, `fail` or `preempt`, which release rows and blocks once no step
in flight touches them. Private to `sched/`: everything else uses the queries of `Scheduler`.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.ma  # np.unique would load it during the first preemption

from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import EventKind, RequestEvent, RequestGroup, Sequence, SequenceState
from quire.core.speculative import DRAFTERS
from quire.core.step import AppendTokens, FinishReason, ForcedTokens
from quire.kv.manager import KVManager
from quire.sched.beam_search import BeamGroups
from quire.sched.cost_model import CostTable
from quire.sched.decode_calendar import DecodeCalendar
from quire.sched.explain import WaitHistory
from quire.sched.fairness import Billing, WeightedFairShares
from quire.sched.pacing import LateSteps, OfferedLoad, StepBound
from quire.sched.parallel_sampling import SiblingForks
from quire.sched.policy import Policy
from quire.sched.prefix_dedup import InflightPrefixes
from quire.sched.queue import Deadlines, WaitingQueue
from quire.sched.reservation import LengthQuantile
from quire.sched.rows import RowAllocator
from quire.sched.speculation import MAX_DRAFTS, DraftGovernor


@dataclass(slots=True)
class Counters:
    """Totals since the start; `quire check` recounts them."""

    prompt_tokens: int = 0  # of request groups admitted for the first time
    cached_tokens: int = 0  # of those, prefix cache hits
    computed_tokens: int = 0  # planned, in chunks and by decoding rows
    recomputed_tokens: int = 0  # computed again after a preemption
    padding_tokens: int = 0
    preemptions: int = 0
    class_preemptions: int = 0  # of those, in favour of a higher priority class
    share_preemptions: int = 0  # of those, in favour of a tenant below its share of rows or blocks
    moved_blocks: int = 0
    forks: int = 0
    lost_steps: int = 0
    drafted_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0  # of those, tokens gained beyond one per row and step
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)  # of those, by the number of the draft
    drafted_by: list[int] = field(default_factory=lambda: [0] * len(DRAFTERS))  # of all drafts, by drafter
    accepted_by: list[int] = field(default_factory=lambda: [0] * len(DRAFTERS))
    paced_steps: dict[StepBound, int] = field(default_factory=dict)  # steps whose prompt tokens a bound limited


_NONE: IntArray = np.empty(0, dtype=np.int32)
MAX_REQUEUED = 128  # groups per step: about a millisecond


class SchedulerState:
    """Queues, rows, counters and the work of the next plan."""

    def __init__(self, kv: KVManager, policy: Policy, max_rows: int, cost: CostTable) -> None:
        self.kv = kv
        self.policy = policy
        self.groups: dict[RequestId, RequestGroup] = {}
        self.shares = WeightedFairShares(policy.order.weights)
        self.billing = Billing(self.shares, max_rows)
        self.waiting = WaitingQueue(policy.order, self.shares)
        self.deadlines = Deadlines()
        self.rows = RowAllocator(max_rows)
        self.calendar = DecodeCalendar(max_rows, kv.block_size)
        self.governor = DraftGovernor(policy.speculation, cost, max_rows)
        self.inflight_prefixes = InflightPrefixes(kv.block_size)
        self.forks = SiblingForks(kv, self.rows)
        self.beams = BeamGroups(kv, self.rows)
        self.output_lengths = LengthQuantile()
        self.load = OfferedLoad()
        self.late_steps = LateSteps()
        self.masked_rows: set[Row] = set()  # rows under a grammar that sample, or have sampled
        self.num_masked = 0  # requests under a grammar
        self.forced: dict[Row, ForcedTokens] = {}  # what the grammars of decoding rows force
        self.counters = Counters()
        self.wait_history = WaitHistory()
        self.prefilling: list[Sequence] = []  # known tokens to compute; in order of arrival
        self.host_driven: list[Sequence] = []  # beams with one token to compute: the host chose it
        self.forked: list[Sequence] = []  # have rows, and start on the runner with the next plan
        self.appends: list[AppendTokens] = []
        self.unreported: list[Sequence] = []  # ended outside a step; reported with the next result
        self.first_tokens: list[RequestGroup] = []  # requests whose first token is in the step being absorbed
        self.admissible: frozenset[int] | None = None  # orders that a fault bisection admits; None: all
        self.excluded: list[RequestGroup] = []  # groups that it holds back
        self.last_planned = -1
        self.last_absorbed = -1
        self.now_s = 0.0

    # Arrival and admission.

    def add(self, group: RequestGroup) -> None:
        self.groups[group.request.id] = group
        self.num_masked += group.request.sampling.masked
        self.shares.arrive(group.request.tenant)
        self._note_uncached(group)
        self.waiting.push(group, group.arrived_s)
        self.deadlines.watch(group)
        self.load.arrive(len(group.request.prompt), group.arrived_s)
        group.note(RequestEvent(self.last_planned + 1, EventKind.ARRIVED, tokens=len(group.request.prompt)))

    def _note_uncached(self, group: RequestGroup) -> None:
        """A long prompt of which the cache holds all but a short end waits with the short ones. At its arrival, and
        once the prefix that it waited for is there; one that is preempted returns to the same lane."""
        prompt, wide = group.request.prompt, group.request.sampling.prompt_wide
        if len(prompt) >= self.policy.order.long_prompt:
            match = self.kv.match(group.owner, prompt, 0 if wide else len(prompt) - 1)
            group.num_uncached = len(prompt) - self.kv.num_found(match)

    def may_admit(self, group: RequestGroup) -> bool:
        return self.admissible is None or group.order in self.admissible

    def exclude(self, group: RequestGroup) -> None:
        """Hold a group back while a fault bisection runs."""
        self.waiting.discard(group)
        self.excluded.append(group)

    def admit_only(self, orders: frozenset[int] | None) -> None:
        """Admit only these groups, or all. Groups held back so far are queued again."""
        self.admissible = orders
        excluded, self.excluded = self.excluded, []
        for group in excluded:
            if not group.finished:
                self.waiting.push(group, group.arrived_s)

    def add_known_tokens(self, sequence: Sequence) -> None:
        """Compute the known tokens of a sequence: a prefill, or the single token of a beam."""
        if sequence.request.beam is not None and sequence.num_tokens - sequence.num_planned == 1:
            insort(self.host_driven, sequence, key=lambda other: other.id)
        else:
            self.add_prefill(sequence)

    def add_prefill(self, sequence: Sequence) -> None:
        """Compute known tokens in chunks, as the budget of each step allows."""
        insort(self.prefilling, sequence, key=lambda other: other.id)

    def remove_prefill(self, sequence: Sequence) -> None:
        """All known tokens are planned."""
        for working in (self.prefilling, self.host_driven):
            if sequence in working:
                working.remove(sequence)

    def note_first_token(self, group: RequestGroup) -> None:
        """A sequence has emitted its first token; only the first of its group is an event."""
        if not group.has_first_token:
            group.has_first_token = True
            self.first_tokens.append(group)
            group.note(RequestEvent(self.last_absorbed, EventKind.FIRST_TOKEN))

    # Finish, preemption and release.

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End one sequence in any state; False if it had ended already."""
        if sequence.finished:
            return False
        if sequence.state is SequenceState.RUNNING:
            self.begin_release(sequence, reason)
        else:
            self.rows.fix_tokens(sequence)
            sequence.finish(reason)
            self.requeue_or_forget(sequence.group)
        request = sequence.request
        samples = request.beam is None and not request.sampling.pooled
        if samples and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.output_lengths.note(max(len(sequence.tokens) - len(request.prompt), 1))
        return True

    def fail(self, group: RequestGroup, reason: FinishReason = FinishReason.FAILED) -> None:
        """End a whole group outside a step; its sequences are reported with the next result."""
        ended = {sequence.id for sequence in group.sequences if self.finish(sequence, reason)}
        self.unreported.extend(sequence for sequence in group.returned if sequence.id in ended)

    def preempt(self, group: RequestGroup, by: RequestId) -> None:
        """Release all rows of a group. It returns to its old place in the queue."""
        group.num_preemptions += 1
        self.counters.preemptions += 1
        self.withdraw(group, by)

    def withdraw(self, group: RequestGroup, by: RequestId | None) -> None:
        """Release all running sequences, to be admitted again. `by` is None if their steps were lost."""
        num_computed = max((self.num_computed(sequence) for sequence in self.running_sequences(group)), default=0)
        group.note(RequestEvent(self.last_planned + 1, EventKind.PREEMPTED, tokens=num_computed, other=by))
        self.beams.clear_candidates(group)
        for sequence in self.running_sequences(group):
            if sequence.state is SequenceState.RUNNING:
                self.begin_release(sequence, None)

    def running_sequences(self, group: RequestGroup) -> tuple[Sequence, ...]:
        return tuple(sequence for sequence in group.sequences if sequence.state is SequenceState.RUNNING)

    def note_caught_up(self, group: RequestGroup) -> None:
        """A sequence has caught up or ended. A beam knows a further token after every step: the first time counts."""
        if group.caught_up_s is not None or group.finished:
            return
        members = self.running_sequences(group) if group.request.beam is None else self.beams.live(group)
        if all(sequence.caught_up for sequence in members):
            group.caught_up_s = self.now_s

    def begin_release(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Stop computing on the row: finished if there is a reason, else preempted."""
        assert sequence.row is not None, sequence
        self._bill(sequence)
        if reason is None:
            sequence.num_computed_before = max(sequence.num_computed_before, self.num_computed(sequence))
        self.remove_prefill(sequence)
        if self.forked:
            self.forked = [other for other in self.forked if other is not sequence]
        if self.appends:
            self.appends = [append for append in self.appends if append.row != sequence.row]
        self.calendar.stop(sequence.row)
        if self.governor.active:
            self.governor.stop(sequence.row)
        self.masked_rows.discard(sequence.row)
        self.forced.pop(sequence.row, None)
        self.inflight_prefixes.end(sequence)
        orphans = self.forks.orphans(sequence)
        self.rows.begin_release(sequence, reason, self.last_planned)
        self.release_up_to(self.last_absorbed)
        for orphan in orphans:
            if orphan.state is SequenceState.RUNNING:
                self.begin_release(orphan, None)
        self.note_caught_up(sequence.group)

    def _bill(self, sequence: Sequence) -> None:
        """Charge for the tokens since the last block was granted."""
        row = sequence.row
        assert row is not None, sequence
        if self.calendar.is_active(row):
            position = self.calendar.position_at(row, self.last_planned) + 1
            self.billing.charge_last(row, sequence.request.tenant, position, self.kv.block_size)

    def release_up_to(self, step: int) -> None:
        """Invariant (a): release rows and blocks that no step in flight touches."""
        while (sequence := self.rows.next_released(step)) is not None:
            row = sequence.row
            assert row is not None, sequence
            if sequence.finish_reason in (FinishReason.ERROR, FinishReason.FAILED):
                self.kv.discard(row, sequence.group.owner)
            else:
                self.kv.close(row, sequence.group.owner, self._cacheable_tokens(sequence))
            self.rows.release(sequence)
            self.requeue_or_forget(sequence.group)

    def _cacheable_tokens(self, sequence: Sequence) -> IntArray:
        """The tokens whose keys and values are computed; they stay in the prefix tree."""
        if sequence.request.beam is not None:
            return sequence.tokens[:0]
        known = self.rows.known(sequence)
        num_computed = sequence.num_computed
        if sequence.caught_up:
            num_computed = max(num_computed, len(known) - 1)
        return known[:num_computed]

    def requeue_or_forget(self, group: RequestGroup) -> None:
        """Once no sequence holds a row, queue the group again, or drop it if it is finished."""
        if [sequence for sequence in group.sequences if sequence.row is not None]:
            return
        request = group.request
        if request.id not in self.groups:
            return
        if not group.finished:
            if group not in self.waiting and not self.inflight_prefixes.follows(group):
                self.waiting.push(group, self.now_s)
            return
        self.waiting.discard(group)
        self.inflight_prefixes.forget(group)
        del self.groups[request.id]
        self.num_masked -= request.sampling.masked
        self.beams.forget(group)
        self.shares.depart(request.tenant)
        reasons = {sequence.finish_reason.value for sequence in group.returned if sequence.finish_reason is not None}
        group.note(RequestEvent(self.last_absorbed, EventKind.FINISHED, detail=",".join(sorted(reasons))))

    def requeue_ready(self) -> None:
        """Queue groups whose in-flight prefix is computed or gone, at most `MAX_REQUEUED` per step."""
        for group in self.inflight_prefixes.take_ready(MAX_REQUEUED):
            self._note_uncached(group)
            self.waiting.push(group, group.arrived_s)

    # Derived values.

    def num_computed(self, sequence: Sequence) -> int:
        """Positions planned so far for a sequence with a row."""
        assert sequence.row is not None, sequence
        if self.calendar.is_active(sequence.row):
            return self.calendar.position_at(sequence.row, self.last_planned) + 1
        return sequence.num_planned

    def continuation(self, sequence: Sequence) -> IntArray:
        """What the prefix tree has after the known tokens of a sequence that may have drafts."""
        request, drafts = sequence.request, self.policy.speculation
        reads_tree = drafts.max_drafts and drafts.tree and drafts.reads_text(request.sampling)
        if not reads_tree or request.beam is not None:
            return _NONE
        return self.kv.continuation(sequence.group.owner, sequence.tokens, request.max_length - sequence.num_tokens)

    def num_freed(self, group: RequestGroup) -> int:
        """Blocks and reservations that preempting the whole group would free."""
        rows = [sequence.row for sequence in self.running_sequences(group) if sequence.row is not None]
        tables = [self.kv.tables.of(row) for row in rows]
        blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
        return self.kv.pool.count_readers(blocks, counts) + sum(int(self.kv.tables.reserved[row]) for row in rows)

    def by_precedence(self, rows: Iterable[int]) -> list[Sequence]:
        """The sequences of these rows: highest priority class first, then by arrival."""
        assigned = [self.rows.assigned[Row(row)] for row in rows]
        return sorted(assigned, key=lambda sequence: (sequence.request.priority, sequence.id))
