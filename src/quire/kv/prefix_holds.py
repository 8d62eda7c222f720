"""Prefixes that are held without a row: cached blocks that another engine reads, and blocks that are filled from one.

A hold keeps the cached blocks of some tokens from eviction. With room, it also takes free blocks for the whole blocks
that are missing: what is copied into them is in the prefix cache once the hold is released as written, and free again
otherwise. Nothing else reads or writes these blocks meanwhile. Does not depend on how they are copied.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.core.ids import IntArray
from quire.core.moves import Tier
from quire.core.request import BlockOwner
from quire.kv.radix_node import NO_BLOCKS, Node

if TYPE_CHECKING:
    from quire.kv.manager import KVManager

MAX_HELD_SHARE = 2  # of the pool, all holds together: requests must find room beside them


class HeldPrefix(NamedTuple):
    """The whole blocks of `tokens`: cached ones, then ones to be filled."""

    number: int  # no two holds of a manager have the same
    owner: BlockOwner
    tokens: IntArray
    cached: IntArray
    room: IntArray
    node: Node  # has the last cached block, not always as its last; the root if there is none


class PrefixHolds:
    """All holds of one manager, which is given to each call: a reference to it would be a cycle."""

    __slots__ = ("_next_number", "held")

    def __init__(self) -> None:
        self._next_number = 0
        self.held: dict[int, HeldPrefix] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of all holds; one that several hold counts for each."""
        return sum(len(each.cached) + len(each.room) for each in self.held.values())

    def hold(self, kv: "KVManager", owner: BlockOwner, tokens: IntArray, *, with_room: bool) -> HeldPrefix | None:
        """Hold the whole blocks of some tokens. None if there is no room, nothing is cached, or copies of blocks wait
        for the next plan: those may read a block that is free already."""
        tree = kv.tree
        num_blocks = len(tokens) // kv.block_size
        if tree is None or not num_blocks or kv.has_moves:
            return None
        tokens = tokens[: num_blocks * kv.block_size]
        match = tree.match(owner.partition, tokens, len(tokens))._replace(
            host_blocks=NO_BLOCKS, host_node=None, partial=None
        )
        num_missing = num_blocks - len(match.blocks) if with_room else 0
        num_held = len(match.blocks) + num_missing
        if not num_held or self.num_blocks + num_held > kv.pool.num_blocks // MAX_HELD_SHARE:
            return None
        if not kv.fits(match, num_missing):
            return None
        node = tree.touch(match).node
        kv.pool.share(match.blocks)
        room = kv.take_room(num_missing)
        number, self._next_number = self._next_number, self._next_number + 1
        self.held[number] = HeldPrefix(number, owner, tokens, match.blocks.copy(), room, node)
        return self.held[number]

    def release(self, kv: "KVManager", number: int, *, written: bool) -> None:
        """End a hold. `written`: its room has the keys and values of its tokens, and is cached from now on."""
        held, tree = self.held.pop(number), kv.tree
        assert tree is not None, "a hold without a prefix cache"
        if len(held.cached):
            node = tree.end_at(held.node, Tier.DEVICE, held.cached.item(-1))  # others may have extended or split it
        else:
            node = tree.root(held.owner.partition)
        ends = [node]
        if written and len(held.room):
            rest = held.tokens[len(held.cached) * kv.block_size :]
            ends.append(tree.insert_leaving(node, rest, held.room, held.owner).node)
        kv.pool.release(np.concatenate([held.cached, held.room]))
        for end in reversed(ends):
            tree.offer(end)

    def release_all(self, kv: "KVManager") -> None:
        """End all holds; what was copied is dropped."""
        for number in tuple(self.held):
            self.release(kv, number, written=False)
