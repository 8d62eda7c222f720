"""The shape of the prefix tree: one trie of runs of blocks per partition. Knows nothing of pools or eviction."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from quire.core.ids import IntArray, RequestId
from quire.core.moves import Tier
from quire.kv.radix_node import NO_BLOCKS, TOKEN_BYTES, Node, decode


class Trie:
    """Nodes by partition, and by the first block of their path. A partition that holds nothing is forgotten."""

    __slots__ = ("_num_made", "_openings", "_roots", "block_bytes", "block_size", "num_nodes")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.num_nodes = 0
        self._num_made = 0
        self._roots: dict[str, Node] = {}
        self._openings: dict[bytes, dict[str, None]] = {}  # a first block: the partitions that hold it, oldest first

    def root(self, partition: str) -> Node:
        """Where a partition's paths begin; a fresh root, kept when something is attached to it, if it has none."""
        root = self._roots.get(partition)
        return root if root is not None else Node(partition, b"", NO_BLOCKS, 0)

    def grow(self, parent: Node, tokens: bytes, blocks: IntArray, priority: int, owner: RequestId) -> Node:
        """A new device leaf."""
        self._num_made += 1
        self.num_nodes += 1
        leaf = Node(parent.partition, tokens, blocks, self._num_made, Tier.DEVICE, 0, priority, owner)
        key = tokens[: self.block_bytes]
        parent.attach(key, leaf, self.block_bytes)
        if parent.parent is None:
            self._roots[parent.partition] = parent
            self._openings.setdefault(key, {})[parent.partition] = None
        return leaf

    def fell(self, node: Node) -> list[Node]:
        """Take a node and what is below it out; their blocks are for the caller to see to, and to take from them."""
        parent = node.parent
        assert parent is not None, "a root stays"
        key = node.tokens[: self.block_bytes]
        parent.detach(key, self.block_bytes)
        if parent.parent is None:
            partitions = self._openings[key]
            del partitions[parent.partition]
            if not partitions:
                del self._openings[key]
            if not parent.children:
                del self._roots[parent.partition]
        fallen = [node]
        for each in fallen:
            fallen.extend(each.children.values())
        self.num_nodes -= len(fallen)
        return fallen

    def end_at(self, node: Node, length: int) -> Node:
        """The node that ends so many bytes into this one: itself, or its upper part, cut off."""
        if length == len(node.tokens):
            return node
        self._num_made += 1
        self.num_nodes += 1
        tokens = node.tokens[:length]
        return node.split(tokens, node.blocks[: length // self.block_bytes], self._num_made, tokens[: self.block_bytes])

    def cut_down(self, node: Node, num_blocks: int) -> Node:
        """This node, cut down to its last so many blocks."""
        if num_blocks < len(node.blocks):
            self.end_at(node, (len(node.blocks) - num_blocks) * self.block_bytes)
        return node

    def common(self, child: Node, data: bytes, at: int) -> int:
        """How many bytes of whole blocks a node has in common with what follows in a path."""
        length = min(len(child.tokens), len(data) - at) // self.block_bytes * self.block_bytes
        if child.tokens[:length] == data[at : at + length]:
            return length
        count = length // TOKEN_BYTES
        differs = np.frombuffer(data, np.uint32, count, at) != np.frombuffer(child.tokens, np.uint32, count)
        return int(differs.argmax()) // self.block_size * self.block_bytes

    def holds(self, partition: str, data: bytes) -> bool:
        """Whether a path of whole blocks is known."""
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

    def partitions_opening(self, data: bytes, most: int, *, without: str) -> list[str]:
        """Some of the other partitions that know the first block of a path."""
        partitions = self._openings.get(data[: self.block_bytes])
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
        """Keys are right and sorted, sizes match, only leaves are partial, and below the host there is no device.
        Gives all nodes but the roots."""
        nodes = list(self.nodes())
        assert self.num_nodes == len(nodes), "nodes are miscounted"
        for partition, root in self._roots.items():
            assert root.children and root.parent is None and root.partition == partition, partition
            assert all(partition in self._openings[key] for key in root.keys), "an opening is not indexed"
        indexed = sum([len(partitions) for partitions in self._openings.values()])
        assert indexed == sum([len(root.keys) for root in self._roots.values()]), "a closed opening is indexed"
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
