"""One request, read piece by piece by whoever asked for it, while others may turn the same engine."""

from collections import deque
from collections.abc import Callable, Iterator

from quire.engine.local import LocalFront
from quire.engine.outputs import Delta
from quire.engine.ticket import Ticket


class DeltaStream(Iterator[Delta]):
    """The deltas of a request, in order. Closing it, or letting go of it, gives the request up."""

    def __init__(
        self, front: LocalFront, ticket: Ticket, turn: Callable[["DeltaStream"], None], abandoned: deque[Ticket]
    ) -> None:
        self._front = front
        self._ticket = ticket
        self._turn = turn  # must `put` what it brings for this request, until it is served
        self._abandoned = abandoned  # requests that whoever turns the engine must abort
        self._unread: deque[Delta] = deque()

    def put(self, delta: Delta) -> None:
        self._unread.append(delta)

    @property
    def served(self) -> bool:
        """Whether there is something to read, or nothing more will come."""
        return bool(self._unread) or self._ticket.finished

    def __next__(self) -> Delta:
        try:
            while not self.served:
                self._turn(self)
        except BaseException:
            self.close()
            raise
        if not self._unread:
            raise StopIteration
        return self._unread.popleft()

    def close(self) -> None:
        self._unread.clear()
        if not self._ticket.finished:
            self._front.abort(self._ticket)

    def __del__(self) -> None:
        # Garbage is collected anywhere, in the middle of a step too: leave a note, and touch nothing.
        self._abandoned.append(self._ticket)
