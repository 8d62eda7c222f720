"""Remembers what was evicted, when and for whom, so that a miss can be explained. Holds hashes, never tokens."""

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from quire.core.ids import RequestId

MOST_GHOSTS = 16_384  # arbitrary: about 3 MB; that two of them have one hash of 64 bits is not to be expected


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
        self._misses: OrderedDict[int, Miss] = OrderedDict()  # by a hash of the path

    def remember(self, partition: str, path: bytes, miss: Miss) -> None:
        name = _name(partition, path)
        self._misses[name] = miss
        self._misses.move_to_end(name)
        if len(self._misses) > self._capacity:
            self._misses.popitem(last=False)

    def find(self, partition: str, path: bytes) -> Miss | None:
        return self._misses.get(_name(partition, path))

    def clear(self) -> None:
        self._misses.clear()

    def __len__(self) -> int:
        return len(self._misses)


def _name(partition: str, path: bytes) -> int:
    return hash((partition, path))
