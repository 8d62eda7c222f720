"""Owns block ids. Knows nothing of tokens, tensors or requests.

A block is free, or it has references: one from each table that holds it, and one from the prefix tree if it is cached.
A cached block that no table holds is *idle*: it can be had by evicting it.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import NULL_BLOCK, BlockId, IndexArray, IntArray


class BlockPool:
    """A fixed number of blocks. Block 0 is the null block, never lent. Every verb takes many blocks at once.

    They are mostly few: numpy then counts in a third of the time that `any` and `all` take.
    """

    __slots__ = ("_cached", "_free", "_num_retired", "_references", "num_blocks", "num_cached", "num_free", "num_idle")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_idle = 0
        self._num_retired = 0
        self._free: IntArray = np.arange(num_blocks, 0, -1, dtype=np.int32)  # a stack: the first num_free are free
        self._references: IntArray = np.zeros(num_blocks + 1, dtype=np.int32)
        self._cached: NDArray[np.bool_] = np.zeros(num_blocks + 1, dtype=np.bool_)

    def take(self, count: int) -> IntArray:
        """Free blocks, each now with one reference."""
        assert count <= self.num_free, f"take({count}) from {self.num_free} free blocks: ask num_free first"
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._references[_indices(blocks)] = 1
        return blocks

    def share(self, blocks: IntArray) -> None:
        """One more reference to each of some distinct blocks."""
        if not len(blocks):
            return
        at = _indices(blocks)
        before = self._references[at]
        assert np.count_nonzero(before > 0) == len(blocks), blocks
        self.num_idle -= int(np.count_nonzero(self._cached[at] & (before == 1)))
        self._references[at] = before + 1

    def release(self, blocks: IntArray) -> int:
        """One reference less to each of some distinct blocks; how many of them are free now."""
        at = _indices(blocks)
        after, cached = self._references[at] - 1, self._cached[at]
        assert np.count_nonzero(after >= 0) == len(blocks), blocks
        self._references[at] = after
        self.num_idle += int(np.count_nonzero(cached & (after == 1)))
        freed = blocks[after == 0]
        assert not np.count_nonzero(cached & (after == 0)), "a cached block lost its last reference outside the tree"
        self._push(freed)
        return len(freed)

    def adopt(self, blocks: IntArray) -> None:
        """The tree takes blocks that tables hold: they are cached from now on."""
        at = _indices(blocks)
        before = self._references[at]
        assert np.count_nonzero(before > 0) == len(blocks) and not np.count_nonzero(self._cached[at]), blocks
        self._cached[at] = True
        self._references[at] = before + 1
        self.num_cached += len(blocks)

    def disown(self, blocks: IntArray) -> int:
        """The tree lets go of blocks; how many of them are free now."""
        at = _indices(blocks)
        assert np.count_nonzero(self._cached[at]) == len(blocks), blocks
        after = self._references[at] - 1
        self._references[at] = after
        self._cached[at] = False
        self.num_cached -= len(blocks)
        freed = blocks[after == 0] if np.count_nonzero(after) else blocks  # nearly always all of them
        self.num_idle -= len(freed)
        self._push(freed)
        return len(freed)

    def _push(self, freed: IntArray) -> None:
        self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)

    def retire(self, count: int) -> int:
        """Take up to so many free blocks out of service for ever; how many there were."""
        count = min(count, self.num_free)
        self.num_free -= count
        self._num_retired += count
        return count

    @property
    def num_in_service(self) -> int:
        return self.num_blocks - self._num_retired

    def references(self, block: BlockId) -> int:
        return int(self._references[block])

    def is_idle(self, block: int) -> bool:
        return bool(self._cached.item(block)) and self._references.item(block) == 1

    def idle_flags(self) -> list[bool]:
        """By block id, for audits."""
        flags: list[bool] = (self._cached & (self._references == 1)).tolist()
        return flags

    def any_shared(self, blocks: IntArray) -> bool:
        return len(blocks) > 0 and bool(np.count_nonzero(self._references[_indices(blocks)] > 1))

    def count_idle(self, blocks: IntArray) -> int:
        at = _indices(blocks)
        return 0 if not len(blocks) else int(np.count_nonzero(self._cached[at] & (self._references[at] == 1)))

    def count_readers(self, blocks: IntArray, counts: NDArray[np.int64]) -> int:
        """How many of some distinct blocks have no other readers than the `counts` given."""
        at = _indices(blocks)
        return int(np.count_nonzero(self._references[at] - self._cached[at] == counts))

    def audit_readers(self, readers: list[int]) -> None:
        """Every reference is one of a table (`readers`, by block) or the tree's."""
        references = self._references.tolist()
        due = [count + kept for count, kept in zip(readers, self._cached.tolist(), strict=True)]
        if references != due:
            wrong = next(block for block, count in enumerate(due) if count != references[block])
            raise AssertionError(f"block {wrong}: {references[wrong]} references, {readers[wrong]} readers")

    def audit(self) -> None:
        """A block is free or referenced, never both; the counts are true."""
        free = self._free[: self.num_free]
        distinct = set(free.tolist())
        assert len(distinct) == len(free), "a block is free twice"
        assert not np.count_nonzero(self._references[free]), "a free block is referenced"
        assert self._references[NULL_BLOCK] == 0 and NULL_BLOCK not in distinct, "the null block was lent"
        held = np.count_nonzero(self._references)
        assert len(free) + held == self.num_in_service, f"{self.num_in_service - held - len(free)} blocks are lost"
        assert self.num_cached == np.count_nonzero(self._cached), "cached blocks are miscounted"
        num_idle = np.count_nonzero(self._cached & (self._references == 1))
        assert self.num_idle == num_idle, "idle blocks are miscounted"


def _indices(blocks: IntArray) -> IndexArray:
    """Made once for all look-ups of a verb."""
    return blocks.astype(np.intp)
