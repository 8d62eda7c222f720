"""What kept the head of the queue out, step by step, and who sat down meanwhile. Bounded; costs the same at any size.

Those behind the head wait for what the head waits for. Whoever is seated although somebody came earlier has
overtaken it, by class, share, lane or deadline.
"""

from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from quire.core.events import Cause
from quire.core.ids import RequestId

MOST = 4096  # changes, and seatings, that are remembered; arbitrary, never tuned


class Stretch(NamedTuple):
    """The steps [start, stop), in which the head of the queue was kept out by one cause; by none: nobody waited."""

    start: int
    stop: int
    cause: Cause | None


class Seated(NamedTuple):
    """Somebody sat down. Families are numbered as they arrive."""

    step: int
    order: int
    request: RequestId


class Stalls:
    """The latest history of a queue."""

    __slots__ = ("_changes", "_seated")

    def __init__(self, most: int = MOST) -> None:
        self._changes: deque[tuple[int, Cause | None]] = deque(maxlen=most)  # from which step on, what
        self._seated: deque[tuple[int, int, RequestId]] = deque(maxlen=most)  # as in `Seated`, which few ever ask for

    def note(self, step: int, cause: Cause | None) -> None:
        """How a plan ended for the head. A step that was not taken is noted again, and the last note counts."""
        changes = self._changes
        if changes and changes[-1][0] == step:
            changes.pop()
        if not changes or changes[-1][1] is not cause:
            changes.append((step, cause))

    def note_seated(self, step: int, order: int, request: RequestId) -> None:
        self._seated.append((step, order, request))

    def between(self, start: int, stop: int) -> tuple[Stretch, ...]:
        """The steps [start, stop) by cause, in order. What is forgotten is left out."""
        changes = list(self._changes)
        stretches = []
        first = max(bisect_right(changes, start, key=lambda change: change[0]) - 1, 0)
        for number in range(first, len(changes)):
            begins, cause = changes[number]
            ends = changes[number + 1][0] if number + 1 < len(changes) else stop
            if begins >= stop:
                break
            if (kept := Stretch(max(begins, start), min(ends, stop), cause)).start < kept.stop:
                stretches.append(kept)
        return tuple(stretches)

    def overtakers(self, order: int, start: int, stop: int) -> tuple[Seated, ...]:
        """Those who came later and sat down in the steps [start, stop)."""
        return tuple(Seated(*each) for each in self._seated if start <= each[0] < stop and each[1] > order)
