"""Someone on an event loop who waits for one request. What a slow reader has not fetched is merged, not queued."""

import asyncio

from quire.core.errors import QuireError
from quire.engine.outputs import Delta, RequestOutput
from quire.engine.ticket import Ticket
from quire.server.visit import Visit

News = Delta | RequestOutput


class Call:
    """One answer as it comes. Belongs to the event loop's thread."""

    __slots__ = ("_awaited", "_failure", "_output", "_unread", "ticket", "visit")

    def __init__(self, ticket: Ticket, visit: Visit | None = None) -> None:
        self.ticket = ticket
        self.visit = visit  # whose answer it is, if one follows; other prompts may have come with it
        self._unread: dict[int, Delta] = {}  # by continuation
        self._output: RequestOutput | None = None
        self._failure: QuireError | None = None
        self._awaited: asyncio.Future[None] | None = None

    def tell(self, delta: Delta) -> None:
        before = self._unread.get(delta.index)
        self._unread[delta.index] = delta if before is None else before.then(delta)
        self._wake()

    def finish(self, output: RequestOutput) -> None:
        self._output = output
        self._wake()

    def fail(self, error: QuireError) -> None:
        """The first failure counts. What came before it is still heard, so no reader's pace decides what it is told."""
        if self._failure is None and self._output is None:
            self._failure = error
            self._wake()

    @property
    def over(self) -> bool:
        return self._failure is not None or self._output is not None

    async def hear(self) -> News:
        """The next news; the last is the whole output, or an error that is raised."""
        while True:
            if self._unread:
                return self._unread.pop(next(iter(self._unread)))
            if self._failure is not None:
                raise self._failure
            if self._output is not None:
                return self._output
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)
