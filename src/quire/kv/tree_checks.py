"""Slow references beside the prefix tree, compared at every call. For `quire check`.

Matches are compared with a scan of all cached paths of the partition, evictions with a scan of all leaves. An insertion
must end in a block of its table, and what is used must count as used.
"""

from collections import Counter
from fractions import Fraction

from quire.core.ids import IntArray
from quire.core.moves import Tier
from quire.core.request import BlockOwner, tenant_of
from quire.kv.block_pool import BlockPool
from quire.kv.eviction import ACTIVE_WINDOW, FairEvictionQueue
from quire.kv.manager import KVManager
from quire.kv.radix_node import TOKEN_BYTES, Node, encode
from quire.kv.radix_tree import Inserted, PrefixMatch, RadixTree


def add_tree_checks(kv: KVManager) -> None:
    """Replace the tree of a new manager."""
    if kv.tree is not None:
        kv.tree = _CheckedTree(kv.block_size, kv.pool, kv.host)


class _CheckedEvictionQueue(FairEvictionQueue):
    """The next leaf to evict, by a scan of the tree."""

    __slots__ = ("_blocks", "_num_added", "_tree", "_used_at", "_where")

    def __init__(self, tier: Tier, pool: BlockPool, tree: RadixTree) -> None:
        super().__init__(tier, pool)
        self._where = tier
        self._blocks = pool
        self._tree = tree
        self._num_added = 0
        self._used_at: dict[str, int] = {}  # the blocks added before a tenant's last use

    def count(self, partition: str, num_blocks: int) -> None:
        super().count(partition, num_blocks)
        tenant = tenant_of(partition)
        self._num_added += max(num_blocks, 0)
        self._used_at.setdefault(tenant, self._num_added)
        if tenant not in self._cached:
            del self._used_at[tenant]

    def use(self, partition: str) -> None:
        super().use(partition)
        if tenant_of(partition) in self._used_at:
            self._used_at[tenant_of(partition)] = self._num_added

    def least(self) -> Node | None:
        """The least recently used leaf of the lowest class, of tenants above their share before others."""
        nodes = [node for node in self._tree.nodes() if node.tier is self._where]
        leaves = [node for node in nodes if self._ends(node)]
        held = Counter({tenant_of(node.partition): 0 for node in nodes})
        for node in nodes:
            held[tenant_of(node.partition)] += len(node.blocks)
        window = ACTIVE_WINDOW * self._blocks.num_in_service
        active = {tenant for tenant in held if self._num_added - self._used_at[tenant] <= window}
        within = {tenant for tenant in active if held[tenant] <= Fraction(held.total(), len(active))}
        return min(
            leaves,
            key=lambda node: (-node.priority, tenant_of(node.partition) in within, node.last_use, node.serial),
            default=None,
        )

    def first(self) -> Node | None:
        found = super().first()
        least = self.least()
        assert found is least, f"{found} is evicted first, not {least}"
        return found

    def _ends(self, node: Node) -> bool:
        below = [child for child in node.children.values() if child.tier is self._where]
        return not below and self._blocks.is_evictable(node.blocks.item(-1))


class _CheckedTree(RadixTree):
    """Matches and insertions, by the paths and blocks of the whole tree."""

    __slots__ = ("_known", "_paths")

    def __init__(self, block_size: int, pool: BlockPool, host: BlockPool | None = None) -> None:
        super().__init__(block_size, pool, host)
        self._queue = _CheckedEvictionQueue(Tier.DEVICE, self._pool, self)
        self._host_queue = _CheckedEvictionQueue(Tier.HOST, self._host, self)
        self._known = -1  # the generation of the paths
        self._paths: dict[str, list[bytes]] = {}  # to each leaf, by partition

    def match(self, partition: str, tokens: IntArray, limit: int) -> PrefixMatch:
        found = super().match(partition, tokens, limit)
        assert found.node.partition == partition, f"a request of partition {partition!r} matches {found.node}"
        if self._known != self.generation:
            self._known, self._paths = self.generation, {}
            for node in self.nodes():
                if not node.children:
                    self._paths.setdefault(node.partition, []).append(node.path())
        data = encode(tokens[:limit])
        longest = max([_common(path, data) for path in self._paths.get(partition, ())], default=0)
        partial = 0 if found.partial is None else found.partial.num_tokens
        num_found = found.num_tokens + len(found.host_blocks) * self.block_size + partial
        assert num_found == longest, f"{num_found} tokens of partition {partition!r} were found, {longest} are cached"
        return found

    def root(self, partition: str) -> Node:
        root = super().root(partition)
        assert root.partition == partition, f"the root of partition {partition!r} is that of {root.partition!r}"
        return root

    def insert(self, node: Node, tokens: IntArray, blocks: IntArray, owner: BlockOwner) -> Inserted:
        inserted = super().insert(node, tokens, blocks, owner)
        end = inserted.node
        if inserted.conflict and end is not node and len(end.blocks):
            assert end.blocks.item(-1) in blocks.tolist(), f"an insertion with a conflict ends in another copy: {end}"
        assert end.last_use == self._clock and end.priority <= owner.priority, f"the inserted {end} is not in use"
        return inserted

    def touch(self, match: PrefixMatch, *, hit: bool = False) -> PrefixMatch:
        touched = super().touch(match, hit=hit)
        for node, blocks in ((touched.node, match.blocks), (touched.host_node, match.host_blocks)):
            if node is not None and len(blocks):
                assert node.blocks.item(-1) == blocks.item(-1), f"a match of {blocks} ends at {node}"
                assert node.last_use > self._clock - 2, f"the matched {node} is not in use"
        return touched


def _common(path: bytes, data: bytes) -> int:
    """Tokens that two paths have in common from their start."""
    size = min(len(path), len(data))
    if path[:size] == data[:size]:
        return size // TOKEN_BYTES
    return next(at for at in range(size) if path[at] != data[at]) // TOKEN_BYTES
