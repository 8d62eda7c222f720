"""A node of the prefix tree: a run of blocks, the tokens they hold, and their last use. Does not depend on pools.

Tokens are big-endian bytes: comparing them is one memcmp, and their order is the order of the tokens. The keys of a
node's children are a sorted list in short pieces, so that an insertion moves few keys however many there are (as in
`sortedcontainers`; these fifty lines save a dependency of the offline engine).
"""

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

import numpy as np

from quire.core.ids import IntArray, RequestId
from quire.core.moves import Tier

_MAX_PIECE = 512  # keys: arbitrary; at most 4 KiB are moved


class SortedKeys:
    """A sorted set of keys."""

    __slots__ = ("_bounds", "_max_piece", "_pieces")

    def __init__(self, max_piece: int = _MAX_PIECE) -> None:
        self._max_piece = max_piece
        self._pieces: list[list[bytes]] = [[]]  # none is empty, unless it is the only one
        self._bounds: list[bytes] = []  # lower bounds of the keys of each piece but the first

    def add(self, key: bytes) -> None:
        at = bisect_right(self._bounds, key)
        piece = self._pieces[at]
        insort(piece, key)
        if len(piece) > self._max_piece:
            middle = len(piece) // 2
            self._pieces[at : at + 1] = [piece[:middle], piece[middle:]]
            self._bounds.insert(at, piece[middle])

    def remove(self, key: bytes) -> None:
        at = bisect_right(self._bounds, key)
        piece = self._pieces[at]
        place = bisect_left(piece, key)
        assert piece[place] == key, key
        del piece[place]
        if not piece and self._bounds:
            del self._pieces[at]
            del self._bounds[max(at - 1, 0)]

    def around(self, run: bytes) -> list[bytes]:
        """The last key before a run and the first key not before it, if there are such keys."""
        at = bisect_right(self._bounds, run)
        piece = self._pieces[at]
        place = bisect_left(piece, run)
        near = piece[max(place - 1, 0) : place + 1]
        if place == 0 and at > 0:
            near = self._pieces[at - 1][-1:] + near
        if place == len(piece) and at < len(self._bounds):
            near = near + self._pieces[at + 1][:1]
        return near

    def starting_with(self, run: bytes) -> Iterator[bytes]:
        """The keys that begin with a run, in order."""
        for piece in self._pieces[bisect_right(self._bounds, run) :]:
            for key in piece[bisect_left(piece, run) :]:
                if not key.startswith(run):
                    return
                yield key

    def __len__(self) -> int:
        return sum(len(piece) for piece in self._pieces)

    def __iter__(self) -> Iterator[bytes]:
        return (key for piece in self._pieces for key in piece)


TOKEN_BYTES = 4
NO_BLOCKS: IntArray = np.empty(0, dtype=np.int32)
_NO_KEYS = SortedKeys()
_LITTLE_ENDIAN = sys.byteorder == "little"


def encode(tokens: IntArray) -> bytes:
    assert tokens.itemsize == TOKEN_BYTES, tokens.dtype
    return (tokens.byteswap() if _LITTLE_ENDIAN else tokens).tobytes()


def decode(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype=">u4").tolist())


