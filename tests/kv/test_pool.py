"""The block pool against an obvious model: a dict of reference counts."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from quire.core.ids import NULL_BLOCK, BlockId
from quire.kv.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")  # one entry per reader

    @initialize(size=st.integers(1, 12))
    def build(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.readers: dict[BlockId, int] = {}

    @rule(target=held)
    @precondition(lambda self: len(self.readers) < self.pool.num_blocks)
    def take(self) -> BlockId:
        block = self.pool.take()
        assert block not in self.readers and block != NULL_BLOCK and 1 <= block <= self.pool.num_blocks
        self.readers[block] = 1
        return block

    @rule(target=held, block=held)
    def share(self, block: BlockId) -> BlockId:
        self.pool.share(block)
        self.readers[block] += 1
        return block

    @rule(block=consumes(held))
    def release(self, block: BlockId) -> None:
        self.pool.release([block])
        self.readers[block] -= 1
        if self.readers[block] == 0:
            del self.readers[block]

    @invariant()
    def agrees(self) -> None:
        self.pool.audit()
        assert self.pool.num_free == self.pool.num_blocks - len(self.readers)
        for block, count in self.readers.items():
            assert self.pool.num_references(block) == count


TestPoolMachine = PoolMachine.TestCase


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.release([block])


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).share(BlockId(1))


def test_the_audit_sees_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="held"):
        pool.audit()
