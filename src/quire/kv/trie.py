"""The structure of the prefix tree: one trie of runs of blocks per partition. Does not depend on pools or eviction."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from quire.core.ids import IntArray, RequestId
from quire.core.moves import Tier
from quire.kv.radix_node import NO_BLOCKS, TOKEN_BYTES, Node, decode


class Trie:
    """Nodes by partition and by the first block of their path. A partition without nodes is removed."""

    __slots__ = ("_first_blocks", "_num_created", "_roots", "block_bytes", "block_size", "num_nodes")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.num_nodes = 0
        self._num_created = 0
        self._roots: dict[str, Node] = {}
        self._first_blocks: dict[bytes, dict[str, None]] = {}  # partitions by first block, oldest first

    def root(self, partition: str) -> Node:
        """The root of a partition; a new one, stored when a leaf is added to it, if there is none."""
        root = self._roots.get(partition)
        return root if root is not None else Node(partition, b"", NO_BLOCKS, 0)

    def roots(self) -> Iterator[Node]:
        return iter(self._roots.values())

    def add_leaf(self, parent: Node, tokens: bytes, blocks: IntArray, priority: int, owner: RequestId) -> Node:
        """Add a device leaf."""
        self._num_created += 1
        self.num_nodes += 1
        leaf = Node(parent.partition, tokens, blocks, self._num_created, Tier.DEVICE, 0, priority, owner)
        key = tokens[: self.block_bytes]
        parent.attach(key, leaf, self.block_bytes)
        if parent.parent is None:
            self._roots[parent.partition] = parent
            self._first_blocks.setdefault(key, {})[parent.partition] = None
        return leaf

    def remove(self, node: Node) -> list[Node]:
        """Remove a node and all below it. The caller drops their blocks."""
        parent = node.parent
        assert parent is not None, "a root stays"
        key = node.tokens[: self.block_bytes]
        parent.detach(key, self.block_bytes)
        if parent.parent is None:
            partitions = self._first_blocks[key]
            del partitions[parent.partition]
            if not partitions:
                del self._first_blocks[key]
            if not parent.children:
                del self._roots[parent.partition]
        removed = [node]
        for each in removed:
            removed.extend(each.children.values())
        self.num_nodes -= len(removed)
        return removed

    def end_at(self, node: Node, length: int) -> Node:
        """The node that ends `length` bytes into this one: itself, or its upper part, split off."""
        if length == len(node.tokens):
            return node
        self._num_created += 1
        self.num_nodes += 1
        tokens = node.tokens[:length]
        blocks = node.blocks[: length // self.block_bytes]
        return node.split(tokens, blocks, self._num_created, tokens[: self.block_bytes])

    def split_tail(self, node: Node, num_blocks: int) -> Node:
        """This node, reduced to its last `num_blocks` blocks by a split."""
        if num_blocks < len(node.blocks):
            self.end_at(node, (len(node.blocks) - num_blocks) * self.block_bytes)
        return node

    def common(self, child: Node, data: bytes, at: int) -> int:
        """How many bytes of whole blocks a node shares with a path from this byte on."""
        length = min(len(child.tokens), len(data) - at) // self.block_bytes * self.block_bytes
        if child.tokens[:length] == data[at : at + length]:
            return length
        count = length // TOKEN_BYTES
        differs = np.frombuffer(data, np.uint32, count, at) != np.frombuffer(child.tokens, np.uint32, count)
        return int(differs.argmax()) // self.block_size * self.block_bytes

    def holds(self, partition: str, data: bytes) -> bool:
        """Whether a path of whole blocks is in the trie."""
        node, at = self.root(partition), 0
        while at < len(data):
            child = node.children.get(data[at : at + self.block_bytes])
            if child is None:
                return False
            length = self.common(child, data, at)
            if length < len(child.tokens) and at + length < len(data):
                return False
            node, at = child, at + length
        return True

    def partitions_with_first_block(self, data: bytes, most: int, *, without: str) -> list[str]:
        """Up to `most` other partitions that hold the first block of a path."""
        partitions = self._first_blocks.get(data[: self.block_bytes])
        return [] if partitions is None else list(islice((each for each in partitions if each != without), most))

    def nodes(self, partition: str | None = None) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        roots = self._roots.values() if partition is None else [self.root(partition)]
        waiting = [child for root in roots for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def contents(self, partition: str) -> set[tuple[int, ...]]:
        """The tokens of every path that ends at a leaf."""
        return {decode(node.path()) for node in self.nodes(partition) if not node.children}

    def audit(self) -> list[Node]:
        """Keys are right and sorted, sizes match, only leaves are partial, no device node is below a host node.
        Returns all nodes but the roots."""
        nodes = list(self.nodes())
        assert self.num_nodes == len(nodes), "nodes are miscounted"
        for partition, root in self._roots.items():
            assert root.children and root.parent is None and root.partition == partition, partition
            assert all(partition in self._first_blocks[key] for key in root.keys), "a first block is not indexed"
        indexed = sum([len(partitions) for partitions in self._first_blocks.values()])
        assert indexed == sum([len(root.keys) for root in self._roots.values()]), "a removed first block is indexed"
        for node in [*self._roots.values(), *nodes]:
            assert len(node.blocks) == -(-len(node.tokens) // self.block_bytes), f"tokens and blocks of {node} differ"
            if node.children or len(node.keys) or node.num_device_children or node.num_partial_children:
                self._audit_children(node)
        return nodes

    def _audit_children(self, node: Node) -> None:
        assert list(node.keys) == sorted(node.children), f"unsorted keys below {node}"
        on_device = 0
        num_partial = sum([len(key) < self.block_bytes for key in node.children])
        assert num_partial == node.num_partial_children, f"partial children of {node} are miscounted"
        for key, child in node.children.items():
            assert key == child.tokens[: self.block_bytes], f"a child of {node} has a wrong key"
            assert child.parent is node, f"a child of {node} has another parent"
            on_device += child.tier is Tier.DEVICE
        assert on_device == node.num_device_children, f"device children of {node} are miscounted"
        assert node.tier is Tier.DEVICE or not on_device, f"device blocks below the host node {node}"
        assert len(node.tokens) % self.block_bytes == 0, f"children below the partial {node}"
