"""Who must be seated before a time, wherever it waits: in the queue, or for another's prefix. Knows no queue."""

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from quire.core.request import Family

_FEWEST = 64  # entries below which nobody tidies up


class _Entry(NamedTuple):
    deadline_s: float
    order: int
    family: Family


class Deadlines:
    """Families by deadline, from their arrival on. Those that were seated or gave up are dropped lazily."""

    __slots__ = ("_heap", "_limit")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._limit = _FEWEST

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, family: Family) -> None:
        """It has arrived; no matter if it has no deadline."""
        if family.request.deadline_s is None:
            return
        heappush(self._heap, _Entry(family.request.deadline_s, family.order, family))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if _waits(entry.family)]
            heapify(self._heap)
            self._limit = max(_FEWEST, 2 * len(self._heap))

    def expire(self, now_s: float) -> list[Family]:
        """Those that were not seated before their deadline, the earliest first; each is named once."""
        expired = []
        while self._heap and self._heap[0].deadline_s <= now_s:
            family = heappop(self._heap).family
            if _waits(family):
                expired.append(family)
        return expired


def _waits(family: Family) -> bool:
    """Whether it has neither been seated nor ended. Who sat once has met its deadline for good."""
    return not family.was_seated and not family.finished
