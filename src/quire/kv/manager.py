"""Block tables of sequences and promises to them. Knows positions, not tokens; no rows, no steps.

A reservation is a count, not blocks: blocks enter a table only in the plan that first writes them. What is promised
to one sequence cannot be taken by another.
"""

from quire.core.ids import BlockId, SequenceId
from quire.kv.pool import BlockPool


def count_blocks(num_positions: int, block_size: int) -> int:
    """How many blocks hold so many positions."""
    return -(-num_positions // block_size)


class KVManager:
    """The tables of all seated sequences over one pool."""

    __slots__ = ("_promised", "_tables", "block_size", "num_promised", "pool")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_promised = 0  # blocks promised to sequences and not yet in their tables
        self._tables: dict[SequenceId, list[BlockId]] = {}
        self._promised: dict[SequenceId, int] = {}

    @property
    def num_available(self) -> int:
        """Free blocks that nobody was promised."""
        return self.pool.num_free - self.num_promised

    def open(self, sequence: SequenceId, num_reserved: int) -> bool:
        """Give a sequence an empty table and a promise of so many blocks; False if they are not there."""
        assert sequence not in self._tables, sequence
        if num_reserved > self.num_available:
            return False
        self._tables[sequence] = []
        self._promised[sequence] = num_reserved
        self.num_promised += num_reserved
        return True

    def grow(self, sequence: SequenceId) -> BlockId | None:
        """One more block for its table, from its promise if any is left; None if there is none to give."""
        if self._promised[sequence] > 0:
            self._promised[sequence] -= 1
            self.num_promised -= 1
        elif self.num_available == 0:
            return None
        block = self.pool.take()
        self._tables[sequence].append(block)
        return block

    def grow_to(self, sequence: SequenceId, num_positions: int) -> list[BlockId]:
        """The blocks its table lacks to hold so many positions, out of its promise."""
        missing = count_blocks(num_positions, self.block_size) - len(self._tables[sequence])
        assert missing <= self._promised[sequence], (sequence, missing)
        blocks = [self.grow(sequence) for _ in range(missing)]
        return [block for block in blocks if block is not None]

    def close(self, sequence: SequenceId) -> None:
        """Forget the sequence: its blocks lose a reader, its promise lapses."""
        self.num_promised -= self._promised.pop(sequence)
        self.pool.release(reversed(self._tables.pop(sequence)))

    def capacity(self, sequence: SequenceId) -> int:
        """Positions its table can hold."""
        return len(self._tables[sequence]) * self.block_size

    def table(self, sequence: SequenceId) -> tuple[BlockId, ...]:
        return tuple(self._tables[sequence])

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def audit(self) -> None:
        """References = readers, no block twice in a table, promises add up and can be kept."""
        self.pool.audit()
        readers: dict[BlockId, int] = {}
        for sequence, blocks in self._tables.items():
            assert len(set(blocks)) == len(blocks), f"a block is twice in the table of sequence {sequence}"
            for block in blocks:
                readers[block] = readers.get(block, 0) + 1
        for block, count in readers.items():
            assert self.pool.num_references(block) == count, f"block {block} has {count} readers"
        assert len(readers) + self.pool.num_free == self.pool.num_blocks, "a block is held by nobody"
        assert self.num_promised == sum(self._promised.values()), "promises do not add up"
        assert self.num_available >= 0, "more blocks are promised than free"
