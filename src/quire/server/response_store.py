"""Stored responses of the Responses API: in memory, bounded in number and bytes, in total and by owner.

A response belongs to the client that made it; for any other it does not exist. Beyond a limit of its owner, the least
recently used response of that owner is dropped; beyond a limit of the server, that of the owner with the most bytes:
what one owner stores does not cost another its share. Responses that are being generated are never dropped. Used on the
event loop's thread only, but for `item`. Does not depend on HTTP or the engine.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.core.errors import QuireError

_ENTRY_BYTES = 1024  # the objects of one response, beside its JSON
_ITEM_BYTES = 256  # the objects of one item
_LARGEST_SHARE = 16  # of its owner's bytes that one response may take: each request that continues it reads them all


class StoreFull(QuireError):
    """There is no room for a response that must be stored."""

    status = 429
    code = "response_store_full"
    retry_after_s = 5.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Upper bounds. A response takes a few kilobytes, so bytes matter only for long conversations."""

    max_responses: int = 4096
    max_bytes: int = 256 << 20
    max_responses_per_owner: int = 1024
    max_bytes_per_owner: int = 64 << 20

    def describe(self) -> str:
        return f"{self.max_responses_per_owner} responses or {self.max_bytes_per_owner >> 20} MiB for each client"


class StoredItem(NamedTuple):
    """An item of a conversation, as JSON."""

    id: str
    json: bytes


class RunningResponse(Protocol):
    """A response that is being generated in the background."""

    def body(self) -> bytes:
        """The response so far, as JSON."""

    def cancel(self) -> bytes:
        """End it. The cancelled response, as JSON."""


@dataclass(slots=True)
class StoredResponse:
    """A response, and the conversation that it answers."""

    id: str
    owner: str
    body: bytes  # JSON
    input: tuple[StoredItem, ...]  # with those of the responses before it
    output: tuple[StoredItem, ...] = ()
    background: bool = False
    outline: bytes | None = b""  # of its stream: the events follow from it and the body; None: there are none
    running: RunningResponse | None = None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        items = (*self.input, *self.output)
        content = len(self.body) + len(self.outline or b"") + sum(len(item.id) + len(item.json) for item in items)
        self.num_bytes = _ENTRY_BYTES + _ITEM_BYTES * len(items) + content

    @property
    def conversation(self) -> tuple[StoredItem, ...]:
        """What the next turn continues."""
        return self.input + self.output


class _Owned:
    """The responses of one owner, least recently used first."""

    __slots__ = ("by_item", "num_bytes", "responses")

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.by_item: dict[str, StoredItem] = {}  # output items, by their ids
        self.num_bytes = 0

    def add(self, response: StoredResponse) -> None:
        self.responses[response.id] = response
        self.by_item.update((item.id, item) for item in response.output)
        self.num_bytes += response.num_bytes

    def remove(self, response: StoredResponse) -> None:
        del self.responses[response.id]
        for item in response.output:
            self.by_item.pop(item.id, None)
        self.num_bytes -= response.num_bytes

    def oldest(self, kept: StoredResponse) -> StoredResponse | None:
        """The one to drop next."""
        return next((each for each in self.responses.values() if each.running is None and each is not kept), None)


class ResponseStore:
    """Put, get, delete."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._owned: dict[str, _Owned] = {}
        self.num_responses = self.num_bytes = 0

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response, which becomes the most recently used; None if this owner has no such response."""
        owned = self._owned.get(owner)
        if owned is None or response_id not in owned.responses:
            return None
        owned.responses.move_to_end(response_id)
        return owned.responses[response_id]

    def item(self, owner: str, item_id: str) -> StoredItem | None:
        """An item of the output of a response."""
        owned = self._owned.get(owner)
        return None if owned is None else owned.by_item.get(item_id)

    def put(self, response: StoredResponse) -> None:
        """Store a response, in place of the one with its id. One that is too large for its owner's share is not kept;
        `StoreFull` if it is running and there is no room for it."""
        before = self.get(response.owner, response.id)
        if before is not None:
            self._remove(before)
        if response.num_bytes <= self.limits.max_bytes_per_owner // _LARGEST_SHARE:
            self._add(response)
            if self._trim(response):
                return
            self._remove(response)
        if response.running is not None:
            raise StoreFull(
                f"This response takes {response.num_bytes} bytes, and there is no room for it: this server keeps "
                f"{self.limits.describe()}. Wait for background responses to end, or delete some."
            )

    def delete(self, response: StoredResponse) -> None:
        """Remove a response, if it is still there."""
        owned = self._owned.get(response.owner)
        if owned is not None and owned.responses.get(response.id) is response:
            self._remove(response)

    def _trim(self, kept: StoredResponse) -> bool:
        """Drop others than this new one until all limits hold. False if they cannot."""
        limits, owned = self.limits, self._owned[kept.owner]
        while len(owned.responses) > limits.max_responses_per_owner or owned.num_bytes > limits.max_bytes_per_owner:
            if not self._drop_oldest([owned], kept):
                return False
        while self.num_responses > limits.max_responses or self.num_bytes > limits.max_bytes:
            if not self._drop_oldest(sorted(self._owned.values(), key=lambda each: -each.num_bytes), kept):
                return False
        return True

    def _drop_oldest(self, owners: Iterable[_Owned], kept: StoredResponse) -> bool:
        oldest = next((found for owned in owners if (found := owned.oldest(kept))), None)
        if oldest is not None:
            self._remove(oldest)
        return oldest is not None

    def _add(self, response: StoredResponse) -> None:
        self._owned.setdefault(response.owner, _Owned()).add(response)
        self.num_responses += 1
        self.num_bytes += response.num_bytes

    def _remove(self, response: StoredResponse) -> None:
        owned = self._owned[response.owner]
        owned.remove(response)
        self.num_responses -= 1
        self.num_bytes -= response.num_bytes
        if not owned.responses:
            del self._owned[response.owner]
