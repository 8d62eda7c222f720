"""Everything a scheduler keeps, and how a sequence leaves it: the part that planning and absorbing share."""

from bisect import insort
from collections.abc import Iterable

import numpy as np
import numpy.ma  # np.unique would load it, in the middle of the first step that preempts somebody

from quire.core.events import Event, What
from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import Family, Sequence, State
from quire.core.step import FinishReason, Tell
from quire.kv.manager import KVManager
from quire.sched.beams import BeamFamilies
from quire.sched.charges import Charges
from quire.sched.cruise import Cruise
from quire.sched.deadlines import Deadlines
from quire.sched.forks import Forks
from quire.sched.leaders import Leaders
from quire.sched.lengths import LengthQuantile
from quire.sched.masked import MaskedRows
from quire.sched.policy import Policy
from quire.sched.queue import WaitingRoom
from quire.sched.seating import Seating
from quire.sched.shares import Shares
from quire.sched.stalls import Stalls
from quire.sched.tally import Tally

MOST_WOKEN = 128  # followers in one step: about a millisecond


class Books:
    """Who waits, who sits, who leaves; and what they hold."""

    def __init__(self, kv: KVManager, policy: Policy, max_rows: int) -> None:
        self.kv = kv
        self.policy = policy
        self.families: dict[RequestId, Family] = {}
        self.shares = Shares(policy.order.weights)
        self.charges = Charges(self.shares, max_rows)
        self.room = WaitingRoom(policy.order, self.shares)
        self.deadlines = Deadlines()
        self.seating = Seating(max_rows)
        self.cruise = Cruise(max_rows, kv.block_size)
        self.leaders = Leaders(kv.block_size)
        self.forks = Forks(kv, self.seating)
        self.beams = BeamFamilies(kv, self.seating)
        self.lengths = LengthQuantile()
        self.masked = MaskedRows()
        self.tally = Tally()
        self.stalls = Stalls()
        self.prefilling: list[Sequence] = []  # must catch up; in order of arrival
        self.tethered: list[Sequence] = []  # beams with one token to compute
        self.fresh: list[Sequence] = []  # they sit, and the runner has not been told
        self.tells: list[Tell] = []
        self.ended_early: list[Sequence] = []  # not by a step; told with the next result
        self.only: frozenset[int] | None = None  # while a failed step is looked into: who may sit, by order
        self.aside: list[Family] = []  # the others, who would have come to sit meanwhile
        self.last_planned = -1
        self.last_absorbed = -1
        self.now_s = 0.0

    # Coming.

    def enter(self, family: Family) -> None:
        self.families[family.request.id] = family
        self.shares.arrive(family.request.tenant)
        self.room.push(family, family.arrived_s)
        self.deadlines.watch(family)
        family.note(Event(self.last_planned + 1, What.ARRIVED, tokens=len(family.request.prompt)))

    def may_sit(self, family: Family) -> bool:
        return self.only is None or family.order in self.only

    def set_aside(self, family: Family) -> None:
        """It may not sit for now."""
        self.room.discard(family)
        self.aside.append(family)

    def sit_only(self, only: frozenset[int] | None) -> None:
        """From now on these alone may sit, or everybody; whoever stood aside is in the queue again."""
        self.only = only
        aside, self.aside = self.aside, []
        for family in aside:
            if not family.finished:
                self.room.push(family, family.arrived_s)

    def catch_up(self, sequence: Sequence) -> None:
        """It has known tokens to compute."""
        if sequence.request.beam is not None and sequence.num_tokens - sequence.num_planned == 1:
            insort(self.tethered, sequence, key=lambda other: other.id)
        else:
            self.prefill(sequence)

    def prefill(self, sequence: Sequence) -> None:
        """It has known tokens to compute, as many as a step will give it."""
        insort(self.prefilling, sequence, key=lambda other: other.id)

    def caught_up(self, sequence: Sequence) -> None:
        """It has no more known tokens to plan."""
        for working in (self.prefilling, self.tethered):
            if sequence in working:
                working.remove(sequence)

    def note_first_token(self, family: Family) -> None:
        """A member has emitted its first token; only the family's first counts."""
        if not family.spoke:
            family.spoke = True
            family.note(Event(self.last_absorbed, What.FIRST_TOKEN))

    # Leaving.

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End one sequence, whatever state it is in; False if it had ended already."""
        if sequence.finished:
            return False
        if sequence.state is State.RUNNING:
            self.depart(sequence, reason)
        else:
            self.seating.fix_tokens(sequence)
            sequence.finish(reason)
            self.settle(sequence.family)
        request = sequence.request
        speaks = request.beam is None and not request.sampling.pooled
        if speaks and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.lengths.note(max(len(sequence.tokens) - len(request.prompt), 1))
        return True

    def fail(self, family: Family, reason: FinishReason = FinishReason.FAILED) -> None:
        """A whole family ends without a step to be told with: those who wait for it hear of it in the next result."""
        ended = {member.id for member in family.members if self.finish(member, reason)}
        self.ended_early.extend(member for member in family.answers if member.id in ended)

    def preempt(self, family: Family, by: RequestId) -> None:
        """The whole family makes room. It comes back to its old place in the queue."""
        family.num_preemptions += 1
        self.tally.preemptions += 1
        self.withdraw(family, by)

    def withdraw(self, family: Family, by: RequestId | None) -> None:
        """All its running members get up; they will be seated again. By nobody: their steps were lost."""
        num_computed = max((self.num_computed(member) for member in self.running(family)), default=0)
        family.note(Event(self.last_planned + 1, What.PREEMPTED, tokens=num_computed, other=by))
        self.beams.rest(family)
        for member in self.running(family):
            if member.state is State.RUNNING:
                self.depart(member, None)

    def running(self, family: Family) -> tuple[Sequence, ...]:
        return tuple(member for member in family.members if member.state is State.RUNNING)

    def depart(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Get up from the row: finished for a reason, or preempted for none."""
        assert sequence.row is not None, sequence
        self._bill(sequence)
        if reason is None:
            sequence.num_had = max(sequence.num_had, self.num_computed(sequence))
        self.caught_up(sequence)
        if self.fresh:
            self.fresh = [other for other in self.fresh if other is not sequence]
        if self.tells:
            self.tells = [tell for tell in self.tells if tell.row != sequence.row]
        self.cruise.stop(sequence.row)
        self.masked.forget(sequence.row)
        self.leaders.end(sequence)
        orphans = self.forks.orphans(sequence)
        self.seating.rise(sequence, reason, self.last_planned)
        self.release_up_to(self.last_absorbed)
        for orphan in orphans:
            if orphan.state is State.RUNNING:
                self.depart(orphan, None)

    def _bill(self, sequence: Sequence) -> None:
        """It pays for what it computed since it last got a block."""
        row = sequence.row
        assert row is not None, sequence
        if self.cruise.under_way(row):
            position = self.cruise.position_at(row, self.last_planned) + 1
            self.charges.pay_last(row, sequence.request.tenant, position, self.kv.tables.lengths.item(row))

    def release_up_to(self, step: int) -> None:
        """Law (a): what the steps in flight no longer touch goes back."""
        while (sequence := self.seating.next_released(step)) is not None:
            row = sequence.row
            assert row is not None, sequence
            if sequence.finish_reason in (FinishReason.ERROR, FinishReason.FAILED):
                self.kv.distrust(row, sequence.family.owner)
            else:
                self.kv.close(row, sequence.family.owner, self._kept(sequence))
            self.seating.release(sequence)
            self.settle(sequence.family)

    def _kept(self, sequence: Sequence) -> IntArray:
        """The tokens whose keys and values are known to be right, for the tree."""
        if sequence.request.beam is not None:
            return sequence.tokens[:0]
        known = self.seating.known(sequence)
        num_computed = sequence.num_computed
        if sequence.caught_up:
            num_computed = max(num_computed, len(known) - 1)
        return known[:num_computed]

    def settle(self, family: Family) -> None:
        """When no member sits any more, the family waits again or is forgotten."""
        if [member for member in family.members if member.row is not None]:
            return
        request = family.request
        if request.id not in self.families:
            return
        if not family.finished:
            if family not in self.room and not self.leaders.follows(family):
                self.room.push(family, self.now_s)
            return
        self.room.discard(family)
        self.leaders.forget(family)
        del self.families[request.id]
        self.beams.forget(family)
        self.shares.depart(request.tenant)
        reasons = {member.finish_reason.value for member in family.answers if member.finish_reason is not None}
        family.note(Event(self.last_absorbed, What.FINISHED, detail=",".join(sorted(reasons))))

    def wake(self) -> None:
        """Some of those whose leader has come far enough, or is gone, go back to the queue."""
        for family in self.leaders.take_ready(MOST_WOKEN):
            self.room.push(family, family.arrived_s)

    # What follows from the books.

    def num_computed(self, sequence: Sequence) -> int:
        """Positions planned for a seated sequence so far."""
        assert sequence.row is not None, sequence
        if self.cruise.under_way(sequence.row):
            return self.cruise.position_at(sequence.row, self.last_planned) + 1
        return sequence.num_planned

    def num_freed(self, family: Family) -> int:
        """Blocks and promises that would come back if the whole family left."""
        rows = [member.row for member in self.running(family) if member.row is not None]
        tables = [self.kv.tables.of(row) for row in rows]
        blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
        return self.kv.pool.count_readers(blocks, counts) + sum(int(self.kv.promised[row]) for row in rows)

    def row_sequences(self, rows: Iterable[int]) -> list[Sequence]:
        """Who sits in these rows: the most important first, then the earliest."""
        seated = [self.seating.seated[Row(row)] for row in rows]
        return sorted(seated, key=lambda sequence: (sequence.request.priority, sequence.id))
