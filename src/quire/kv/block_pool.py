"""The block pool: reference counts of KV blocks and the free list. Does not depend on tokens, tensors or requests.

A block is free, or it has references: one from each block table that holds it, and one from the prefix tree if it is
cached. A cached block that no table holds is *evictable*: eviction makes it free.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import NULL_BLOCK, BlockId, IndexArray, IntArray

_TREE, _TABLE = 1, 2  # the value of a reference
_EVICTABLE = _TREE
# The same as arrays: adding a Python int to a short array takes numpy twice as long.
_FREE_ARRAY, _TREE_ARRAY, _TABLE_ARRAY = (np.array(count, dtype=np.int32) for count in (0, _TREE, _TABLE))


class BlockPool:
    """A fixed number of blocks. Block 0 is the null block, never allocated. Every method takes many blocks at once.

    A block's references are one number: 2 for each table and 1 for the tree. So 0 is free, 1 is evictable, and a cached
    block is odd. Calls name few blocks: a list is then counted in a third of the time that numpy takes.

    Released blocks are allocated before those that never were: on a CPU the memory of the latter is not resident yet.
    """

    __slots__ = ("_free", "_num_retired", "_references", "num_blocks", "num_cached", "num_evictable", "num_free",
                 "num_untouched")  # fmt: skip

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_untouched = num_blocks  # never allocated; the bottom of the stack
        self.num_cached = 0
        self.num_evictable = 0
        self._num_retired = 0
        self._free: IntArray = np.arange(num_blocks, 0, -1, dtype=np.int32)  # a stack: the first num_free are free
        self._references: IntArray = np.zeros(num_blocks + 1, dtype=np.int32)

    def take(self, count: int) -> IntArray:
        """Allocate free blocks, each with one reference."""
        assert count <= self.num_free, f"take({count}) from {self.num_free} free blocks: check num_free first"
        stop = self.num_free
        self.num_free = stop - count
        self.num_untouched = min(self.num_untouched, self.num_free)
        blocks = self._free[self.num_free : stop][::-1].copy()
        self._references[_indices(blocks)] = _TABLE
        return blocks

    def share(self, blocks: IntArray) -> None:
        """Add a reference to each of some distinct blocks."""
        if not len(blocks):
            return
        at = _indices(blocks)
        after = self._references[at] + _TABLE_ARRAY
        self._references[at] = after
        counts = after.tolist()
        assert min(counts) > _TABLE, blocks
        self.num_evictable -= counts.count(_EVICTABLE + _TABLE)

    def release(self, blocks: IntArray) -> int:
        """Remove a reference from each of some distinct blocks; how many of them are free now."""
        at = _indices(blocks)
        after = self._references[at] - _TABLE_ARRAY
        self._references[at] = after
        counts = after.tolist()
        assert min(counts, default=0) >= 0, f"{blocks}: one is free, or lost its last reference outside the tree"
        self.num_evictable += counts.count(_EVICTABLE)
        num_freed: int = counts.count(0)
        if num_freed:
            self._push(blocks[after == _FREE_ARRAY])
        return num_freed

    def adopt(self, blocks: IntArray) -> None:
        """The tree caches blocks that tables hold."""
        at = _indices(blocks)
        before = self._references[at]
        counts = before.tolist()
        alone = counts.count(_TABLE) == len(counts)
        assert alone or all(count > 0 and count % _TABLE == 0 for count in counts), blocks
        self._references[at] = before + _TREE_ARRAY
        self.num_cached += len(blocks)

    def disown(self, blocks: IntArray) -> int:
        """The tree drops blocks; how many of them are free now."""
        at = _indices(blocks)
        after = self._references[at] - _TREE_ARRAY
        self._references[at] = after
        self.num_cached -= len(blocks)
        freed = blocks
        if np.count_nonzero(after):  # nearly always all of them are free
            assert not np.count_nonzero(after % _TABLE), blocks
            freed = blocks[after == 0]
        self.num_evictable -= len(freed)
        self._push(freed)
        return len(freed)

    def _push(self, freed: IntArray) -> None:
        self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)

    def retire(self, count: int) -> int:
        """Take up to `count` free blocks out of service for good; how many there were."""
        count = min(count, self.num_free)
        self.num_free -= count
        self.num_untouched = min(self.num_untouched, self.num_free)
        self._num_retired += count
        return count

    @property
    def num_in_service(self) -> int:
        return self.num_blocks - self._num_retired

    def references(self, block: BlockId) -> int:
        return sum(divmod(self._references.item(block), _TABLE))

    def is_evictable(self, block: int) -> bool:
        return self._references.item(block) == _EVICTABLE

    def states(self) -> NDArray[np.uint8]:
        """Of every block from 1 on: 0 free, 1 cached, 2 held by one table, 3 held and cached, 4 held by several."""
        counts = self._references[1:]
        return np.minimum(counts, 2 * _TABLE).astype(np.uint8)

    def evictable_flags(self) -> list[bool]:
        """By block id, for audits."""
        flags: list[bool] = (self._references == _EVICTABLE).tolist()
        return flags

    def any_shared(self, blocks: IntArray) -> bool:
        """Whether one of a table's blocks has another reference."""
        return len(blocks) > 0 and max(self._references[_indices(blocks)].tolist()) > _TABLE

    def any_cached(self, blocks: IntArray) -> bool:
        """Whether one of some blocks is in the tree."""
        return bool(np.count_nonzero(self._references[_indices(blocks)] % _TABLE))

    def count_evictable(self, blocks: IntArray) -> int:
        return 0 if not len(blocks) else int(np.count_nonzero(self._references[_indices(blocks)] == _EVICTABLE))

    def count_readers(self, blocks: IntArray, counts: NDArray[np.int64]) -> int:
        """How many of some distinct blocks are held by exactly `counts` tables."""
        return int(np.count_nonzero(self._references[_indices(blocks)] // _TABLE == counts))

    def audit_readers(self, readers: list[int]) -> None:
        """Every reference is a table's (`readers`, by block) or the tree's."""
        held = (self._references // _TABLE).tolist()
        if held != readers:
            wrong = next(block for block, count in enumerate(readers) if count != held[block])
            raise AssertionError(f"block {wrong}: held by {held[wrong]} tables, {readers[wrong]} readers")

    def audit(self) -> None:
        """A block is free or referenced, never both; the counts are right."""
        free = self._free[: self.num_free]
        distinct = set(free.tolist())
        assert len(distinct) == len(free), "a block is free twice"
        assert not np.count_nonzero(self._references[free]), "a free block is referenced"
        assert self._references[NULL_BLOCK] == 0 and NULL_BLOCK not in distinct, "the null block was allocated"
        held = np.count_nonzero(self._references)
        assert len(free) + held == self.num_in_service, f"{self.num_in_service - held - len(free)} blocks are lost"
        assert self.num_cached == np.count_nonzero(self._references % _TABLE), "cached blocks are miscounted"
        assert self.num_evictable == np.count_nonzero(self._references == _EVICTABLE), "evictable blocks are miscounted"
        untouched = np.arange(self.num_blocks, self.num_blocks - self.num_untouched, -1)
        assert np.array_equal(free[: self.num_untouched], untouched), "untouched blocks are not at the bottom"


def _indices(blocks: IntArray) -> IndexArray:
    """Converted once for all indexed reads and writes of a method."""
    return blocks.astype(np.intp)
