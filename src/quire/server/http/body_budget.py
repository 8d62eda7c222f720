"""Body budget: a bound on the request bodies in memory, in all and by client. Does not depend on HTTP or routes.

A body counts from its head until its response is complete. Until then it may be incomplete for a while, and takes no
place in the queue; so a client that sends many bodies slowly uses up its own allowance, and nothing of the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.core.errors import QuireError


class BodyBudgetExceeded(QuireError):
    """A client has as many bodies on their way, or as many bytes in them, as it may have."""

    status = 429
    code = "too_many_bodies"
    retry_after_s = 1.0


@dataclass(eq=False, slots=True)
class PendingBody:
    """One body, as far as it has arrived."""

    client: str
    drop: Callable[[], None]  # refuses it; called only while it is incomplete
    num_bytes: int = 0


@dataclass(slots=True)
class _ClientBodies:
    num_bytes: int = 0
    num_bodies: int = 0
    incomplete: dict[PendingBody, None] = field(default_factory=dict)  # the oldest first


class BodyBudget:
    """What all bodies may take. Over the total, the client with the most bytes loses its oldest incomplete body."""

    def __init__(self, *, total_bytes: int, client_bytes: int, client_incomplete: int) -> None:
        self._total_bytes = total_bytes
        self._client_bytes = client_bytes
        self._client_incomplete = client_incomplete
        self._clients: dict[str, _ClientBodies] = {}
        self.num_bytes = 0

    def add(self, body: PendingBody) -> None:
        """A body begins, or `BodyBudgetExceeded` is raised."""
        client = self._clients.get(body.client)
        if client is None:
            client = self._clients[body.client] = _ClientBodies()
        elif len(client.incomplete) >= self._client_incomplete:
            raise BodyBudgetExceeded(
                f"{len(client.incomplete)} requests of this client have an incomplete body, which is the limit."
            )
        client.num_bodies += 1
        client.incomplete[body] = None

    def grow(self, body: PendingBody, num_bytes: int) -> None:
        """More of a body arrives; `BodyBudgetExceeded` is raised if its client has too much."""
        client = self._clients[body.client]
        self.num_bytes += num_bytes
        client.num_bytes += num_bytes
        body.num_bytes += num_bytes
        if client.num_bytes > self._client_bytes:
            raise BodyBudgetExceeded(f"The bodies of this client's requests have more than {self._client_bytes} bytes.")
        while self.num_bytes > self._total_bytes:
            largest = max((each for each in self._clients.values() if each.incomplete), key=lambda each: each.num_bytes)
            if largest is client:
                raise BodyBudgetExceeded(f"The bodies of all requests have more than {self._total_bytes} bytes.")
            next(iter(largest.incomplete)).drop()

    def complete(self, body: PendingBody) -> None:
        del self._clients[body.client].incomplete[body]

    def remove(self, body: PendingBody) -> None:
        """Its request has ended, complete or not."""
        client = self._clients[body.client]
        client.incomplete.pop(body, None)
        client.num_bodies -= 1
        client.num_bytes -= body.num_bytes
        self.num_bytes -= body.num_bytes
        if not client.num_bodies:
            del self._clients[body.client]
