"""The waiting room: sequences in order of arrival. Knows nothing of blocks or rows."""

from heapq import heappop, heappush

from quire.core.ids import SequenceId
from quire.core.request import Sequence, State


class WaitingQueue:
    """First come, first served; a preempted sequence comes back to its old place. Ids grow with arrival."""

    __slots__ = ("_heap", "_waiting")

    def __init__(self) -> None:
        self._heap: list[tuple[SequenceId, Sequence]] = []
        self._waiting: set[SequenceId] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        assert sequence.state is State.WAITING and sequence.id not in self._waiting, sequence
        self._waiting.add(sequence.id)
        heappush(self._heap, (sequence.id, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Take out one that was aborted; its entry is dropped when it comes to the front."""
        self._waiting.discard(sequence.id)

    def first(self) -> Sequence | None:
        while self._heap and self._heap[0][0] not in self._waiting:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.first()
        assert sequence is not None, "pop() from an empty queue"
        heappop(self._heap)
        self._waiting.discard(sequence.id)
        return sequence
