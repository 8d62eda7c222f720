"""When the cache or the rows are not enough: who gives way, and to whom."""

from collections.abc import Iterator

from quire.core.ids import RequestId
from quire.core.request import Family, State
from quire.sched.books import Books
from quire.sched.victims import Seated, choose_for_class, choose_victim


class Pressure:
    """Preempts families, least lost work first, none too often."""

    __slots__ = ("_books",)

    def __init__(self, books: Books) -> None:
        self._books = books

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
        books = self._books
        if books.seating.leaving:
            return False
        lower = [each for each in self._seated() if each.family.request.priority > family.request.priority]
        free = [each for each in lower if self._may_go(each.family)]
        if not free:
            return False
        missing_rows = num_rows - books.seating.num_free
        chosen = choose_for_class(free, missing_rows, shortage, books.num_freed)
        for each in chosen:
            books.tally.seats_taken += 1
            books.preempt(each.family, family.request.id)
        return bool(chosen)

    def _may_go(self, family: Family) -> bool:
        return family.num_preemptions < self._books.policy.max_preemptions

    def _seated(self) -> Iterator[Seated]:
        """Every family that computes, once."""
        seen: set[RequestId] = set()
        for sequence in self._books.seating.seated.values():
            if sequence.state is State.RUNNING and sequence.request.id not in seen:
                seen.add(sequence.request.id)
                members = self._books.running(sequence.family)
                num_lost = sum(self._books.num_computed(member) for member in members)
                yield Seated(sequence.family, len(members), num_lost)