def common_length(left: bytes, right: bytes) -> int:
    """How many tokens two short runs have in common from their start."""
    size = min(len(left), len(right))
    differing_bits = (int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")).bit_length()
    return (size - (differing_bits + 7) // 8) // TOKEN_BYTES


class Node:
    """A run of blocks of one tier. A root has none, nor has a node that was removed (it keeps its parent)."""

    __slots__ = (
        "blocks",
        "children",
        "keys",
        "last_use",
        "num_device_children",
        "num_hits",
        "num_partial_children",
        "owner",
        "parent",
        "partition",
        "priority",
        "serial",
        "tier",
        "tokens",
    )

    def __init__(
        self,
        partition: str,
        tokens: bytes,
        blocks: IntArray,
        serial: int,
        tier: Tier = Tier.DEVICE,
        last_use: int = 0,
        priority: int = 0,
        owner: RequestId | None = None,
    ) -> None:
        self.partition = partition
        self.tokens = tokens
        self.blocks = blocks  # never written in place: matches are views of them
        self.serial = serial  # creation order; decides between nodes with the same last use
        self.tier = tier
        self.last_use = last_use  # the tree's count of uses at that time
        self.priority = priority  # the highest class (lowest number) that used it
        self.owner = owner  # the request that inserted it
        self.parent: Node | None = None
        self.children: dict[bytes, Node] = {}  # by the tokens of their first block, which may be partial
        self.keys = _NO_KEYS  # of the children, sorted: the longest common prefix with a run is at a neighbour
        self.num_hits = 0  # matches that ended here; those of the nodes below passed through it
        self.num_device_children = 0
        self.num_partial_children = 0  # less than a block long

    def attach(self, key: bytes, child: "Node", block_bytes: int) -> None:
        assert key not in self.children, key
        self.children[key] = child
        if self.keys is _NO_KEYS:  # most nodes never have a child
            self.keys = SortedKeys()
        self.keys.add(key)
        child.parent = self
        self.num_device_children += child.tier is Tier.DEVICE
        self.num_partial_children += len(key) < block_bytes

    def detach(self, key: bytes, block_bytes: int) -> None:
        child = self.children.pop(key)
        self.keys.remove(key)
        self.num_device_children -= child.tier is Tier.DEVICE
        self.num_partial_children -= len(key) < block_bytes
        self.inherit(child)

    def inherit(self, child: "Node") -> None:
        """A use of the child was a use of its parent: recorded when the child goes, so that a use touches one node."""
        self.num_hits += child.num_hits
        self.last_use = max(self.last_use, child.last_use)
        self.priority = min(self.priority, child.priority)

    def split(self, tokens: bytes, blocks: IntArray, serial: int, key: bytes) -> "Node":
        """Split off the upper part as a new node. This node becomes the lower part: a handle to it keeps its end."""
        upper = Node(self.partition, tokens, blocks, serial, self.tier, self.last_use, self.priority, self.owner)
        parent = self.parent
        assert parent is not None
        parent.children[key] = upper
        upper.parent = parent
        self.tokens = self.tokens[len(tokens) :]
        self.blocks = self.blocks[len(blocks) :]
        upper.attach(self.tokens[: len(key)], self, len(key))
        return upper

    def may_extend(self, priority: int, owner: RequestId) -> bool:
        """Whether this is a device leaf that the same owner may extend, instead of adding a child."""
        mine = self.owner == owner and self.priority == priority
        return mine and not self.children and self.tier is Tier.DEVICE and self.parent is not None

    def extend(self, tokens: bytes, blocks: IntArray) -> None:
        """Append to a leaf of whole blocks."""
        self.tokens += tokens
        self.blocks = np.concatenate([self.blocks, blocks])

    def nearest(self, run: bytes) -> tuple["Node | None", int]:
        """The child whose first block shares most tokens with a run, and how many; of equals one on the device."""
        best: Node | None = None
        most = 0
        for key in self.keys.around(run):
            if key[:TOKEN_BYTES] != run[:TOKEN_BYTES]:  # mostly
                continue
            child, length = self.children[key], common_length(key, run)
            if length > most or (length == most > 0 and child.tier is Tier.DEVICE):
                best, most = child, length
        return best, most

    def path(self) -> bytes:
        """Every token from the root to the end of this node."""
        if self.parent is None:
            return self.tokens
        parts: list[bytes] = []
        node: Node | None = self
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        return b"".join(reversed(parts))

    @property
    def num_path_tokens(self) -> int:
        """Tokens from the root to the end of this node."""
        return len(self.path()) // TOKEN_BYTES

    def token_ids(self) -> tuple[int, ...]:
        return decode(self.tokens)

    def __repr__(self) -> str:
        return f"Node({self.partition!r}, {decode(self.path())}, {self.tier.value} {self.blocks.tolist()})"
