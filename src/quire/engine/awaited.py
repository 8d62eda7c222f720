"""Requests that somebody waits for together, while others may turn the same engine."""

from collections.abc import Iterable

from quire.engine.outputs import Delta
from quire.engine.ticket import Ticket


class Awaited:
    """Counts what is still to come."""

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._pending = {ticket.request_id: ticket for ticket in tickets}
        self.num_tokens = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def served(self) -> bool:
        return not self._pending

    def put(self, delta: Delta) -> None:
        """Whoever turned the engine has this for one of them."""
        self.num_tokens += len(delta.token_ids)
        ticket = self._pending.get(delta.request_id)  # of several continuations the first to be told may have ended all
        if ticket is not None and ticket.finished:
            del self._pending[delta.request_id]
