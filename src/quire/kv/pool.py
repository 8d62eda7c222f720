"""Owns block ids. Knows nothing of tokens, tensors or requests."""

from collections.abc import Iterable

import numpy as np

from quire.core.ids import NULL_BLOCK, BlockId


class BlockPool:
    """A fixed number of blocks, each free or referenced by its readers. Block 0 is the null block, never lent."""

    __slots__ = ("_free", "_references", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks + 1, dtype=np.int32)
        self._free = [BlockId(block) for block in range(num_blocks, 0, -1)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> BlockId:
        """A free block, now with one reader."""
        assert self._free, "take() from an empty pool: ask num_free first"
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: BlockId) -> None:
        """One more reader of a block that has at least one."""
        assert self._references[block] > 0, block
        self._references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """One reader less of each; a block without readers is free."""
        for block in blocks:
            assert self._references[block] > 0, block
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def num_references(self, block: BlockId) -> int:
        return int(self._references[block])

    def audit(self) -> None:
        """A block is free xor referenced; the free list has no duplicates; the null block is neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert NULL_BLOCK not in free and self._references[NULL_BLOCK] == 0, "the null block was lent"
        assert not self._references[self._free].any(), "a free block has readers"
        held = int(np.count_nonzero(self._references))
        assert held + len(free) == self.num_blocks, f"{held} held + {len(free)} free != {self.num_blocks}"
