"""Remembers what was evicted, when and for whom, so that a miss can be explained. Holds digests, never tokens."""

from collections import OrderedDict
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from quire.core.ids import RequestId

MOST_GHOSTS = 16_384  # arbitrary: about 3 MB


class MissKind(Enum):
    """Why a block was not in the cache."""

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_PARTITION = "other partition"


class Miss(NamedTuple):
    """Why a block was not in the cache; if it was evicted, in which step and to make room for whom."""

    kind: MissKind
    step: int | None = None
    by: RequestId | None = None


class Ghosts:
    """The latest evictions, by the path from the root to the end of the first block that went."""

    __slots__ = ("_capacity", "_misses")

    def __init__(self, capacity: int = MOST_GHOSTS) -> None:
        self._capacity = capacity
        self._misses: OrderedDict[bytes, Miss] = OrderedDict()

    def remember(self, partition: str, path: bytes, miss: Miss) -> None:
        digest = _digest(partition, path)
        self._misses[digest] = miss
        self._misses.move_to_end(digest)
        if len(self._misses) > self._capacity:
            self._misses.popitem(last=False)

    def find(self, partition: str, path: bytes) -> Miss | None:
        return self._misses.get(_digest(partition, path))

    def clear(self) -> None:
        self._misses.clear()

    def __len__(self) -> int:
        return len(self._misses)


def _digest(partition: str, path: bytes) -> bytes:
    name = partition.encode()
    return blake2b(len(name).to_bytes(4, "big") + name + path, digest_size=16).digest()
