"""When the cache or the rows are not enough: who gives way, and to whom.

Who gives way. Small pure functions over the families that sit.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from quire.core.ids import RequestId
from quire.core.request import RequestGroup, SequenceState
from quire.sched.state import SchedulerState


class PreemptionCandidate(NamedTuple):
    """A family that could give way."""

    group: RequestGroup
    num_rows: int
    num_computed: int  # positions: what bringing it back costs grows with them


def by_least_loss(assigned: PreemptionCandidate) -> tuple[int, int, int]:
    """The least important class first, then the least lost work, then the latest arrival."""
    return (-assigned.group.request.priority, assigned.num_computed, -assigned.group.order)


def choose_victim(
    assigned: Iterable[PreemptionCandidate],
    may_go: Callable[[RequestGroup], bool],
    num_freed: Callable[[RequestGroup], int],
) -> RequestGroup | None:
    """Whom to preempt so that others can go on: never the one who comes first of all, nobody who would free nothing."""
    everyone = list(assigned)
    first = min(everyone, key=lambda each: (each.group.request.priority, each.group.order), default=None)
    for each in sorted(everyone, key=by_least_loss):
        if each is not first and may_go(each.group) and num_freed(each.group) > 0:
            return each.group
    return None


def choose_for_class(
    lower: Iterable[PreemptionCandidate], num_rows: int, num_blocks: int, num_freed: Callable[[RequestGroup], int]
) -> tuple[PreemptionCandidate, ...]:
    """A smallest set of these that frees so many rows and blocks; none if all together do not."""
    chosen: list[PreemptionCandidate] = []
    freed: dict[int, int] = {}

    def enough(some: list[PreemptionCandidate]) -> bool:
        rows, blocks = sum(each.num_rows for each in some), sum(freed[each.group.order] for each in some)
        return rows >= num_rows and blocks >= num_blocks

    for each in sorted(lower, key=by_least_loss):
        if enough(chosen):
            break
        freed[each.group.order] = num_freed(each.group)
        chosen.append(each)
    if not enough(chosen):
        return ()
    for each in tuple(chosen):
        without = [other for other in chosen if other is not each]
        if enough(without):
            chosen = without
    return tuple(chosen)


class _FailedSearch(NamedTuple):
    """Whom nobody could make room for, as long as the same sit and it lacks no less."""

    order: int
    rows: int  # its generation
    shortage: int


class Preemption:
    """Preempts families, least lost work first, none too often."""

    __slots__ = ("_refused", "_state")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._refused: _FailedSearch | None = None

    def make_room(self, by: RequestId) -> bool:
        """Preempt somebody so that a running row can have a block; False if nobody may be, or need be.

        Law (b): while blocks are on their way back, wait for them.
        """
        state = self._state
        if state.rows.leaving or state.calendar.num_finishing:
            return False
        victim = choose_victim(self._seated(), self._may_go, state.num_freed)
        if victim is None:
            return False
        state.preempt(victim, by)
        return True

    def outranks(self, priority: int) -> bool:
        """Whether a class is higher than that of somebody who sits. Ageing does not count: two classes that age would
        take each other's seats for ever."""
        return self._state.rows.lowest_class > priority

    def preempt_for_class(self, group: RequestGroup, num_rows: int, shortage: int) -> bool:
        """Preempt the fewest of lower classes whose leaving lets this family sit, which lacks so many blocks.

        This is not pressure: nobody was denied anything.
        """
        state, rows = self._state, self._state.rows
        missing_rows = num_rows - rows.num_free
        if rows.leaving or missing_rows > rows.num_below(group.request.priority):
            return False
        if self._is_refused(group, shortage):
            return False
        lower = [each for each in self._seated() if each.group.request.priority > group.request.priority]
        free = [each for each in lower if self._may_go(each.group)]
        chosen = choose_for_class(free, missing_rows, shortage, state.num_freed) if free else ()
        self._refused = None if chosen else _FailedSearch(group.order, rows.generation, shortage)
        for each in chosen:
            state.counters.seats_taken += 1
            state.preempt(each.group, group.request.id)
        return bool(chosen)

    def _is_refused(self, group: RequestGroup, shortage: int) -> bool:
        """Whether the answer is the same as last time. Rows that only go on computing change nothing: a block more for
        one of them is a block less to be had."""
        last = self._refused
        same = last is not None and (last.order, last.rows) == (group.order, self._state.rows.generation)
        return same and last is not None and shortage >= last.shortage

    def _may_go(self, group: RequestGroup) -> bool:
        return group.num_preemptions < self._state.policy.max_preemptions

    def _seated(self) -> Iterator[PreemptionCandidate]:
        """Every family that computes, once."""
        state = self._state
        num_computed = state.calendar.num_computed(state.last_planned).tolist()
        seen: set[int] = set()
        for row, sequence in state.rows.assigned.items():
            group = sequence.group
            if sequence.state is not SequenceState.RUNNING or group.order in seen:
                continue
            if len(group.sequences) == 1:
                yield PreemptionCandidate(group, 1, max(num_computed[row], sequence.num_planned))
            else:
                seen.add(group.order)
                sequences = state.running(group)
                yield PreemptionCandidate(
                    group, len(sequences), sum(state.num_computed(member) for member in sequences)
                )
