"""The block pool against an obvious model: a dict of readers and a set of cached blocks."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.ids import NULL_BLOCK, BlockId, IntArray
from quire.kv.block_pool import BlockPool


def ids(blocks: list[int]) -> IntArray:
    return np.array(blocks, dtype=np.int32)


class PoolMachine(RuleBasedStateMachine):
    """Readers stand for tables. A cached block without readers is evictable."""

    @initialize(size=st.integers(0, 12))
    def build(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.readers: dict[int, int] = {}  # of blocks that are not free
        self.cached: set[int] = set()
        self.num_retired = 0

    @property
    def num_free(self) -> int:
        return self.pool.num_blocks - self.num_retired - len(self.readers)

    def some(self, data: st.DataObject, blocks: list[int]) -> list[int]:
        """A few distinct ones, in any order; perhaps none."""
        return data.draw(st.lists(st.sampled_from(blocks), unique=True)) if blocks else []

    def remove_free(self, blocks: list[int]) -> int:
        """How many of these have no reference any more."""
        freed = [block for block in blocks if self.readers[block] == 0 and block not in self.cached]
        for block in freed:
            del self.readers[block]
        return len(freed)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        taken = self.pool.take(data.draw(st.integers(0, self.num_free))).tolist()
        assert len(set(taken)) == len(taken) and not set(taken) & self.readers.keys()
        assert all(NULL_BLOCK < block <= self.pool.num_blocks for block in taken)
        self.readers.update(dict.fromkeys(taken, 1))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = self.some(data, sorted(self.readers))
        self.pool.share(ids(blocks))
        for block in blocks:
            self.readers[block] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.some(data, [block for block, count in self.readers.items() if count])
        freed = self.pool.release(ids(blocks))
        for block in blocks:
            self.readers[block] -= 1
        assert freed == self.remove_free(blocks)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        blocks = self.some(data, [block for block in self.readers if block not in self.cached])
        self.pool.adopt(ids(blocks))
        self.cached |= set(blocks)

    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        blocks = self.some(data, sorted(self.cached))
        freed = self.pool.disown(ids(blocks))
        self.cached -= set(blocks)
        assert freed == self.remove_free(blocks)

    @rule(count=st.integers(0, 3))
    @precondition(lambda self: self.pool.num_blocks > 6)
    def retire(self, count: int) -> None:
        expected = min(count, self.num_free)
        assert self.pool.retire(count) == expected
        self.num_retired += expected

    @rule(data=st.data())
    def count(self, data: st.DataObject) -> None:
        blocks = self.some(data, sorted(self.readers))
        counts = np.array([data.draw(st.integers(0, 2)) for _ in blocks], dtype=np.int64)
        assert self.pool.count_evictable(ids(blocks)) == sum(self.readers[block] == 0 for block in blocks)
        alone = sum(self.readers[block] == count for block, count in zip(blocks, counts.tolist(), strict=True))
        assert self.pool.count_readers(ids(blocks), counts) == alone

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.audit()
        evictable = {block for block in self.cached if self.readers[block] == 0}
        assert pool.num_free == self.num_free
        assert pool.num_cached == len(self.cached)
        assert pool.num_evictable == len(evictable)
        assert pool.num_in_service == pool.num_blocks - self.num_retired
        readers = [0] * (pool.num_blocks + 1)
        for block, count in self.readers.items():
            readers[block] = count
            assert pool.references(BlockId(block)) == count + (block in self.cached)
            assert pool.is_evictable(BlockId(block)) == (block in evictable)
        pool.audit_readers(readers)
        cached = [block in self.cached for block in range(1, pool.num_blocks + 1)]
        expected = [4 if held > 1 else 2 * held + kept for held, kept in zip(readers[1:], cached, strict=True)]
        assert pool.states().tolist() == expected


TestPoolMachine = PoolMachine.TestCase


def test_blocks_come_in_ascending_order_and_the_last_freed_comes_first() -> None:
    pool = BlockPool(6)
    assert pool.take(3).tolist() == [1, 2, 3]
    pool.release(ids([1, 3]))
    assert pool.take(3).tolist() == [1, 3, 4]


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)


def test_more_than_is_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="3"):
        BlockPool(2).take(3)


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).share(ids([1]))


def test_a_free_block_cannot_be_adopted() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).adopt(ids([1]))


def test_a_block_is_adopted_once() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    pool.adopt(block)
    with pytest.raises(AssertionError):
        pool.adopt(block)


def test_only_a_cached_block_can_be_disowned() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.disown(pool.take(1))


def test_a_table_cannot_release_the_trees_reference() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    pool.adopt(block)
    pool.release(block)
    with pytest.raises(AssertionError, match="outside the tree"):
        pool.release(block)


def test_the_audits_find_a_lost_block_and_an_extra_reader() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    with pytest.raises(AssertionError, match="0 readers"):
        pool.audit_readers([0, 0, 0])
    pool.num_free -= 1
    with pytest.raises(AssertionError, match="lost"):
        pool.audit()
    assert block.tolist() == [1]
