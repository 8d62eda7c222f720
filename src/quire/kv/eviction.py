"""The leaves of one tier in the order of their eviction. Knows nothing of what becomes of them.

The least important class goes first, and in it the least recently used leaf. Importance and stamps only ever grow, so
an entry made long ago is at worst too early: it is put right when it comes up, and a touch never searches for it.

Remembers what was evicted, when and for whom, so that a miss can be explained. Holds hashes, never tokens.
"""

from collections import OrderedDict, deque
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from quire.core.ids import RequestId
from quire.core.moves import Tier
from quire.kv.block_pool import BlockPool
from quire.kv.radix_node import Node

_Entry = tuple[int, int, int, Node]


def _entry(node: Node) -> _Entry:
    return -node.priority, node.stamp, node.serial, node


class EvictionQueue:
    """Nodes of one tier that have idle blocks at their end and nothing of this tier below them."""

    __slots__ = ("_heap", "_limit", "_line", "_on_device", "_pool", "_queued", "_tier")

    def __init__(self, tier: Tier, pool: BlockPool) -> None:
        self._tier = tier
        self._on_device = tier is Tier.DEVICE
        self._pool = pool
        self._line: deque[_Entry] = deque()  # those that came in their order, as nearly all do
        self._heap: list[_Entry] = []  # the others
        self._queued: set[Node] = set()  # whose entry is in one of them
        self._limit = 64

    def offer(self, node: Node) -> None:
        """Take a node in, if there is something to evict and it is not here yet."""
        if node in self._queued or not self.is_evictable(node):
            return
        self._queued.add(node)
        self._enter(_entry(node))
        if len(self._queued) > self._limit:
            self._purge()

    def _enter(self, entry: _Entry) -> None:
        if not self._line or self._line[-1] < entry:
            self._line.append(entry)
        else:
            heappush(self._heap, entry)

    def first(self) -> Node | None:
        """The next to be evicted. It stays here until it has nothing more to evict."""
        line, heap = self._line, self._heap
        while line or heap:
            in_line = not heap or (len(line) > 0 and line[0] < heap[0])
            entry = line[0] if in_line else heap[0]
            node = entry[3]
            evictable = self.is_evictable(node)
            if evictable and entry == _entry(node):
                return node
            if in_line:
                line.popleft()
            else:
                heappop(heap)
            if evictable:  # it was used meanwhile
                self._enter(_entry(node))
            else:
                self._queued.remove(node)
        return None

    def is_evictable(self, node: Node) -> bool:
        if node.tier is not self._tier or not len(node.blocks):
            return False
        leaf = node.num_device_children == 0 if self._on_device else not node.children
        return leaf and self._pool.is_evictable(node.blocks.item(-1))

    def num_evictable(self, node: Node) -> int:
        """Idle blocks at the end of a node. Tables hold paths from the root: what follows an idle block is idle."""
        blocks = node.blocks
        if self._pool.is_evictable(blocks.item(0)):  # mostly
            return len(blocks)
        low, high = 1, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if self._pool.is_evictable(blocks.item(middle)):
                high = middle
            else:
                low = middle + 1
        return len(blocks) - low

    def __contains__(self, node: Node) -> bool:
        return node in self._queued

    def _purge(self) -> None:
        """Forget entries of nodes that have nothing to evict any more."""
        self._line = deque([entry for entry in self._line if self.is_evictable(entry[3])])
        self._heap = [entry for entry in self._heap if self.is_evictable(entry[3])]
        heapify(self._heap)
        self._queued = {entry[3] for entry in (*self._line, *self._heap)}
        self._limit = max(64, 2 * len(self._queued))


MOST_GHOSTS = 16_384  # arbitrary: about 3 MB; that two of them have one hash of 64 bits is not to be expected


class CacheMissKind(Enum):
    """Why a block was not in the cache."""

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_PARTITION = "other partition"


class CacheMiss(NamedTuple):
    """Why a block was not in the cache; if it was evicted, in which step and to make room for whom."""

    kind: CacheMissKind
    step: int | None = None
    by: RequestId | None = None

    @property
    def text(self) -> str:
        return self.kind.value if self.step is None else f"{self.kind.value} in step {self.step}"


class EvictionHistory:
    """The latest evictions, by the path from the root to the end of the first block that went."""

    __slots__ = ("_capacity", "_misses")

    def __init__(self, capacity: int = MOST_GHOSTS) -> None:
        self._capacity = capacity
        self._misses: OrderedDict[int, CacheMiss] = OrderedDict()  # by a hash of the path

    def remember(self, partition: str, path: bytes, miss: CacheMiss) -> None:
        name = _name(partition, path)
        self._misses[name] = miss
        self._misses.move_to_end(name)
        if len(self._misses) > self._capacity:
            self._misses.popitem(last=False)

    def find(self, partition: str, path: bytes) -> CacheMiss | None:
        return self._misses.get(_name(partition, path))

    def clear(self) -> None:
        self._misses.clear()

    def __len__(self) -> int:
        return len(self._misses)


def _name(partition: str, path: bytes) -> int:
    return hash((partition, path))
