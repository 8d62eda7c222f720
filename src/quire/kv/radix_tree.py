"""The prefix cache: a radix tree from token ids to KV blocks on the device and the host. Does not depend on rows.

One tree per partition; partitions never share. A node is a run of whole blocks; only a leaf may end in a partial block,
which is never shared or extended in place: a hit copies it (copy-on-write). Below a host node are only host nodes.

Invariant: above a block that a table holds are only held blocks. So every evictable block can be evicted, leaf by leaf.
Callers keep it by holding paths from the root, and by calling `insert_leaving` only for a table released at once.
Moves must be carried out in the order of the calls that returned them: their sources are free from then on.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from quire.core.ids import BlockId, IntArray, RequestId
from quire.core.moves import Move, Place, Tier
from quire.core.request import BlockOwner
from quire.kv.block_events import BlockEventLog
from quire.kv.block_pool import BlockPool
from quire.kv.eviction import CacheMiss, CacheMissKind, EvictionHistory, FairEvictionQueue
from quire.kv.radix_node import NO_BLOCKS, TOKEN_BYTES, Node, common_length, decode, encode
from quire.kv.trie import Trie


class PartialBlock(NamedTuple):
    """The block that continues a match for less than its length. It is never shared: the table copies it."""

    place: Place
    num_tokens: int


class PrefixMatch(NamedTuple):
    """The longest cached prefix: whole blocks on the device, then whole blocks on the host, then part of a block.

    A match holds no reference. It is valid until `generation` changes; splits in between do not matter.
    """

    num_tokens: int  # on the device
    blocks: IntArray
    node: Node  # holds the last of `blocks`, not always as its last: see `touch`; the root if there is none
    host_blocks: IntArray
    host_node: Node | None  # holds the last of `host_blocks`
    partial: PartialBlock | None


class Inserted(NamedTuple):
    """The node where the path now ends, the blocks adopted, and whether another copy ended the insertion early."""

    node: Node
    num_adopted: int
    conflict: bool = False


class Evicted(NamedTuple):
    """How many device blocks are free again, and the copies to the host that some of them need."""

    num_blocks: int
    moves: tuple[Move, ...]


class NodeView(NamedTuple):
    """A node without its tokens."""

    parent: int  # its place in the outline; -1 below a root
    num_blocks: int
    num_hits: int  # that ended in this node
    on_host: bool


MAX_PARTITIONS_COMPARED = 8  # to explain a miss
MAX_CHILDREN_COMPARED = 64  # to find a continuation
_NEVER_SEEN = CacheMiss(CacheMissKind.NEVER_SEEN)
Demote = Callable[[Node, int], bool]  # whether the last n blocks of a node are demoted to the host rather than dropped


class RadixTree:
    """All cached prefixes. `generation` changes whenever an earlier match may be stale."""

    __slots__ = (
        "_clock",
        "_history",
        "_host",
        "_host_queue",
        "_pool",
        "_queue",
        "_trie",
        "block_size",
        "events",
        "generation",
        "num_evicted",
    )

    def __init__(self, block_size: int, pool: BlockPool, host: BlockPool | None = None) -> None:
        self.block_size = block_size
        self.generation = 0
        self.num_evicted = 0  # blocks that left the device, dropped or demoted
        self.events: BlockEventLog | None = None  # of the device's blocks, for routers; None: nothing asks for them
        self._trie = Trie(block_size)
        self._pool = pool
        self._host = host if host is not None else BlockPool(0)
        self._queue = FairEvictionQueue(Tier.DEVICE, self._pool)
        self._host_queue = FairEvictionQueue(Tier.HOST, self._host)
        self._history = EvictionHistory()
        self._clock = 0

    @property
    def num_nodes(self) -> int:
        return self._trie.num_nodes

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree, on both tiers."""
        return self._pool.num_cached + self._host.num_cached

    # Look-up.

    def match(self, partition: str, tokens: IntArray, limit: int) -> PrefixMatch:
        """The longest cached prefix of tokens[:limit], exact to the token. Reads only."""
        data = encode(tokens[:limit])
        block_bytes = self._trie.block_bytes
        node = device = self._trie.root(partition)
        host_node: Node | None = None
        found: list[IntArray] = []
        host_found: list[IntArray] = []
        at = length = 0
        while length == len(node.tokens) and (child := node.children.get(data[at : at + block_bytes])) is not None:
            common = self._trie.common(child, data, at)
            if not common:
                break
            node, length = child, common
            at += length
            blocks = node.blocks[: length // block_bytes]
            if node.tier is Tier.DEVICE:
                device = node
                found.append(blocks)
            else:
                host_node = node
                host_found.append(blocks)
        partial = self._partial(node, length, data[at : at + block_bytes])
        if not at:  # mostly
            return PrefixMatch(0, NO_BLOCKS, device, NO_BLOCKS, None, partial)
        blocks = _joined(found)
        return PrefixMatch(len(blocks) * self.block_size, blocks, device, _joined(host_found), host_node, partial)

    def _partial(self, node: Node, length: int, run: bytes) -> PartialBlock | None:
        """The block that shares most tokens with a run, after a match that ends `length` bytes into a node."""
        if length == len(node.tokens):
            source, num_tokens = node.nearest(run)
            at = 0
        else:
            source, at = node, length // self._trie.block_bytes
            num_tokens = common_length(node.tokens[length : length + len(run)], run)
        if source is None or not num_tokens:
            return None
        return PartialBlock(Place(source.tier, BlockId(source.blocks.item(at))), num_tokens)

    def continuation(self, partition: str, tokens: IntArray, limit: int) -> IntArray:
        """Up to `limit` tokens that the tree has after all of these; of several branches the last used. Reads only."""
        data, block_bytes = encode(tokens), self._trie.block_bytes
        node, at, length = self._trie.root(partition), 0, 0
        while length == len(node.tokens) and (child := node.children.get(data[at : at + block_bytes])) is not None:
            common = self._trie.common(child, data, at)
            if not common:
                break
            node, length, at = child, common, at + common
        run = data[at:]
        if run and length == len(node.tokens):  # the tokens end inside the first block of a child
            children = [node.children[key] for key in islice(node.keys.starting_with(run), MAX_CHILDREN_COMPARED)]
            if not children:
                return NO_BLOCKS
            node, length = max(children, key=_last_use), 0
        elif node.tokens[length : length + len(run)] != run:
            return NO_BLOCKS
        found = [node.tokens[length + len(run) :]]
        while node.children and sum(map(len, found)) < limit * TOKEN_BYTES:
            node = max(islice(node.children.values(), MAX_CHILDREN_COMPARED), key=_last_use)
            found.append(node.tokens)
        return np.array(decode(b"".join(found)[: limit * TOKEN_BYTES]), dtype=np.int32)

    def touch(self, match: PrefixMatch, *, hit: bool = False) -> PrefixMatch:
        """Mark a match as used just now. Its nodes are split where its parts end; the same match with these nodes.
        `hit`: a request begins with it."""
        node, host_node = match.node, match.host_node
        if not match.num_tokens and host_node is None:  # mostly
            return match
        if len(match.blocks):
            node = self.end_at(node, Tier.DEVICE, match.blocks.item(-1))
        if host_node is not None:
            host_node = self.end_at(host_node, Tier.HOST, match.host_blocks.item(-1))
        (host_node or node).num_hits += hit
        return match._replace(node=node, host_node=host_node)

    def end_at(self, node: Node, tier: Tier, block: int) -> Node:
        """The node that ends with this block, used just now: this node or one above it, split if it goes on.

        A split leaves the lower part to the node, so an older handle may lie below the block, never above it.
        """
        where = _find(node, tier, block)
        while where < 0:
            assert node.parent is not None, f"a stale match: {tier.value} block {block} is no longer on this path"
            node = node.parent
            where = _find(node, tier, block)
        if where + 1 < len(node.blocks):
            node = self._trie.end_at(node, (where + 1) * self._trie.block_bytes)
        self._touch(node)
        return node

    def deepest_node(self, partition: str, blocks: IntArray) -> Node:
        """The deepest node with blocks of this table, found without its tokens; the root if none of them is cached."""
        node, held = self._trie.root(partition), blocks.tolist()
        while held:
            found = [c for c in node.children.values() if c.tier is Tier.DEVICE and c.blocks.item(0) == held[0]]
            if not found:
                break
            node = found[0]
            held = held[len(node.blocks) :]
        return node

    def miss_reason(self, partition: str, tokens: IntArray, num_matched: int) -> CacheMiss | None:
        """Why the first whole block after a match is not cached; None if the prompt has no such block."""
        end = num_matched + self.block_size
        if end > len(tokens):
            return None
        data = encode(tokens[:end])
        miss = self._history.find(partition, data)
        if miss is not None:
            return miss
        for other in self._trie.partitions_with_first_block(data, MAX_PARTITIONS_COMPARED, without=partition):
            if self._trie.holds(other, data):
                return CacheMiss(CacheMissKind.OTHER_PARTITION)
        return _NEVER_SEEN

    # Insertion.

    def root(self, partition: str) -> Node:
        """The node that a table with nothing in the tree inserts below."""
        return self._trie.root(partition)

    def insert(self, node: Node, tokens: IntArray, blocks: IntArray, owner: BlockOwner) -> Inserted:
        """Cache what a table that stays open holds below a node of its own: blocks[i] holds the i-th block of tokens.

        It stops where the tree already has another copy: the table keeps its own blocks, and nothing below such a
        conflict is adopted, as a held block may only lie below held blocks.
        """
        data, block_bytes = encode(tokens), self._trie.block_bytes
        at = num_adopted = 0
        while (child := node.children.get(data[at : at + block_bytes])) is not None:
            length = self._trie.common(child, data, at)
            if not length:
                break
            own = blocks[at // block_bytes : (at + length) // block_bytes]
            differs = child.blocks[: len(own)] != own
            if child.tier is Tier.DEVICE and np.count_nonzero(differs):
                if num_same := int(differs.argmax()):
                    node = self._trie.end_at(child, num_same * block_bytes)
                return self._insert_rest(node, b"", NO_BLOCKS, num_adopted, owner)._replace(conflict=True)
            node = self._trie.end_at(child, length)
            if node.tier is Tier.HOST:
                self._move_to_device(node, own)
                num_adopted += len(own)
            at += length
        return self._insert_rest(node, data[at:], blocks[at // block_bytes :], num_adopted, owner)

    def insert_leaving(self, node: Node, tokens: IntArray, blocks: IntArray, owner: BlockOwner) -> Inserted:
        """The same for a table that is released at once: where the tree has another copy, that one stays, and what
        the table holds below it is adopted."""
        data, block_bytes = encode(tokens), self._trie.block_bytes
        at = num_adopted = 0
        while (child := node.children.get(data[at : at + block_bytes])) is not None:
            length = self._trie.common(child, data, at)
            if not length:
                break
            node = self._trie.end_at(child, length)
            if node.tier is Tier.HOST:
                own = blocks[at // block_bytes : (at + length) // block_bytes]
                self._move_to_device(node, own)
                num_adopted += len(own)
            at += length
        return self._insert_rest(node, data[at:], blocks[at // block_bytes :], num_adopted, owner)

    def _insert_rest(self, node: Node, rest: bytes, blocks: IntArray, num_adopted: int, owner: BlockOwner) -> Inserted:
        """The end of an insertion: what is left of the path goes below the node where the cached part ends."""
        assert len(blocks) == -(-len(rest) // self._trie.block_bytes), (len(rest), len(blocks))
        inserted = self._grow(node, rest, blocks, owner) if rest else Inserted(node, 0)
        if num_adopted:
            inserted = Inserted(inserted.node, num_adopted + inserted.num_adopted)
        node = inserted.node
        self._touch(node)
        if owner.priority < node.priority:
            node.priority = owner.priority
        self.generation += inserted.num_adopted > 0
        return inserted

    def _grow(self, node: Node, rest: bytes, blocks: IntArray, owner: BlockOwner) -> Inserted:
        """Append the rest to a leaf of the same owner, else add a leaf: so a prompt computed in many chunks, and its
        output, are one node."""
        if node.may_extend(owner.priority, owner.request):
            if self.events is not None:
                self.events.store(node.partition, node.blocks, rest, blocks)
            node.extend(rest, blocks)
            self._pool.adopt(blocks)
            self._queue.count(node.partition, len(blocks))
            return Inserted(node, len(blocks))
        if len(rest) < self._trie.block_bytes:
            known, num_tokens = node.nearest(rest)
            if known is not None and num_tokens * TOKEN_BYTES == len(rest):
                return self._insert_covered_tail(node, known, rest, blocks)
        first = rest[: self._trie.block_bytes]
        for end in range(TOKEN_BYTES, len(first), TOKEN_BYTES) if node.num_partial_children else ():
            redundant = node.children.get(first[:end])
            if redundant is not None and self._pool_of(redundant).is_evictable(redundant.blocks.item(0)):
                self._remove(redundant)
        leaf = self._trie.add_leaf(node, rest, blocks.copy(), owner.priority, owner.request)
        if self.events is not None:
            self.events.store(node.partition, node.blocks, rest, blocks)
        self._pool.adopt(leaf.blocks)
        self._queue.count(leaf.partition, len(leaf.blocks))
        return Inserted(leaf, len(leaf.blocks))

    def _insert_covered_tail(self, node: Node, known: Node, rest: bytes, blocks: IntArray) -> Inserted:
        """A partial tail that a cached block covers is not adopted, unless that block is the same one on the host."""
        if known.tokens != rest:
            return Inserted(node, 0)
        if known.tier is Tier.DEVICE:
            return Inserted(known, 0)
        self._move_to_device(known, blocks)
        return Inserted(known, 1)

    def promote(self, node: Node, blocks: IntArray) -> tuple[Move, ...]:
        """Copy a match's host part, down to its host node, to these blocks of the caller's table."""
        promoted: list[Node] = []
        below: Node | None = node
        while below is not None and below.tier is Tier.HOST:
            promoted.append(below)
            below = below.parent
        sources = np.concatenate([each.blocks for each in reversed(promoted)])
        assert len(sources) == len(blocks), (len(sources), len(blocks))
        at = 0
        for each in reversed(promoted):
            self._move_to_device(each, blocks[at : at + len(each.blocks)])
            at += len(each.blocks)
        self._touch(node)
        self.generation += 1
        return _moves(Tier.HOST, sources, Tier.DEVICE, blocks)

    def _move_to_device(self, node: Node, blocks: IntArray) -> None:
        """A host node below a device node gets device blocks, which a table holds."""
        assert node.tier is Tier.HOST and node.parent is not None and node.parent.tier is Tier.DEVICE, node
        self._host.disown(node.blocks)
        self._host_queue.count(node.partition, -len(node.blocks))
        node.blocks = blocks.copy()
        node.tier = Tier.DEVICE
        node.parent.num_device_children += 1
        if self.events is not None:
            self.events.store(node.partition, node.parent.blocks, node.tokens, blocks)
        self._pool.adopt(node.blocks)
        self._queue.count(node.partition, len(node.blocks))

    # Eviction.

    def offer(self, node: Node) -> None:
        """Queue for eviction what became evictable: a table or a copy that ended at this node was released."""
        while node.parent is not None:
            if len(node.blocks):
                self._queue_of(node).offer(node)
                if node.tier is Tier.DEVICE:
                    return
            node = node.parent

    def evict(
        self, count: int, step: int, by: RequestId | None = None, demote: Demote | None = None, batch: int = 1
    ) -> Evicted:
        """Free at least `count` device blocks, if that many are evictable; rounded up to `batch` blocks of one leaf."""
        num_blocks = 0
        miss = CacheMiss(CacheMissKind.EVICTED, step, by)
        moves: list[Move] = []
        dropped: list[IntArray] = []
        while num_blocks < count and (node := self._queue.first()) is not None:
            num_missing = -(-(count - num_blocks) // batch) * batch
            num_tail = min(num_missing, self._queue.num_evictable(node))
            num_blocks += num_tail
            if demote is not None and demote(node, num_tail) and self._free_host_blocks(num_tail, miss):
                moves += self._demote(self._trie.split_tail(node, num_tail))
            else:
                self._evict_node(self._trie.split_tail(node, num_tail), miss, dropped)
        if dropped:
            self._pool.disown(dropped[0] if len(dropped) == 1 else np.concatenate(dropped))
        assert num_blocks >= count or not self._pool.num_evictable, "an evictable block is not queued"
        self.num_evicted += num_blocks
        self.generation += num_blocks > 0
        return Evicted(num_blocks, tuple(moves))

    def drop(self, node: Node, owner: RequestId) -> None:
        """Remove what this owner inserted, from this node upwards, as far as no table holds it."""
        while node.parent is not None:
            parent = node.parent
            if len(node.blocks):
                if node.owner != owner or node.children or not self._pool_of(node).is_evictable(node.blocks.item(0)):
                    return
                self._remove(node)
                self.generation += 1
            node = parent

    def reset(self) -> int:
        """Drop all evictable blocks of both tiers, and the eviction history; how many blocks are free again."""
        before = self._pool.num_free + self._host.num_free
        for queue in (self._host_queue, self._queue):
            while (node := queue.first()) is not None:
                self._remove(self._trie.split_tail(node, queue.num_evictable(node)))
        self._history.clear()
        self.generation += 1
        if self.events is not None and not self._pool.num_cached:
            self.events.clear()
        return self._pool.num_free + self._host.num_free - before

    def _free_host_blocks(self, count: int, miss: CacheMiss) -> bool:
        if count > self._host.num_free + self._host.num_evictable:
            return False
        while (missing := count - self._host.num_free) > 0 and (node := self._host_queue.first()) is not None:
            self._evict_node(self._trie.split_tail(node, min(missing, self._host_queue.num_evictable(node))), miss)
        return count <= self._host.num_free

    def _demote(self, node: Node) -> tuple[Move, ...]:
        """Move a device node without device children to the host."""
        sources, parent = node.blocks, node.parent
        assert parent is not None
        node.blocks = self._host.take(len(sources))
        self._host.adopt(node.blocks)
        self._host.release(node.blocks)
        self._pool.disown(sources)
        self._host_queue.count(node.partition, len(sources))
        self._queue.count(node.partition, -len(sources))
        if self.events is not None:
            self.events.remove(sources)
        node.tier = Tier.HOST
        parent.num_device_children -= 1
        parent.inherit(node)
        self._host_queue.offer(node)
        self._queue.offer(parent)
        return _moves(Tier.DEVICE, sources, Tier.HOST, node.blocks)

    def _evict_node(self, node: Node, miss: CacheMiss, dropped: list[IntArray] | None = None) -> None:
        """Remove a node and record its eviction, so that a later miss can be explained."""
        if len(node.tokens) >= self._trie.block_bytes:
            assert node.parent is not None, "a root stays"
            path = node.parent.path() + node.tokens[: self._trie.block_bytes]  # the rest is in no CPU cache any more
            self._history.remember(node.partition, path, miss)
        self._remove(node, dropped)

    def _remove(self, node: Node, dropped: list[IntArray] | None = None) -> None:
        """Remove a node and all below it."""
        parent = node.parent
        assert parent is not None
        for each in self._trie.remove(node):
            self._queue_of(each).count(each.partition, -len(each.blocks))
            if self.events is not None and each.tier is Tier.DEVICE:
                self.events.remove(each.blocks)
            if dropped is not None and each.tier is Tier.DEVICE:
                dropped.append(each.blocks)
            else:
                self._pool_of(each).disown(each.blocks)
            each.blocks = NO_BLOCKS
        if parent.parent is not None:  # a root has nothing to evict
            self._queue_of(parent).offer(parent)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock
        self._queue_of(node).use(node.partition)

    def _pool_of(self, node: Node) -> BlockPool:
        return self._pool if node.tier is Tier.DEVICE else self._host

    def _queue_of(self, node: Node) -> FairEvictionQueue:
        return self._queue if node.tier is Tier.DEVICE else self._host_queue

    def outline(self, max_nodes: int, max_compared: int) -> list[NodeView]:
        """Part of the tree, parents first: from the roots on, always the node with most hits, of equals the last used.

        At most `max_compared` nodes are looked at, so that a large tree costs no more.
        """
        found: list[NodeView] = []
        children = islice(chain.from_iterable(root.children.values() for root in self._trie.roots()), max_compared)
        nearby = [(-node.num_hits, -node.last_use, number, -1, node) for number, node in enumerate(children)]
        heapify(nearby)
        num_compared = len(nearby)
        while nearby and len(found) < max_nodes:
            *_, parent, node = heappop(nearby)
            for child in islice(node.children.values(), max_compared - num_compared) if node.children else ():
                heappush(nearby, (-child.num_hits, -child.last_use, num_compared, len(found), child))
                num_compared += 1
            found.append(NodeView(parent, len(node.blocks), node.num_hits, node.tier is Tier.HOST))
        return found

    # For tests and audits.

    def nodes(self) -> Iterator[Node]:
        """Every node that holds blocks, parents first."""
        return self._trie.nodes()

    def contents(self, partition: str) -> set[tuple[int, ...]]:
        """The tokens of every path that ends at a leaf."""
        return self._trie.contents(partition)

    def audit(self) -> None:
        """The trie is sound, the pools agree with it, the invariant holds, and every evictable leaf is queued."""
        everything = self._trie.audit()
        for tier, pool, queue in (
            (Tier.DEVICE, self._pool, self._queue),
            (Tier.HOST, self._host, self._host_queue),
        ):
            runs = [(node, node.blocks.tolist()) for node in everything if node.tier is tier]
            queue.audit(node for node, _ in runs)
            blocks = [block for _, run in runs for block in run]
            assert len(set(blocks)) == len(blocks), f"a {tier.value} block is in the tree twice"
            assert len(blocks) == pool.num_cached, f"{tier.value}: {len(blocks)} blocks, {pool.num_cached} cached"
            is_evictable = pool.evictable_flags() if blocks else []
            num_evictable = 0
            for node, run in runs:
                evictable = [is_evictable[block] for block in run]
                num_evictable += sum(evictable)
                assert evictable == sorted(evictable), f"a held block below an evictable one in {node}"
                parent = node.parent
                if not evictable[0] and parent is not None and len(parent.blocks):
                    evictable_above = self._pool_of(parent).is_evictable(parent.blocks.item(-1))
                    assert not evictable_above, f"the held {node} is below the evictable {parent}"
                assert node in queue or not queue.is_evictable(node), f"the evictable {node} is not queued"
            assert num_evictable == pool.num_evictable, f"evictable {tier.value} blocks are not in the tree"


def _last_use(node: Node) -> int:
    return node.last_use


def _find(node: Node, tier: Tier, block: int) -> int:
    """The index of a block in a node; -1 if it is not there."""
    blocks = node.blocks
    if node.tier is not tier or not len(blocks):
        return -1
    if blocks.item(-1) == block:  # mostly
        return len(blocks) - 1
    here = blocks == block
    where = int(here.argmax())
    return where if here[where] else -1


def _joined(runs: list[IntArray]) -> IntArray:
    if len(runs) == 1:
        return runs[0]
    return np.concatenate(runs) if runs else NO_BLOCKS


def _moves(src: Tier, sources: IntArray, dst: Tier, targets: IntArray) -> tuple[Move, ...]:
    return tuple(
        Move(Place(src, BlockId(source)), Place(dst, BlockId(target)))
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
    )
