"""When the cache or the rows are not enough: who gives way, and to whom."""

from collections.abc import Iterator
from typing import NamedTuple

from quire.core.ids import RequestId
from quire.core.request import Family, State
from quire.sched.books import Books
from quire.sched.victims import Seated, choose_for_class, choose_victim


class _Refusal(NamedTuple):
    """Whom nobody could make room for, as long as the same sit and it lacks no less."""

    order: int
    seating: int  # its generation
    shortage: int


class Pressure:
    """Preempts families, least lost work first, none too often."""

    __slots__ = ("_books", "_refused")

    def __init__(self, books: Books) -> None:
        self._books = books
        self._refused: _Refusal | None = None

    def make_room(self, by: RequestId) -> bool:
        """Preempt somebody so that a running row can have a block; False if nobody may be, or need be.

        Law (b): while blocks are on their way back, wait for them.
        """
        books = self._books
        if books.seating.leaving or books.cruise.num_coasting:
            return False
        victim = choose_victim(self._seated(), self._may_go, books.num_freed)
        if victim is None:
            return False
        books.preempt(victim, by)
        return True

    def outranks(self, priority: int) -> bool:
        """Whether a class is higher than that of somebody who sits. Ageing does not count: two classes that age would
        take each other's seats for ever."""
        return self._books.seating.lowest_class > priority

    def take_seats(self, family: Family, num_rows: int, shortage: int) -> bool:
        """Preempt the fewest of lower classes whose leaving lets this family sit, which lacks so many blocks.

        This is not pressure: nobody was denied anything.
        """
        books, seating = self._books, self._books.seating
        missing_rows = num_rows - seating.num_free
        if seating.leaving or missing_rows > seating.num_below(family.request.priority):
            return False
        if self._is_refused(family, shortage):
            return False
        lower = [each for each in self._seated() if each.family.request.priority > family.request.priority]
        free = [each for each in lower if self._may_go(each.family)]
        chosen = choose_for_class(free, missing_rows, shortage, books.num_freed) if free else ()
        self._refused = None if chosen else _Refusal(family.order, seating.generation, shortage)
        for each in chosen:
            books.tally.seats_taken += 1
            books.preempt(each.family, family.request.id)
        return bool(chosen)

    def _is_refused(self, family: Family, shortage: int) -> bool:
        """Whether the answer is the same as last time. Rows that only go on computing change nothing: a block more for
        one of them is a block less to be had."""
        last = self._refused
        same = last is not None and (last.order, last.seating) == (family.order, self._books.seating.generation)
        return same and last is not None and shortage >= last.shortage

    def _may_go(self, family: Family) -> bool:
        return family.num_preemptions < self._books.policy.max_preemptions

    def _seated(self) -> Iterator[Seated]:
        """Every family that computes, once."""
        books = self._books
        num_computed = books.cruise.num_computed(books.last_planned).tolist()
        seen: set[int] = set()
        for row, sequence in books.seating.seated.items():
            family = sequence.family
            if sequence.state is not State.RUNNING or family.order in seen:
                continue
            if len(family.members) == 1:
                yield Seated(family, 1, max(num_computed[row], sequence.num_planned))
            else:
                seen.add(family.order)
                members = books.running(family)
                yield Seated(family, len(members), sum(books.num_computed(member) for member in members))
