"""Keeps what was used last, bounded by bytes. Knows not what it keeps."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def cost_bytes(self) -> int:
        """What it takes now; may grow while it is kept."""
        ...


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Sized)


class Cache(Generic[Key, Value]):
    """Safe to use from many threads."""

    __slots__ = ("_entries", "_lock", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Key) -> Value | None:
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                self._trim()
            return value

    def keep(self, key: Key, value: Value) -> Value:
        """What is kept under this key: another thread may have been first."""
        with self._lock:
            kept = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            self._trim()
            return kept

    @property
    def cost_bytes(self) -> int:
        with self._lock:
            return self._total()

    def __len__(self) -> int:
        return len(self._entries)

    def _total(self) -> int:
        return sum(value.cost_bytes for value in self._entries.values())

    def _trim(self) -> None:
        total = self._total()
        while total > self.max_bytes and self._entries:
            _, given_up = self._entries.popitem(last=False)
            total -= given_up.cost_bytes
