"""Bounded overtaking: the shortest prompt first, while no earlier one is overtaken by more than a part of its work.

Prompts wait in places, the smallest first. The work of a prompt is the number of its tokens to compute. One with a
later place may leave first if it is shorter, and if each longer prompt before it has room: a share of the work that was
before that prompt when it came, and of its own, less what has overtaken it.

**Bound.** The prompts that leave before an earlier one have together at most `share` times the work before that one,
when it came, and its own. So a prompt that would come after W tokens first come first served comes after at most
(1 + share) × W, and none starves.

Prompts are in size classes, four to each power of two; within a class the order is that of the places. `overtaken`
counts the tokens that left before the first of a class from a smaller one and a later place. It grows for all prompts
of a class alike, so the least room of a class is the top of a heap, and an operation costs time in the number of
classes and the logarithm of the rest. Proof of the bound: what overtakes a prompt is of a smaller class, since a class
is in order, and since a class whose first lacks room is blocked by an earlier, larger one, which blocks every class
between them as well and goes before them. Its place is later than the first place of the prompt's class. So it was
compared with the least room of that class, and counted.
"""

from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple


class QueuePlace(NamedTuple):
    """The smallest is first."""

    deadline_s: float
    order: int


class _WaitingWork(NamedTuple):
    place: QueuePlace
    work: int  # tokens to compute
    size: int
    limit: int  # `overtaken` of its class may grow to this


class _WorkLimit(NamedTuple):
    limit: int
    order: int


_SLACK = 32  # a heap is rebuilt when it has this many more than twice its live entries
_FIRST = QueuePlace(-inf, -1)


def size_class(work: int) -> int:
    """Four classes to each power of two."""
    scaled = work << 2
    return scaled.bit_length() << 2 | (scaled >> (scaled.bit_length() - 3) & 3)


class _SizeClass:
    """The places and limits of one class. Removed entries are dropped lazily."""

    __slots__ = ("_limits", "_places", "_waiting", "num_waiting", "number", "overtaken")

    def __init__(self, number: int, waiting: dict[int, _WaitingWork]) -> None:
        self.number = number
        self._waiting = waiting
        self._places: list[QueuePlace] = []
        self._limits: list[_WorkLimit] = []
        self.num_waiting = 0
        self.overtaken = 0  # tokens that left before the first of this class, from a smaller class and a later place

    def push(self, entry: _WaitingWork) -> None:
        self.num_waiting += 1
        heappush(self._places, entry.place)
        heappush(self._limits, _WorkLimit(entry.limit, entry.place.order))

    def remove_one(self) -> None:
        self.num_waiting -= 1
        if len(self._places) > 2 * self.num_waiting + _SLACK or len(self._limits) > 2 * self.num_waiting + _SLACK:
            live = [entry for entry in self._waiting.values() if entry.size == self.number]
            self._places = [entry.place for entry in live]
            self._limits = [_WorkLimit(entry.limit, entry.place.order) for entry in live]
            heapify(self._places)
            heapify(self._limits)

    def first(self) -> QueuePlace:
        while not self._is_live(self._places[0].order):
            heappop(self._places)
        return self._places[0]

    @property
    def room(self) -> int:
        """Tokens by which every prompt of this class may still be overtaken."""
        while True:
            limit, order = self._limits[0]
            if self._is_live(order) and self._waiting[order].limit == limit:
                return limit - self.overtaken
            heappop(self._limits)

    def _is_live(self, order: int) -> bool:
        """One that left may have returned with another size."""
        entry = self._waiting.get(order)
        return entry is not None and entry.size == self.number


class OvertakingQueue:
    """Prompts by place, the next one to leave by place and size. With a share of 0 it is first come first served."""

    __slots__ = ("_last", "_share", "_sizes", "_waiting", "_work")

    def __init__(self, share: float) -> None:
        self._share = share
        self._waiting: dict[int, _WaitingWork] = {}  # by order
        self._sizes: dict[int, _SizeClass] = {}  # those with prompts
        self._work = 0  # of all
        self._last = _FIRST  # no waiting place is later

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, place: QueuePlace, work: int) -> None:
        """A prompt comes. In the middle of the queue only its own work counts for its room: what is before it would
        have to be searched for."""
        assert work > 0, work
        before = self._work if place >= self._last else 0
        self._last = max(self._last, place)
        self._work += work
        number = size_class(work) if self._share else 0
        size = self._sizes.get(number)
        if size is None:
            size = self._sizes[number] = _SizeClass(number, self._waiting)
        limit = size.overtaken + int(self._share * (before + work))
        entry = self._waiting[place.order] = _WaitingWork(place, work, number, limit)
        size.push(entry)

    def remove(self, order: int, *, served: bool) -> None:
        """A prompt leaves: served, or given up."""
        entry = self._waiting.pop(order)
        self._work -= entry.work
        own = self._sizes[entry.size]
        own.remove_one()
        if own.num_waiting == 0:
            del self._sizes[entry.size]
        if served:
            for size in self._sizes.values():
                if size.number > entry.size and size.first() < entry.place:
                    size.overtaken += entry.work
        if not self._waiting:
            self._last = _FIRST

    def first(self) -> QueuePlace:
        """The first by place alone; the queue must not be empty."""
        return min([size.first() for size in self._sizes.values()])

    def head(self) -> QueuePlace:
        """The shortest that may leave; at the latest, the first by place. The queue must not be empty."""
        if len(self._sizes) == 1:
            return self.first()
        sizes = [self._sizes[number] for number in sorted(self._sizes)]
        firsts = [size.first() for size in sizes]
        for index, place in enumerate(firsts):
            work = self._waiting[place.order].work
            passed = [sizes[other] for other in range(index + 1, len(sizes)) if firsts[other] < place]
            if not passed or min([size.room for size in passed]) >= work:
                return place
        raise AssertionError("the first by place may always leave")
