"""Eviction order of the prefix tree (LRU within a priority class), and the history that explains cache misses.

The queue orders the leaves of one tier: the lowest class first, in it the least recently used leaf. Priority and last
use of a node only ever grow, so an old entry is at worst too early: it is corrected when it comes up, and a use never
searches the queue. Each tenant has its part of the cache: what one caches does not evict what another still uses, as
long as that is no more than an equal part. The history holds hashes, never tokens. Neither depends on what happens to
an evicted block.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from quire.core.ids import RequestId
from quire.core.moves import Tier
from quire.core.request import tenant_of
from quire.kv.block_pool import BlockPool
from quire.kv.radix_node import Node

_Entry = tuple[int, int, int, Node]


def _entry(node: Node) -> _Entry:
    return -node.priority, node.last_use, node.serial, node


class EvictionQueue:
    """Nodes of one tier that end in evictable blocks and have no node of this tier below them."""

    __slots__ = ("_heap", "_limit", "_on_device", "_pool", "_queued", "_sorted", "_tier")

    def __init__(self, tier: Tier, pool: BlockPool) -> None:
        self._tier = tier
        self._on_device = tier is Tier.DEVICE
        self._pool = pool
        self._sorted: deque[_Entry] = deque()  # entries that came in order, as nearly all do
        self._heap: list[_Entry] = []  # the other entries
        self._queued: set[Node] = set()  # nodes with an entry in one of the two
        self._limit = 64

    def offer(self, node: Node) -> None:
        """Queue a node that has something to evict, unless it is queued already."""
        if node in self._queued or not self.is_evictable(node):
            return
        self._queued.add(node)
        self._enter(_entry(node))
        if len(self._queued) > self._limit:
            self._purge()

    def _enter(self, entry: _Entry) -> None:
        if not self._sorted or self._sorted[-1] < entry:
            self._sorted.append(entry)
        else:
            heappush(self._heap, entry)

    def first(self) -> Node | None:
        """The next node to evict from. It stays queued until it has nothing to evict."""
        ordered, heap = self._sorted, self._heap
        while ordered or heap:
            from_sorted = not heap or (len(ordered) > 0 and ordered[0] < heap[0])
            entry = ordered[0] if from_sorted else heap[0]
            node = entry[3]
            evictable = self.is_evictable(node)
            if evictable and entry == _entry(node):
                return node
            if from_sorted:
                ordered.popleft()
            else:
                heappop(heap)
            if evictable:  # it was used since
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
        """Evictable blocks at the end of a node. Tables hold paths from the root: all after an evictable block are."""
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
        """Remove the entries of nodes that have nothing to evict."""
        self._sorted = deque([entry for entry in self._sorted if self.is_evictable(entry[3])])
        self._heap = [entry for entry in self._heap if self.is_evictable(entry[3])]
        heapify(self._heap)
        self._queued = {entry[3] for entry in (*self._sorted, *self._heap)}
        self._limit = max(64, 2 * len(self._queued))


ACTIVE_WINDOW = 4  # times the blocks of the tier: a tenant that uses nothing while as many are cached has no share


class FairEvictionQueue(EvictionQueue):
    """The leaves of one tier, by tenant: of each class first those of tenants above their share, or inactive.

    The share is an equal part of all that is cached, among the active tenants. Below it a tenant loses nothing while
    another is above, however much that one caches; with one tenant, or all within their shares, the least recently used
    leaf of all goes first.
    """

    __slots__ = ("_cached", "_num_cached", "_num_inserted", "_queues", "_used")

    def __init__(self, tier: Tier, pool: BlockPool) -> None:
        super().__init__(tier, pool)
        self._queues: dict[str, EvictionQueue] = {}  # by tenant
        self._cached: dict[str, int] = {}  # blocks by tenant
        self._used: dict[str, int] = {}  # `_num_inserted` at the last use, by tenant
        self._num_cached = 0
        self._num_inserted = 0

    def count(self, partition: str, num_blocks: int) -> None:
        """Blocks were cached; if negative, dropped."""
        tenant = tenant_of(partition)
        num_left = self._cached.get(tenant, 0) + num_blocks
        self._num_cached += num_blocks
        self._num_inserted += max(num_blocks, 0)
        if num_left:
            self._cached[tenant] = num_left
            self._used.setdefault(tenant, self._num_inserted)
        else:
            del self._cached[tenant], self._used[tenant]

    def use(self, partition: str) -> None:
        """A node of a partition was used."""
        tenant = tenant_of(partition)
        if tenant in self._used:
            self._used[tenant] = self._num_inserted

    def offer(self, node: Node) -> None:
        tenant = tenant_of(node.partition)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = EvictionQueue(self._tier, self._pool)
        queue.offer(node)

    def first(self) -> Node | None:
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return queue.first()
        within = self._within_share()
        heads = []
        for tenant, queue in tuple(self._queues.items()):
            node = queue.first()
            if node is None:
                del self._queues[tenant]
            else:
                heads.append((-node.priority, tenant in within, node.last_use, node.serial, node))
        return min(heads)[-1] if heads else None

    def _within_share(self) -> set[str]:
        """The active tenants that have no more than their share."""
        oldest = self._num_inserted - ACTIVE_WINDOW * self._pool.num_in_service
        active = [tenant for tenant, used in self._used.items() if used >= oldest]
        return {tenant for tenant in active if self._cached[tenant] * len(active) <= self._num_cached}

    def __contains__(self, node: Node) -> bool:
        queue = self._queues.get(tenant_of(node.partition))
        return queue is not None and node in queue

    def audit(self, nodes: Iterable[Node]) -> None:
        """The blocks of these nodes are counted right, by tenant."""
        cached: Counter[str] = Counter()
        for node in nodes:
            cached[tenant_of(node.partition)] += len(node.blocks)
        assert cached == self._cached, f"cached blocks by tenant are {self._cached}, not {cached}"
        assert cached.total() == self._num_cached and self._used.keys() == cached.keys(), self._used


MAX_EVICTIONS_KEPT = 16_384  # arbitrary: about 3 MB; two equal hashes of 64 bits are not to be expected


class CacheMissKind(Enum):
    """Why a block was not in the cache."""

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_PARTITION = "other partition"


class CacheMiss(NamedTuple):
    """Why a block was not in the cache; if it was evicted, in which step and for which request."""

    kind: CacheMissKind
    step: int | None = None
    by: RequestId | None = None

    @property
    def text(self) -> str:
        return self.kind.value if self.step is None else f"{self.kind.value} in step {self.step}"


class EvictionHistory:
    """The latest evictions, by the path from the root to the end of the first evicted block."""

    __slots__ = ("_capacity", "_misses")

    def __init__(self, capacity: int = MAX_EVICTIONS_KEPT) -> None:
        self._capacity = capacity
        self._misses: OrderedDict[int, CacheMiss] = OrderedDict()  # by a hash of partition and path

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
