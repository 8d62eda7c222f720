"""What the prefix tree stores and removes on the device, as events for routers outside. Does not depend on sockets.

A block's hash is of its tokens and of the hash before it, so it stands for the whole prefix that ends there. The first
hash of a partition (tenant and salt) begins with a secret of this process: equal prompts of two partitions have
different hashes, and a hash does not tell the salt. Without tenant and salt it is a hash of the tokens alone, the same
in every process. Only whole blocks have events: a partial one is never shared.
"""

import secrets
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray
from quire.kv.radix_node import TOKEN_BYTES

_HASH_BYTES = 8


class BlockStored(NamedTuple):
    """Consecutive blocks of one path are on the device."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None  # of the block before; None: the first one is the beginning of a prompt
    tokens: bytes  # big endian, 4 bytes each

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.tokens, dtype=">u4").tolist()
        return ids


class BlockRemoved(NamedTuple):
    """Blocks are no longer on the device: dropped, or moved to the host."""

    block_hashes: tuple[int, ...]


class AllBlocksCleared(NamedTuple):
    """No block is left."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEventLog:
    """Collects the events of a tree until they are taken. `store` and `remove` are called with the blocks' ids."""

    __slots__ = ("_block_bytes", "_events", "_hashes", "_secret", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._secret = secrets.token_bytes(32)
        self._hashes: dict[int, int] = {}  # of the whole blocks in the tree, by block id
        self._events: list[BlockEvent] = [AllBlocksCleared()]  # whatever an earlier process has stored

    def store(self, partition: str, before: IntArray, tokens: bytes, blocks: IntArray) -> None:
        """The tree has these blocks; `before` are those of its node above, none at the beginning of a prompt."""
        num_whole = len(tokens) // self._block_bytes
        if not num_whole:
            return
        parent = self._hashes[before.item(-1)] if len(before) else None
        last = self._first(partition) if parent is None else parent.to_bytes(_HASH_BYTES, "big")
        hashes = []
        for place, block in enumerate(blocks[:num_whole].tolist()):
            own = tokens[place * self._block_bytes : (place + 1) * self._block_bytes]
            number = int.from_bytes(blake2b(last + own, digest_size=_HASH_BYTES).digest(), "big") >> 1  # fits an i64
            self._hashes[block] = number
            hashes.append(number)
            last = number.to_bytes(_HASH_BYTES, "big")
        self._events.append(BlockStored(tuple(hashes), parent, tokens[: num_whole * self._block_bytes]))

    def _first(self, partition: str) -> bytes:
        if not partition:
            return b""
        return blake2b(partition.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=_HASH_BYTES).digest()

    def remove(self, blocks: IntArray) -> None:
        """The tree no longer has these blocks."""
        hashes = tuple(self._hashes.pop(block) for block in blocks.tolist() if block in self._hashes)
        if hashes:
            self._events.append(BlockRemoved(hashes))

    def clear(self) -> None:
        """The tree has no block: events before this one no longer matter."""
        assert not self._hashes, self._hashes
        self._events = [AllBlocksCleared()]

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
