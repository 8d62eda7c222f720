"""A prefix tree with its pools and tables: the fixture of the examples."""

import numpy as np

from quire.core.ids import IntArray, RequestId
from quire.core.moves import Move
from quire.core.request import BlockOwner
from quire.kv.block_pool import BlockPool
from quire.kv.radix_node import Node
from quire.kv.radix_tree import Inserted, PrefixMatch, RadixTree

ME = RequestId(1)
OTHER = RequestId(2)
MINE = BlockOwner(ME, "", 0)


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, dtype=np.int32)


def snapshot(tree: RadixTree) -> object:
    """All that a tree is: every node with its place, its blocks and its last use, and the tree's own counters."""
    nodes = [
        (
            id(node),
            id(node.parent),
            node.tokens,
            node.blocks.tolist(),
            node.tier,
            node.last_use,
            node.priority,
            node.owner,
        )
        for node in tree.nodes()
    ]
    return nodes, tree.num_nodes, tree.num_blocks, tree.num_evicted, tree.generation, tree._clock


class TreeBench:
    """A tree with its pools, and tables that are held and released. Audits after every call."""

    def __init__(self, block_size: int = 4, num_blocks: int = 32, num_host: int = 0) -> None:
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host)
        self.tree = RadixTree(block_size, self.pool, self.host)

    def hold(self, tokens: IntArray, partition: str = "", priority: int = 0) -> tuple[IntArray, Inserted]:
        """A table that computed everything itself and stays open."""
        blocks = self.pool.take(-(-len(tokens) // self.tree.block_size))
        owner = BlockOwner(ME, partition, priority)
        return blocks, self.tree.insert_leaving(self.tree.root(partition), tokens, blocks, owner)

    def drop(self, blocks: IntArray, node: Node) -> None:
        self.pool.release(blocks)
        self.tree.offer(node)
        self.audit()

    def put(self, *tokens: int, partition: str = "", priority: int = 0) -> Inserted:
        """A table that computed everything itself and was released."""
        blocks, inserted = self.hold(ids(*tokens), partition, priority)
        self.drop(blocks, inserted.node)
        return inserted

    def evict(self, count: int, demote: bool = False, batch: int = 1, step: int = 0) -> tuple[Move, ...]:
        before = self.pool.num_free
        evicted = self.tree.evict(count, step, OTHER, lambda node, num: demote, batch)
        assert self.pool.num_free - before == evicted.num_blocks
        self.audit()
        return evicted.moves

    def length(self, *tokens: int, partition: str = "") -> int:
        """Tokens known, on either tier."""
        match = self.tree.match(partition, ids(*tokens), len(tokens))
        self.audit()
        num_host = len(match.host_blocks) * self.tree.block_size
        return match.num_tokens + num_host + (match.partial.num_tokens if match.partial else 0)

    def use(self, *tokens: int, partition: str = "") -> PrefixMatch:
        """Mark these tokens as used: their match, with the nodes where it ends."""
        match = self.tree.touch(self.tree.match(partition, ids(*tokens), len(tokens)))
        self.audit()
        return match

    def audit(self) -> None:
        self.tree.audit()
        self.pool.audit()
        self.host.audit()
