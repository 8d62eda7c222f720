"""Tables and promises against an obvious model."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.ids import SequenceId
from quire.kv.manager import KVManager, count_blocks


class ManagerMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 5))
    def build(self, blocks: int, size: int) -> None:
        self.kv = KVManager(blocks, size)
        self.tables: dict[SequenceId, int] = {}  # blocks held
        self.promises: dict[SequenceId, int] = {}
        self.next_id = 0

    def available(self) -> int:
        return self.kv.pool.num_blocks - sum(self.tables.values()) - sum(self.promises.values())

    @rule(reserved=st.integers(0, 8))
    def open(self, reserved: int) -> None:
        sequence = SequenceId(self.next_id)
        self.next_id += 1
        fits = reserved <= self.available()
        assert self.kv.open(sequence, reserved) == fits
        if fits:
            self.tables[sequence] = 0
            self.promises[sequence] = reserved

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tables)))
        possible = self.promises[sequence] > 0 or self.available() > 0
        block = self.kv.grow(sequence)
        assert (block is not None) == possible
        if possible:
            self.promises[sequence] = max(0, self.promises[sequence] - 1)
            self.tables[sequence] += 1

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def grow_to(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tables)))
        most = (self.tables[sequence] + self.promises[sequence]) * self.kv.block_size
        positions = data.draw(st.integers(0, most))
        held = self.tables[sequence]
        wanted = max(held, count_blocks(positions, self.kv.block_size))
        assert len(self.kv.grow_to(sequence, positions)) == wanted - held
        self.promises[sequence] -= wanted - held
        self.tables[sequence] = wanted

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tables)))
        self.kv.close(sequence)
        del self.tables[sequence], self.promises[sequence]

    @invariant()
    def agrees(self) -> None:
        self.kv.audit()
        assert self.kv.num_available == self.available()
        for sequence, held in self.tables.items():
            assert len(self.kv.table(sequence)) == held
            assert self.kv.capacity(sequence) == held * self.kv.block_size


TestManagerMachine = ManagerMachine.TestCase


def test_blocks_are_counted_upwards() -> None:
    assert [count_blocks(n, 16) for n in (0, 1, 15, 16, 17)] == [0, 1, 1, 1, 2]
