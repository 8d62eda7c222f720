"""Everything a scheduler keeps, and how a sequence leaves it: the part that planning and absorbing share.

What a scheduler has done so far, in numbers. Counters alone.

Rows whose every token is chosen under a mask: each needs its last token known before its next is planned.

Such a row cruises like any other, but sits out every step that is planned while its last one is in flight. Knows
neither grammars nor masks.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.ma  # np.unique would load it, in the middle of the first step that preempts somebody

from quire.core.events import EventKind, RequestEvent
from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import RequestGroup, Sequence, SequenceState
from quire.core.step import AppendTokens, FinishReason
from quire.kv.manager import KVManager
from quire.sched.beam_search import BeamGroups
from quire.sched.decode_calendar import DecodeCalendar
from quire.sched.explain import WaitHistory
from quire.sched.fairness import Billing, WeightedFairShares
from quire.sched.parallel_sampling import SiblingForks
from quire.sched.policy import Policy
from quire.sched.prefix_dedup import InflightPrefixes
from quire.sched.queue import Deadlines, WaitingQueue
from quire.sched.reservation import LengthQuantile
from quire.sched.rows import RowAllocator


@dataclass(slots=True)
class Counters:
    """Totals since the start; `quire check` recounts them."""

    prompt_tokens: int = 0  # of families seated for the first time
    cached_tokens: int = 0  # of those, found in the cache
    computed_tokens: int = 0  # planned in chunks and by cruising rows
    recomputed_tokens: int = 0  # a sequence had them before a preemption, and computed them again after it
    padding_tokens: int = 0
    preemptions: int = 0
    seats_taken: int = 0  # preemptions for the sake of a higher class
    moved_blocks: int = 0
    forks: int = 0
    lost_steps: int = 0


class GrammarRows:
    """In which step each of them last chose a token."""

    __slots__ = ("_chose",)

    def __init__(self) -> None:
        self._chose: dict[Row, int] = {}

    def __len__(self) -> int:
        return len(self._chose)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._chose)

    def note(self, row: Row, step: int) -> None:
        """It chooses a token in this step."""
        self._chose[row] = step

    def forget(self, row: Row) -> None:
        """It leaves; it may not have been one of them."""
        self._chose.pop(row, None)

    def unknown(self, last_absorbed: int) -> list[Row]:
        """Those whose last token is still in flight."""
        return [row for row, step in self._chose.items() if step > last_absorbed]


MOST_WOKEN = 128  # followers in one step: about a millisecond


class SchedulerState:
    """Who waits, who sits, who leaves; and what they hold."""

    def __init__(self, kv: KVManager, policy: Policy, max_rows: int) -> None:
        self.kv = kv
        self.policy = policy
        self.groups: dict[RequestId, RequestGroup] = {}
        self.shares = WeightedFairShares(policy.order.weights)
        self.charges = Billing(self.shares, max_rows)
        self.room = WaitingQueue(policy.order, self.shares)
        self.deadlines = Deadlines()
        self.rows = RowAllocator(max_rows)
        self.calendar = DecodeCalendar(max_rows, kv.block_size)
        self.leaders = InflightPrefixes(kv.block_size)
        self.forks = SiblingForks(kv, self.rows)
        self.beams = BeamGroups(kv, self.rows)
        self.lengths = LengthQuantile()
        self.masked = GrammarRows()
        self.counters = Counters()
        self.stalls = WaitHistory()
        self.prefilling: list[Sequence] = []  # must catch up; in order of arrival
        self.host_driven: list[Sequence] = []  # beams with one token to compute
        self.fresh: list[Sequence] = []  # they sit, and the runner has not been told
        self.appends: list[AppendTokens] = []
        self.ended_early: list[Sequence] = []  # not by a step; told with the next result
        self.first_tokens: list[RequestGroup] = []  # requests whose first token is in the step being absorbed
        self.only: frozenset[int] | None = None  # while a failed step is looked into: who may sit, by order
        self.aside: list[RequestGroup] = []  # the others, who would have come to sit meanwhile
        self.last_planned = -1
        self.last_absorbed = -1
        self.now_s = 0.0

    # Coming.

    def enter(self, group: RequestGroup) -> None:
        self.groups[group.request.id] = group
        self.shares.arrive(group.request.tenant)
        self.room.push(group, group.arrived_s)
        self.deadlines.watch(group)
        group.note(RequestEvent(self.last_planned + 1, EventKind.ARRIVED, tokens=len(group.request.prompt)))

    def may_start(self, group: RequestGroup) -> bool:
        return self.only is None or group.order in self.only

    def set_aside(self, group: RequestGroup) -> None:
        """It may not sit for now."""
        self.room.discard(group)
        self.aside.append(group)

    def start_only(self, only: frozenset[int] | None) -> None:
        """From now on these alone may sit, or everybody; whoever stood aside is in the queue again."""
        self.only = only
        aside, self.aside = self.aside, []
        for group in aside:
            if not group.finished:
                self.room.push(group, group.arrived_s)

    def catch_up(self, sequence: Sequence) -> None:
        """It has known tokens to compute."""
        if sequence.request.beam is not None and sequence.num_tokens - sequence.num_planned == 1:
            insort(self.host_driven, sequence, key=lambda other: other.id)
        else:
            self.prefill(sequence)

    def prefill(self, sequence: Sequence) -> None:
        """It has known tokens to compute, as many as a step will give it."""
        insort(self.prefilling, sequence, key=lambda other: other.id)

    def caught_up(self, sequence: Sequence) -> None:
        """It has no more known tokens to plan."""
        for working in (self.prefilling, self.host_driven):
            if sequence in working:
                working.remove(sequence)

    def note_first_token(self, group: RequestGroup) -> None:
        """A member has emitted its first token; only the family's first counts."""
        if not group.has_first_token:
            group.has_first_token = True
            self.first_tokens.append(group)
            group.note(RequestEvent(self.last_absorbed, EventKind.FIRST_TOKEN))

    # Leaving.

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End one sequence, whatever state it is in; False if it had ended already."""
        if sequence.finished:
            return False
        if sequence.state is SequenceState.RUNNING:
            self.depart(sequence, reason)
        else:
            self.rows.fix_tokens(sequence)
            sequence.finish(reason)
            self.settle(sequence.group)
        request = sequence.request
        speaks = request.beam is None and not request.sampling.pooled
        if speaks and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.lengths.note(max(len(sequence.tokens) - len(request.prompt), 1))
        return True

    def fail(self, group: RequestGroup, reason: FinishReason = FinishReason.FAILED) -> None:
        """A whole family ends without a step to be told with: those who wait for it hear of it in the next result."""
        ended = {sequence.id for sequence in group.sequences if self.finish(sequence, reason)}
        self.ended_early.extend(sequence for sequence in group.returned if sequence.id in ended)

    def preempt(self, group: RequestGroup, by: RequestId) -> None:
        """The whole family makes room. It comes back to its old place in the queue."""
        group.num_preemptions += 1
        self.counters.preemptions += 1
        self.withdraw(group, by)

    def withdraw(self, group: RequestGroup, by: RequestId | None) -> None:
        """All its running members get up; they will be seated again. By nobody: their steps were lost."""
        num_computed = max((self.num_computed(sequence) for sequence in self.running(group)), default=0)
        group.note(RequestEvent(self.last_planned + 1, EventKind.PREEMPTED, tokens=num_computed, other=by))
        self.beams.rest(group)
        for sequence in self.running(group):
            if sequence.state is SequenceState.RUNNING:
                self.depart(sequence, None)

    def running(self, group: RequestGroup) -> tuple[Sequence, ...]:
        return tuple(sequence for sequence in group.sequences if sequence.state is SequenceState.RUNNING)

    def depart(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Get up from the row: finished for a reason, or preempted for none."""
        assert sequence.row is not None, sequence
        self._bill(sequence)
        if reason is None:
            sequence.num_computed_before = max(sequence.num_computed_before, self.num_computed(sequence))
        self.caught_up(sequence)
        if self.fresh:
            self.fresh = [other for other in self.fresh if other is not sequence]
        if self.appends:
            self.appends = [append for append in self.appends if append.row != sequence.row]
        self.calendar.stop(sequence.row)
        self.masked.forget(sequence.row)
        self.leaders.end(sequence)
        orphans = self.forks.orphans(sequence)
        self.rows.begin_release(sequence, reason, self.last_planned)
        self.release_up_to(self.last_absorbed)
        for orphan in orphans:
            if orphan.state is SequenceState.RUNNING:
                self.depart(orphan, None)

    def _bill(self, sequence: Sequence) -> None:
        """It pays for what it computed since it last got a block."""
        row = sequence.row
        assert row is not None, sequence
        if self.calendar.under_way(row):
            position = self.calendar.position_at(row, self.last_planned) + 1
            self.charges.pay_last(row, sequence.request.tenant, position, self.kv.tables.lengths.item(row))

    def release_up_to(self, step: int) -> None:
        """Law (a): what the steps in flight no longer touch goes back."""
        while (sequence := self.rows.next_released(step)) is not None:
            row = sequence.row
            assert row is not None, sequence
            if sequence.finish_reason in (FinishReason.ERROR, FinishReason.FAILED):
                self.kv.discard(row, sequence.group.owner)
            else:
                self.kv.close(row, sequence.group.owner, self._kept(sequence))
            self.rows.release(sequence)
            self.settle(sequence.group)

    def _kept(self, sequence: Sequence) -> IntArray:
        """The tokens whose keys and values are known to be right, for the tree."""
        if sequence.request.beam is not None:
            return sequence.tokens[:0]
        known = self.rows.known(sequence)
        num_computed = sequence.num_computed
        if sequence.caught_up:
            num_computed = max(num_computed, len(known) - 1)
        return known[:num_computed]

    def settle(self, group: RequestGroup) -> None:
        """When no member sits any more, the family waits again or is forgotten."""
        if [sequence for sequence in group.sequences if sequence.row is not None]:
            return
        request = group.request
        if request.id not in self.groups:
            return
        if not group.finished:
            if group not in self.room and not self.leaders.follows(group):
                self.room.push(group, self.now_s)
            return
        self.room.discard(group)
        self.leaders.forget(group)
        del self.groups[request.id]
        self.beams.forget(group)
        self.shares.depart(request.tenant)
        reasons = {sequence.finish_reason.value for sequence in group.returned if sequence.finish_reason is not None}
        group.note(RequestEvent(self.last_absorbed, EventKind.FINISHED, detail=",".join(sorted(reasons))))

    def wake(self) -> None:
        """Some of those whose leader has come far enough, or is gone, go back to the queue."""
        for group in self.leaders.take_ready(MOST_WOKEN):
            self.room.push(group, group.arrived_s)

    # What follows from the books.

    def num_computed(self, sequence: Sequence) -> int:
        """Positions planned for a seated sequence so far."""
        assert sequence.row is not None, sequence
        if self.calendar.under_way(sequence.row):
            return self.calendar.position_at(sequence.row, self.last_planned) + 1
        return sequence.num_planned

    def num_freed(self, group: RequestGroup) -> int:
        """Blocks and promises that would come back if the whole family left."""
        rows = [sequence.row for sequence in self.running(group) if sequence.row is not None]
        tables = [self.kv.tables.of(row) for row in rows]
        blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
        return self.kv.pool.count_readers(blocks, counts) + sum(int(self.kv.tables.reserved[row]) for row in rows)

    def row_sequences(self, rows: Iterable[int]) -> list[Sequence]:
        """Who sits in these rows: the most important first, then the earliest."""
        assigned = [self.rows.assigned[Row(row)] for row in rows]
        return sorted(assigned, key=lambda sequence: (sequence.request.priority, sequence.id))
