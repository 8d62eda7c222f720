"""The KV cache manager: block tables of all rows, reservations, and the prefix cache. Does not depend on queues.

A row's table begins with the blocks of the longest cached prefix and grows by blocks from the pool. A reservation is a
count: a block is allocated only by the plan that first writes it, and blocks reserved for one row are never given to
another. Block copies (copy-on-write, demotion, promotion) collect here until the next plan takes them.

Where memory becomes resident when a block is first written (a CPU), prefixes that no row holds fill a part of the pool
only: beyond the resident limit the oldest are evicted before more memory is touched. Each request that asks for an
evicted prefix raises the limit by a multiple of what it computes again, so the memory of a cache follows its use.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import BlockId, IndexArray, IntArray, RequestId, Row
from quire.core.moves import Move, Place, Tier
from quire.core.request import BlockOwner
from quire.kv.block_pool import BlockPool
from quire.kv.eviction import CacheMiss, CacheMissKind
from quire.kv.prefix_holds import PrefixHolds
from quire.kv.radix_node import NO_BLOCKS, Node
from quire.kv.radix_tree import Inserted, PrefixMatch, RadixTree

_ONE = np.array(1)  # numpy adds an array in half the time of a Python int


class BlockTables:
    """The block table of every row, and the blocks reserved for it: the columns that a decode step reads and writes.

    They are arrays because a step grows the tables of hundreds of rows at once, which is then one numpy call per
    column. What changes for one row at a time is in `RowBlocks`. The table is as wide as the longest row has needed.
    """

    __slots__ = ("_blocks", "lengths", "reserved")

    def __init__(self, max_rows: int) -> None:
        self._blocks: IntArray = np.zeros((max_rows, 8), dtype=np.int32)
        self.lengths: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # blocks in the table
        self.reserved: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # blocks not yet in the table

    def of(self, row: Row) -> IntArray:
        """The row's blocks, in order: a view."""
        blocks: IntArray = self._blocks[row, : self.lengths.item(row)]
        return blocks

    def held(self, rows: IndexArray) -> tuple[IndexArray, IntArray]:
        """The blocks of some rows, one row after another, and the row of each block."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        places = np.repeat(rows * self._blocks.shape[1] - (ends - lengths), lengths)  # in the table as one line
        places += np.arange(len(places))
        return np.repeat(rows, lengths), self._blocks.reshape(-1)[places]

    def last(self, row: Row) -> int:
        return int(self._blocks[row, self.lengths[row] - 1])

    def append(self, row: Row, blocks: IntArray) -> None:
        """Append blocks to one row."""
        start = self.lengths.item(row)
        stop = start + len(blocks)
        if stop > self._blocks.shape[1]:
            self._widen(stop)
        self._blocks[row, start:stop] = blocks
        self.lengths[row] = stop

    def append_each(self, rows: IndexArray, blocks: IntArray) -> None:
        """Append one block to each of some distinct rows."""
        ends = self.lengths[rows]
        try:
            self._blocks[rows, ends] = blocks
        except IndexError:  # nothing was written yet; a check for the longest row in each call would cost more
            self._widen(int(ends.max()) + 1)
            self._blocks[rows, ends] = blocks
        self.lengths[rows] = ends + _ONE

    def clear(self, row: Row) -> None:
        self.lengths[row] = 0

    def _widen(self, width: int) -> None:
        more = max(width, 2 * self._blocks.shape[1]) - self._blocks.shape[1]
        self._blocks = np.pad(self._blocks, ((0, 0), (0, more)))


class RowBlocks:
    """How the blocks of one row relate to the prefix tree and to other rows."""

    __slots__ = ("forked", "frozen", "node", "num_committed")

    def __init__(self) -> None:
        self.node: Node | None = None  # the deepest node of the tree that is in the row's table
        self.num_committed = 0  # leading blocks shared with the tree
        self.frozen = False  # the tree has another copy of the same tokens: what the row writes stays its own
        self.forked = False  # a parent or a child: other rows may hold blocks of it that are not in the tree


# Blocks evicted at once, ahead of need: an eviction costs about the same for one block and for many.
_EVICTION_BATCH = 32
_LIMIT_GROWTH = 4  # blocks, for each that is computed again: a cache computes a quarter of itself twice at most
_UNHELD_SHARE = 4  # of the resident limit: so much of it stays cached, however much rows hold


def count_blocks(num_positions: int, block_size: int) -> int:
    """How many blocks hold `num_positions` positions."""
    return -(-num_positions // block_size)


class KVManager:
    """The block tables of all rows over one pool, and the prefix tree."""

    __slots__ = ("_moves", "_rows", "_worth_keeping", "block_size", "holds", "host", "num_reserved", "pool",
                 "resident_limit", "step", "tables", "tree")  # fmt: skip

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        *,
        prefix: bool = True,
        num_host_blocks: int = 0,
        resident_limit: int | None = None,
        worth_keeping: Callable[[int, int], bool] = lambda start, stop: True,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks) if num_host_blocks else None
        self.block_size = block_size
        self.tree = RadixTree(block_size, self.pool, self.host) if prefix else None
        self.tables = BlockTables(max_rows)
        self.resident_limit = num_blocks if resident_limit is None else resident_limit  # blocks
        self.num_reserved = 0  # of all rows
        self.step = 0  # of the plan being built; recorded with evictions
        self._worth_keeping = worth_keeping  # whether promoting positions [start, stop) is cheaper than computing them
        self._rows = [RowBlocks() for _ in range(max_rows)]
        self._moves: list[Move] = []
        self.holds = PrefixHolds()

    @property
    def num_available(self) -> int:
        """Blocks that no row holds and none are reserved for."""
        return self.pool.num_free + self.pool.num_evictable - self.num_reserved

    def match(self, owner: BlockOwner, tokens: IntArray, limit: int) -> PrefixMatch | None:
        """The longest cached prefix of tokens[:limit]. Reads only: hold it with `open` before the tree changes."""
        return None if self.tree is None or limit <= 0 else self.tree.match(owner.partition, tokens, limit)

    def continuation(self, owner: BlockOwner, tokens: IntArray, limit: int) -> IntArray:
        """What earlier requests of the partition went on with after these tokens, up to `limit` tokens."""
        return NO_BLOCKS if self.tree is None else self.tree.continuation(owner.partition, tokens, limit)

    def note_miss(self, owner: BlockOwner, tokens: IntArray, num_found: int) -> CacheMiss | None:
        """Why the first whole block after `num_found` tokens is not cached; None if there is no such block."""
        if self.tree is None:
            return None
        miss = self.tree.miss_reason(owner.partition, tokens, num_found // self.block_size * self.block_size)
        if miss is not None and miss.kind is CacheMissKind.EVICTED:
            num_blocks = (len(tokens) - num_found) // self.block_size
            self.resident_limit = min(self.resident_limit + _LIMIT_GROWTH * num_blocks, self.pool.num_blocks)
        return miss

    def touch(self, match: PrefixMatch | None) -> None:
        """Mark a match as used: a request that waits keeps its prefix from being the next to be evicted."""
        if match is not None and self.tree is not None:
            self.tree.touch(match)

    def num_found(self, match: PrefixMatch | None) -> int:
        """All tokens of a match, on both tiers."""
        if match is None:
            return 0
        num_partial = 0 if match.partial is None else match.partial.num_tokens
        return match.num_tokens + len(match.host_blocks) * self.block_size + num_partial

    def shortage(self, match: PrefixMatch | None, num_more: int) -> int:
        """How many blocks are missing to hold a match and reserve `num_more`; 0 or less if it fits."""
        num_evictable = 0 if match is None or not len(match.blocks) else self.pool.count_evictable(match.blocks)
        return num_more + num_evictable - self.num_available

    def fits(self, match: PrefixMatch | None, num_more: int) -> bool:
        return self.shortage(match, num_more) <= 0

    def open(self, row: Row, owner: BlockOwner, match: PrefixMatch | None, num_more: int) -> int:
        """Begin a row's table with a match and reserve `num_more` blocks beyond it; the positions it holds."""
        assert self.tables.lengths[row] == 0, row
        self.reserve(row, num_more)
        if match is None or self.tree is None:
            assert self.num_available >= 0, num_more
            return 0
        match = self.tree.touch(match, hit=True)
        self.pool.share(match.blocks)
        assert self.num_available >= 0, (match, num_more)
        if len(match.blocks):
            self.tables.append(row, match.blocks)
        state = self._rows[row]
        state.node, state.num_committed = match.node, len(match.blocks)
        num_tokens = match.num_tokens
        from_host = match.host_node is not None or (match.partial is not None and match.partial.place.tier is Tier.HOST)
        if match.host_node is not None:
            blocks = self._allocate(row, len(match.host_blocks), owner.request, demoting=False)
            self._moves.extend(self.tree.promote(match.host_node, blocks))
            state.node = match.host_node
            state.num_committed += len(blocks)
            num_tokens += len(blocks) * self.block_size
        if match.partial is not None:
            block = self._allocate(row, 1, owner.request, demoting=not from_host)
            self._moves.append(Move(match.partial.place, Place(Tier.DEVICE, BlockId(int(block[0])))))
            num_tokens += match.partial.num_tokens
        return num_tokens

    def fork(self, parent: Row, child: Row, owner: BlockOwner, tokens: IntArray) -> None:
        """Begin the child's table with the parent's first tokens: full blocks are shared, a partial one is copied."""
        assert self.tables.lengths[child] == 0, child
        self._rows[parent].forked = self._rows[child].forked = True
        num_full = len(tokens) // self.block_size
        shared = self.tables.of(parent)[: num_full + 1].copy()
        self.pool.share(shared[:num_full])
        self.tables.append(child, shared[:num_full])
        self._find_own_node(child, owner, tokens[: num_full * self.block_size])
        if len(tokens) % self.block_size:
            block = self._allocate(child, 1, owner.request)
            source = Place(Tier.DEVICE, BlockId(int(shared[num_full])))
            self._moves.append(Move(source, Place(Tier.DEVICE, BlockId(int(block[0])))))

    def _find_own_node(self, row: Row, owner: BlockOwner, tokens: IntArray) -> None:
        """Find the node where the cached part of the row's blocks ends."""
        if self.tree is None:
            return
        match = self.tree.match(owner.partition, tokens, len(tokens))
        held = self.tables.of(row)
        same = held[: len(match.blocks)] == match.blocks
        num_own = len(same) if same.all() else int(same.argmin())
        state = self._rows[row]
        if num_own:
            state.node = self.tree.end_at(match.node, Tier.DEVICE, held.item(num_own - 1))
        state.num_committed = num_own
        state.frozen = num_own < len(held)  # the parent has copies of its own; the tree has others

    def grow(self, row: Row, by: RequestId) -> bool:
        """Allocate one block for a row, reserved or not; False if none is available."""
        if self.tables.reserved[row] == 0:
            if self.num_available == 0:
                return False
            self.reserve(row, 1)
        self._allocate(row, 1, by)
        return True

    def grow_each(self, rows: IndexArray) -> IntArray | None:
        """Allocate one block for each row; None, and nothing done, if there are too few."""
        reserved = self.tables.reserved[rows]
        kept = reserved > 0
        num_kept = int(np.count_nonzero(kept))
        if len(rows) - num_kept > self.num_available:
            return None
        self._make_free(len(rows), None)
        blocks = self.pool.take(len(rows))
        self.tables.reserved[rows] = reserved - kept
        self.num_reserved -= num_kept
        self.tables.append_each(rows, blocks)
        return blocks

    def grow_to(self, row: Row, num_positions: int, by: RequestId) -> IntArray:
        """Allocate the blocks that a row lacks to hold `num_positions`, out of its reservation."""
        missing = count_blocks(num_positions, self.block_size) - self.tables.lengths.item(row)
        return self._allocate(row, missing, by) if missing > 0 else NO_BLOCKS

    def commit(self, row: Row, owner: BlockOwner, tokens: IntArray) -> None:
        """Positions [0, len(tokens)) of the row are written: cache their whole blocks."""
        num_blocks, state = len(tokens) // self.block_size, self._rows[row]
        if self.tree is None or state.frozen or num_blocks <= state.num_committed:
            return
        tokens = tokens[: num_blocks * self.block_size]
        inserted = self._insert(self.tree, state, self.tables.of(row), owner, tokens, leaving=False)
        if inserted.conflict:  # its own copies stay its own, and what comes after them
            state.frozen = True
        else:
            state.node, state.num_committed = inserted.node, num_blocks

    def _insert(
        self, tree: RadixTree, state: RowBlocks, blocks: IntArray, owner: BlockOwner, tokens: IntArray, *, leaving: bool
    ) -> Inserted:
        """Cache a row's path, in these blocks, below the part of it that is cached already."""
        start = state.num_committed
        if state.node is not None and start:
            node = tree.end_at(state.node, Tier.DEVICE, blocks.item(start - 1))  # a sibling may have extended it
        else:
            node = tree.root(owner.partition)
        blocks = blocks[start : count_blocks(len(tokens), self.block_size)]
        insert = tree.insert_leaving if leaving else tree.insert
        return insert(node, tokens[start * self.block_size :], blocks, owner)

    def close(self, row: Row, owner: BlockOwner, tokens: IntArray) -> None:
        """Release the row's table. Its positions [0, len(tokens)) stay cached."""
        self.reserve(row, -self.tables.reserved.item(row))
        blocks, state = self.tables.of(row), self._rows[row]
        if self.tree is not None and state.forked and self.pool.any_cached(blocks[state.num_committed :]):
            state.node = self.tree.deepest_node(owner.partition, blocks)  # a sibling has cached more of them
        last = None
        if self.tree is not None and len(tokens):
            num_held = count_blocks(len(tokens), self.block_size)
            shared = state.forked and self.pool.any_shared(blocks[state.num_committed : num_held])
            # Blocks that siblings hold must not be inserted below evictable copies.
            last = self._insert(self.tree, state, blocks, owner, tokens, leaving=not shared).node
        self.pool.release(blocks)
        for each in (last,) if state.node is last else (last, state.node):
            if self.tree is not None and each is not None:
                self.tree.offer(each)
        self.tables.clear(row)
        self._rows[row] = RowBlocks()

    def discard(self, row: Row, owner: BlockOwner) -> None:
        """Release the row's table and remove from the cache what this request has written."""
        state = self._rows[row]
        self.close(row, owner, np.empty(0, dtype=np.int32))
        if self.tree is not None and state.node is not None:
            self.tree.drop(state.node, owner.request)

    def take_moves(self) -> tuple[Move, ...]:
        """Take the copies that the next plan must carry."""
        moves, self._moves = tuple(self._moves), []
        return moves

    @property
    def has_moves(self) -> bool:
        """Whether copies wait for the next plan."""
        return bool(self._moves)

    def reset_cache(self) -> int:
        """Drop every prefix that no row holds; how many blocks became free."""
        return 0 if self.tree is None else self.tree.reset()

    def invalidate(self) -> None:
        """The device's memory is lost: drop all copies and prefixes. No row may be open."""
        assert not self.tables.lengths.any(), "invalidate() with open tables"
        self.holds.release_all(self)
        self._moves.clear()
        self.reset_cache()

    def take_room(self, count: int) -> IntArray:
        """Allocate available blocks that no row gets. No block is demoted for them, so none of them is to be copied."""
        self._make_free(count, None, demoting=False)
        return self.pool.take(count)

    def shrink(self, count: int) -> int:
        """Take up to `count` available blocks out of service for good; how many there were."""
        count = min(count, max(self.num_available, 0))
        self._make_free(count, None)
        return self.pool.retire(count)

    def reserve(self, row: Row, count: int) -> None:
        """Reserve `count` more blocks for a row; fewer, if it is negative."""
        self.tables.reserved[row] = self.tables.reserved.item(row) + count
        self.num_reserved += count

    def _allocate(self, row: Row, count: int, by: RequestId, *, demoting: bool = True) -> IntArray:
        """Allocate reserved blocks into the row's table. Without `demoting`, the host tier stays as it is."""
        assert count <= self.tables.reserved.item(row), (row, count, self.tables.reserved[row])
        if count > self.pool.num_free - self.pool.num_untouched:
            self._make_free(count, by, demoting=demoting)
        blocks = self.pool.take(count)
        self.reserve(row, -count)
        self.tables.append(row, blocks)
        return blocks

    def _make_free(self, count: int, by: RequestId | None, *, demoting: bool = True) -> None:
        short = max(count - self.pool.num_free, self._num_better_evicted(count))
        if short > 0:
            assert self.tree is not None, "more blocks are reserved than exist"
            demote = self._should_demote if demoting and self.host is not None else None
            evicted = self.tree.evict(short, batch=_EVICTION_BATCH, step=self.step, by=by, demote=demote)
            self._moves.extend(evicted.moves)

    def _num_better_evicted(self, count: int) -> int:
        """How many blocks to evict rather than to allocate `count` blocks of which some were never used."""
        pool = self.pool
        num_fresh = count - (pool.num_free - pool.num_untouched)
        num_over = pool.num_blocks - pool.num_untouched + num_fresh - self.resident_limit
        return min(num_fresh, num_over, pool.num_evictable - self.resident_limit // _UNHELD_SHARE)

    def _should_demote(self, node: Node, num_blocks: int) -> bool:
        stop = node.num_path_tokens
        return self._worth_keeping(max(stop - num_blocks * self.block_size, 0), stop)

    def audit(self, *, tree: bool = True) -> None:
        """References match the tables and holds, no block is twice in one, reservations add up and can be met."""
        self.pool.audit()
        readers = [0] * (self.pool.num_blocks + 1)
        for held in self.holds.held.values():
            for block in (*held.cached.tolist(), *held.room.tolist()):
                readers[block] += 1
        for row, length in enumerate(self.tables.lengths.tolist()):
            if length:
                blocks = self.tables.of(Row(row)).tolist()
                assert len(set(blocks)) == length, f"a block is twice in the table of row {row}"
                for block in blocks:
                    readers[block] += 1
        self.pool.audit_readers(readers)
        if self.tree is not None and tree:
            self.tree.audit()
        reserved = self.tables.reserved.tolist()
        assert self.num_reserved == sum(reserved), "reservations do not add up"
        assert min(reserved) >= 0 and self.num_available >= 0, "more blocks are reserved than available"
