"""Tables, reservations, prefixes and forks against dicts, with a memory that carries out the plans.

Every slot of the memory holds the whole prefix that ends there, as keys and values do in effect. So whatever a row
reads through its table must be its own past, whichever row wrote it and wherever it was copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.ids import BlockId, IntArray, RequestId, Row
from quire.core.moves import Place, Tier
from quire.core.request import BlockOwner
from quire.kv.manager import KVManager, count_blocks
from quire.kv.radix_node import decode

ROWS = 4
Prefix = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), max_size=14)


def ids(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)


def common(left: Prefix, right: Prefix) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


@dataclass(slots=True)
class Open:
    """A row as the test knows it."""

    owner: BlockOwner
    tokens: list[int]  # those written, or found written
    num_blocks: int
    reserved: int
    in_tree: int = 0  # leading blocks that are the tree's own
    frozen: bool = False  # others' blocks stand in the tree before its own
    pending: list[int] = field(default_factory=list)  # the next launch writes these


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.sampled_from((2, 5, 10, 60)),
        size=st.integers(1, 4),
        prefix=st.sampled_from((True, True, True, False)),
        host=st.sampled_from((0, 0, 1, 3, 8)),
        keeps=st.sampled_from((1, 2)),
        resident=st.sampled_from((None, 1, 4, 20)),
    )
    def build(self, blocks: int, size: int, prefix: bool, host: int, keeps: int, resident: int | None) -> None:
        self.kv = KVManager(
            blocks,
            size,
            ROWS,
            prefix=prefix,
            num_host_blocks=host if prefix else 0,
            resident_limit=resident,
            worth_keeping=lambda start, stop: stop % keeps == 0,
        )
        self.size = size
        self.rows: dict[Row, Open] = {}
        self.memory: dict[Place, list[Prefix | None]] = {}
        self.corpus: dict[str, set[Prefix]] = {}  # everything that was let into the tree
        self.complete = True  # nothing of it was evicted
        self.num_served = 0

    # What is obvious.

    def held(self) -> set[int]:
        tables = {block for row in self.rows for block in self.kv.tables.of(row).tolist()}
        holds = self.kv.holds.held.values()
        return tables | {block for each in holds for block in (*each.cached.tolist(), *each.room.tolist())}

    def available(self) -> int:
        reserved = sum(each.reserved for each in self.rows.values())
        return self.kv.pool.num_in_service - len(self.held()) - reserved

    def longest(self, partition: str, tokens: Prefix) -> int:
        return max((common(known, tokens) for known in self.corpus.get(partition, ())), default=0)

    def let_in(self, each: Open, tokens: Prefix) -> None:
        if self.kv.tree is not None:
            self.corpus.setdefault(each.owner.partition, set()).add(tokens)

    def pick(self, data: st.DataObject) -> tuple[Row, Open]:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        return row, self.rows[row]

    def free_row(self) -> Row:
        return Row(min(set(range(ROWS)) - self.rows.keys()))

    def watch_evictions(self) -> None:
        if self.kv.tree is not None and self.kv.tree.num_evicted:
            self.complete = False

    # What happens.

    @rule(
        data=st.data(),
        tokens=TOKENS,
        partition=st.sampled_from(("", "", "b")),
        priority=st.integers(0, 1),
        extra=st.integers(0, 4),
    )
    @precondition(lambda self: len(self.rows) < ROWS)
    def open(self, data: st.DataObject, tokens: list[int], partition: str, priority: int, extra: int) -> None:
        known = [path for path in self.corpus.get(partition, ()) if path]
        continues: bool = data.draw(st.booleans())
        if known and continues:
            tokens = [*data.draw(st.sampled_from(sorted(known))), *tokens]
        limit = data.draw(st.integers(0, len(tokens)))
        self.num_served += 1
        owner = BlockOwner(RequestId(self.num_served), partition, priority)
        match = self.kv.match(owner, ids(tokens), limit)
        num_found = self.kv.num_found(match)
        if self.complete:
            assert num_found == self.longest(partition, tuple(tokens[:limit]))
        num_more = extra
        num_evictable = num_kept = 0
        if match is not None:
            num_more += len(match.host_blocks) + (match.partial is not None)
            num_evictable = len(set(match.blocks.tolist()) - self.held())
            num_kept = len(match.blocks) + len(match.host_blocks)
        fits = num_more <= self.available() - num_evictable
        assert self.kv.fits(match, num_more) == fits
        if not fits:
            return
        row = self.free_row()
        assert self.kv.open(row, owner, match, num_more) == num_found
        num_blocks = count_blocks(num_found, self.size)
        spent = num_blocks - (0 if match is None else len(match.blocks))
        self.rows[row] = Open(owner, tokens[:num_found], num_blocks, num_more - spent, num_kept)
        self.watch_evictions()

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    @precondition(lambda self: self.rows)
    def write(self, data: st.DataObject, tokens: list[int]) -> None:
        """As far as the table reaches; never into a shared block."""
        row, each = self.pick(data)
        start = len(each.tokens) + len(each.pending)
        tokens = tokens[: each.num_blocks * self.size - start]
        for position in range(start, start + len(tokens)):
            assert self.kv.pool.references(BlockId(int(self.kv.tables.of(row)[position // self.size]))) == 1
        each.pending += tokens

    @rule()
    def launch(self) -> None:
        """A plan goes out: moves one after the other, then what its rows write. What they read is their own."""
        for move in self.kv.take_moves():
            self.memory[move.dst] = list(self.memory.get(move.src, [None] * self.size))
        for row, each in self.rows.items():
            start = len(each.tokens)
            each.tokens += each.pending
            each.pending = []
            table = self.kv.tables.of(row).tolist()
            for position in range(start, len(each.tokens)):
                block = self.memory.setdefault(Place(Tier.DEVICE, table[position // self.size]), [None] * self.size)
                block[position % self.size] = tuple(each.tokens[: position + 1])
        for row, each in self.rows.items():
            self.assert_holds(Tier.DEVICE, self.kv.tables.of(row).tolist(), tuple(each.tokens), 0)
        if self.kv.tree is not None:
            for node in self.kv.tree.nodes():
                path = decode(node.path())
                start = len(path) - len(decode(node.tokens))
                self.assert_holds(node.tier, node.blocks.tolist(), path, start)

    def assert_holds(self, tier: Tier, blocks: list[int], path: Prefix, start: int) -> None:
        for position in range(start, len(path)):
            place = Place(tier, BlockId(blocks[(position - start) // self.size]))
            assert self.memory[place][position % self.size] == path[: position + 1], (place, position)

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def grow(self, data: st.DataObject) -> None:
        row, each = self.pick(data)
        possible = each.reserved > 0 or self.available() > 0
        assert self.kv.grow(row, each.owner.request) == possible
        if possible:
            each.reserved = max(0, each.reserved - 1)
            each.num_blocks += 1
        self.watch_evictions()

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def grow_each(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        beyond = sum(self.rows[row].reserved == 0 for row in rows)
        possible = beyond <= self.available()
        blocks = self.kv.grow_each(np.array(rows, dtype=np.intp))
        assert (blocks is not None) == possible
        if blocks is not None:
            assert [self.kv.tables.last(row) for row in rows] == blocks.tolist()
            for row in rows:
                self.rows[row].reserved = max(0, self.rows[row].reserved - 1)
                self.rows[row].num_blocks += 1
        self.watch_evictions()

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def grow_to(self, data: st.DataObject) -> None:
        row, each = self.pick(data)
        positions = data.draw(st.integers(0, (each.num_blocks + each.reserved) * self.size))
        missing = max(count_blocks(positions, self.size) - each.num_blocks, 0)
        blocks = self.kv.grow_to(row, positions, each.owner.request)
        assert blocks.tolist() == self.kv.tables.of(row)[each.num_blocks :].tolist()
        assert len(blocks) == missing
        each.reserved -= missing
        each.num_blocks += missing
        self.watch_evictions()

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def commit(self, data: st.DataObject) -> None:
        row, each = self.pick(data)
        tokens = tuple(each.tokens[: data.draw(st.integers(0, len(each.tokens)))])
        self.kv.commit(row, each.owner, ids(tokens))
        self.note_commit(each, tokens)

    def note_commit(self, each: Open, tokens: Prefix) -> None:
        num_blocks = len(tokens) // self.size
        if each.frozen or num_blocks <= each.in_tree:
            return
        whole = tokens[: num_blocks * self.size]
        if self.longest(each.owner.partition, whole) // self.size > each.in_tree:
            each.frozen = True
        else:
            each.in_tree = num_blocks
            self.let_in(each, whole)

    @rule(data=st.data(), commits=st.booleans(), extra=st.integers(0, 3))
    @precondition(lambda self: 0 < len(self.rows) < ROWS)
    def fork(self, data: st.DataObject, commits: bool, extra: int) -> None:
        parent, each = self.pick(data)
        tokens = tuple(each.tokens[: data.draw(st.integers(0, len(each.tokens)))])
        if commits:
            self.kv.commit(parent, each.owner, ids(tokens))
            self.note_commit(each, tokens)
        num_full, partial = len(tokens) // self.size, len(tokens) % self.size > 0
        if partial + extra > self.available():
            return
        child = self.free_row()
        self.kv.reserve(child, partial + extra)
        self.kv.fork(parent, child, each.owner, ids(tokens))
        shared = self.kv.tables.of(parent)[:num_full].tolist()
        assert self.kv.tables.of(child)[:num_full].tolist() == shared, "full blocks are shared"
        in_tree = min(each.in_tree, num_full)
        self.rows[child] = Open(each.owner, list(tokens), num_full + partial, extra, in_tree, in_tree < num_full)
        self.watch_evictions()

    @rule(data=st.data())
    @precondition(lambda self: any(not each.pending for each in self.rows.values()))
    def close(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(row for row, each in self.rows.items() if not each.pending)))
        each = self.rows[row]
        least = min(each.in_tree * self.size, len(each.tokens))
        kept = data.draw(st.one_of(st.just(0), st.integers(least, len(each.tokens)), st.just(len(each.tokens))))
        self.kv.close(row, each.owner, ids(each.tokens[:kept]))
        self.let_in(each, tuple(each.tokens[:kept]))
        del self.rows[row]

    @rule(data=st.data())
    @precondition(lambda self: any(not each.pending for each in self.rows.values()))
    def distrust(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(row for row, each in self.rows.items() if not each.pending)))
        self.kv.discard(row, self.rows.pop(row).owner)
        self.complete = False

    @rule(data=st.data(), tokens=TOKENS, partition=st.sampled_from(("", "b")), with_room=st.booleans())
    def hold(self, data: st.DataObject, tokens: list[int], partition: str, with_room: bool) -> None:
        """Blocks that another engine reads, or fills."""
        known = [path for path in self.corpus.get(partition, ()) if path]
        continues: bool = data.draw(st.booleans())
        if known and continues:
            tokens = [*data.draw(st.sampled_from(sorted(known))), *tokens]
        self.num_served += 1
        held = self.kv.holds.hold(
            self.kv, BlockOwner(RequestId(self.num_served), partition, 0), ids(tokens), with_room=with_room
        )
        self.watch_evictions()
        if held is None:
            return
        num_blocks = len(tokens) // self.size
        assert not self.kv.has_moves and len(held.cached) + len(held.room) <= self.kv.pool.num_blocks // 2
        assert len(held.cached) + len(held.room) == num_blocks if with_room else not len(held.room)
        self.assert_holds(Tier.DEVICE, held.cached.tolist(), tuple(tokens[: len(held.cached) * self.size]), 0)
        for position in range(len(held.cached) * self.size, len(held.tokens) if with_room else 0):
            place = Place(Tier.DEVICE, BlockId(held.room.item(position // self.size - len(held.cached))))
            block = self.memory.setdefault(place, [None] * self.size)
            block[position % self.size] = tuple(tokens[: position + 1])

    @rule(data=st.data(), written=st.booleans())
    @precondition(lambda self: self.kv.holds.held)
    def end_hold(self, data: st.DataObject, written: bool) -> None:
        held = self.kv.holds.held[data.draw(st.sampled_from(sorted(self.kv.holds.held)))]
        self.kv.holds.release(self.kv, held.number, written=written)
        if written and len(held.room):
            self.corpus.setdefault(held.owner.partition, set()).add(tuple(held.tokens.tolist()))

    @rule()
    def reset(self) -> None:
        num_free = self.kv.pool.num_free
        self.kv.reset_cache()
        self.complete = False
        if not self.rows and not self.kv.holds.held:
            assert self.kv.pool.num_free == self.kv.pool.num_in_service >= num_free
            self.corpus.clear()
            self.complete = self.kv.tree is None or not self.kv.tree.num_evicted

    @rule(count=st.integers(1, 2))
    def shrink(self, count: int) -> None:
        expected = min(count, self.available())
        assert self.kv.shrink(count) == expected
        self.watch_evictions()

    @invariant()
    def agrees(self) -> None:
        kv = self.kv
        kv.audit()
        assert kv.num_available == self.available() >= 0
        for row in range(ROWS):
            each = self.rows.get(Row(row))
            assert kv.tables.lengths[row] == (0 if each is None else each.num_blocks)
            assert kv.tables.reserved[row] == (0 if each is None else each.reserved)
        assert kv.host is None or kv.host.num_blocks == kv.host.num_free + kv.host.num_evictable, (
            "host blocks have no reader"
        )

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.launch()
        for row, each in self.rows.items():
            self.kv.close(row, each.owner, ids(each.tokens))
        self.rows.clear()
        self.kv.holds.release_all(self.kv)
        self.launch()
        self.agrees()
        self.kv.reset_cache()
        assert self.kv.pool.num_free == self.kv.pool.num_in_service
        assert self.kv.host is None or self.kv.host.num_free == self.kv.host.num_blocks


TestManagerMachine = ManagerMachine.TestCase
