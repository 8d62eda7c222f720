"""The prefix tree against an obvious model: a dict from every known path to its block, searched by brute force."""

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.ids import IntArray, RequestId
from quire.core.moves import Tier
from quire.core.request import BlockOwner
from quire.kv.block_pool import BlockPool
from quire.kv.eviction import CacheMissKind
from quire.kv.radix_node import Node
from quire.kv.radix_tree import PrefixMatch, RadixTree
from tests.kv.radix_bench import snapshot

Path = tuple[int, ...]
ME = RequestId(1)


@dataclass
class Known:
    """One block of the model's tree."""

    tier: Tier
    block: int
    priority: int
    last_use: int = 0


class Model:
    """Per partition, each path that ends with a block, whole or partial. A use is noted at the end of its path."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.paths: dict[str, dict[Path, Known]] = {"a": {}, "b": {}}
        self.clock = 0

    def touch(self, partition: str, path: Path) -> None:
        self.clock += 1
        if path:
            self.paths[partition][path].last_use = self.clock

    def longest(self, partition: str, query: Path) -> int:
        return max((common(path, query) for path in self.paths[partition]), default=0)

    def whole(self, partition: str, query: Path, tier: Tier) -> list[int]:
        """Blocks of a tier that hold whole blocks of the query."""
        ends = range(self.block_size, len(query) + 1, self.block_size)
        known = [self.paths[partition].get(query[:end]) for end in ends]
        return [each.block for each in known if each is not None and each.tier is tier]

    def parent(self, path: Path) -> Path:
        return path[: (len(path) - 1) // self.block_size * self.block_size]

    def remove(self, partition: str, path: Path) -> None:
        paths = self.paths[partition]
        gone = paths[path]
        for below in [
            other for other in paths if other != path and other[: len(path)] == path and self.hangs(other, path)
        ]:
            del paths[below]
        del paths[path]
        self.inherit(partition, path, gone)

    def inherit(self, partition: str, path: Path, gone: Known) -> None:
        above = self.paths[partition].get(self.parent(path))
        if above is not None:
            above.last_use = max(above.last_use, gone.last_use)
            above.priority = min(above.priority, gone.priority)

    def hangs(self, path: Path, above: Path) -> bool:
        """Whether a path goes through another: a partial block has nothing below it."""
        return len(above) % self.block_size == 0 and len(path) > len(above) and path[: len(above)] == above

    def victim(self, tier: Tier, held: dict[int, int]) -> tuple[str, Path] | None:
        """The evictable leaf of the lowest class that was used least recently."""
        best: tuple[tuple[int, int], str, Path] | None = None
        for partition, paths in self.paths.items():
            for path, known in paths.items():
                below = [other for name, other in paths.items() if self.hangs(name, path)]
                if known.tier is not tier or held.get(known.block):
                    continue
                if any(other.tier is tier for other in below):
                    continue
                key = (-known.priority, known.last_use)
                if best is None or key < best[0]:
                    best = (key, partition, path)
        return best[1:] if best is not None else None

    def insert(
        self, partition: str, path: Path, blocks: list[int], priority: int, leaving: bool, evictable: set[int]
    ) -> Path:
        """Where the path now ends."""
        paths = self.paths[partition]
        size, end = self.block_size, ()
        for index, block in enumerate(blocks):
            prefix = path[: (index + 1) * size]
            known = paths.get(prefix)
            partial = len(prefix) % size != 0
            if partial and known is None and self.longest(partition, prefix) == len(prefix):
                break
            if known is None:
                for length in range(index * size + 1, len(prefix)):
                    shorter = paths.get(prefix[:length])
                    if shorter is not None and (shorter.tier is Tier.HOST or shorter.block in evictable):
                        self.remove(partition, prefix[:length])
                paths[prefix] = Known(Tier.DEVICE, block, priority)
            elif known.tier is Tier.HOST:
                known.tier, known.block = Tier.DEVICE, block
            elif known.block != block and not leaving and not partial:
                break
            end = prefix
        self.touch(partition, end)
        if end:
            paths[end].priority = min(paths[end].priority, priority)
        return end


def common(left: Path, right: Path) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def array(path: Path) -> IntArray:
    return np.array(path, dtype=np.int32)


@dataclass
class Table:
    partition: str
    tokens: Path
    blocks: IntArray
    node: Node
    num_known: int  # tokens in the tree through this table
    stuck: bool = False  # it met a conflict: it inserts again only as it leaves
    sealed: bool = False  # its last block is in the tree as a partial one, or is no longer its own: it inserts no more


partitions = st.sampled_from("ab")
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)


class RadixMachine(RuleBasedStateMachine):
    @initialize(block_size=st.integers(1, 4), num_blocks=st.integers(3, 14), num_host=st.integers(0, 5))
    def start(self, block_size: int, num_blocks: int, num_host: int) -> None:
        self.size = block_size
        self.pool, self.host = BlockPool(num_blocks), BlockPool(num_host)
        self.tree = RadixTree(block_size, self.pool, self.host)
        self.model = Model(block_size)
        self.tables: list[Table] = []
        self.earlier: tuple[int, str, Path, PrefixMatch] | None = None  # a match, and the generation it was made in

    def held(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for table in self.tables:
            for block in table.blocks.tolist():
                counts[block] = counts.get(block, 0) + 1
        return counts

    def evictable_blocks(self) -> set[int]:
        held = self.held()
        device = [k.block for paths in self.model.paths.values() for k in paths.values() if k.tier is Tier.DEVICE]
        return {block for block in device if not held.get(block)}

    def checked_match(self, partition: str, query: Path) -> PrefixMatch:
        before = snapshot(self.tree)
        match = self.tree.match(partition, array(query), len(query))
        assert snapshot(self.tree) == before
        model = self.model
        assert match.blocks.tolist() == model.whole(partition, query, Tier.DEVICE)
        assert match.host_blocks.tolist() == model.whole(partition, query, Tier.HOST)
        num_whole = match.num_tokens + len(match.host_blocks) * self.size
        num_partial = match.partial.num_tokens if match.partial is not None else 0
        assert num_whole + num_partial == model.longest(partition, query)
        if match.partial is not None:
            sources = [
                known
                for path, known in model.paths[partition].items()
                if len(path) > num_whole >= len(model.parent(path)) and common(path, query) == num_whole + num_partial
            ]
            assert any((k.tier, k.block) == (match.partial.place.tier, match.partial.place.block) for k in sources)
        return match

    def touch(self, partition: str, query: Path, match: PrefixMatch) -> PrefixMatch:
        match = self.tree.touch(match)
        self.model.touch(partition, query[: match.num_tokens])
        if match.host_node is not None:
            self.model.touch(partition, query[: match.num_tokens + len(match.host_blocks) * self.size])
        return match

    def evict_one(self, demote: bool) -> None:
        victim = self.model.victim(Tier.DEVICE, self.held())
        evicted = self.tree.evict(1, 0, ME, lambda node, count: demote)
        assert evicted.num_blocks == (victim is not None)
        if victim is None:
            return
        partition, path = victim
        if not demote or not self.host.num_blocks:
            assert not evicted.moves
            self.model.remove(partition, path)
            return
        (move,) = evicted.moves
        num_host = sum(k.tier is Tier.HOST for paths in self.model.paths.values() for k in paths.values())
        if num_host == self.host.num_blocks:
            oldest = self.model.victim(Tier.HOST, {})
            assert oldest is not None
            self.model.remove(*oldest)
        known = self.model.paths[partition][path]
        assert move.src.block == known.block
        known.tier, known.block = Tier.HOST, move.dst.block
        self.model.inherit(partition, path, known)

    @rule(partition=partitions, query=tokens_strategy)
    def look(self, partition: str, query: Path) -> None:
        match = self.checked_match(partition, query)
        self.earlier = self.tree.generation, partition, query, match
        known = self.model.longest(partition, query) // self.size * self.size
        miss = self.tree.miss_reason(partition, array(query), known)
        assert (miss is None) == (known + self.size > len(query))
        if miss is not None and miss.kind is not CacheMissKind.EVICTED:
            other = "b" if partition == "a" else "a"
            elsewhere = query[: known + self.size] in self.model.paths[other]
            assert (miss.kind is CacheMissKind.OTHER_PARTITION) == elsewhere

    @rule(partition=partitions, query=tokens_strategy)
    def use(self, partition: str, query: Path) -> None:
        self.touch(partition, query, self.checked_match(partition, query))

    @rule(partition=partitions, query=tokens_strategy, demote=st.booleans())
    def open_row(self, partition: str, query: Path, demote: bool) -> None:
        self.open(partition, query, demote, self.checked_match(partition, query))

    @precondition(lambda self: self.earlier is not None and self.earlier[0] == self.tree.generation)
    @rule(demote=st.booleans())
    def open_late(self, demote: bool) -> None:
        """A match is good for as long as the generation stays."""
        assert self.earlier is not None
        _, partition, query, match = self.earlier
        self.open(partition, query, demote, match)

    def open(self, partition: str, query: Path, demote: bool, match: PrefixMatch) -> None:
        match = self.touch(partition, query, match)
        self.pool.share(match.blocks)
        self.tables.append(table := Table(partition, query, match.blocks, match.node, match.num_tokens))
        self.host.share(match.host_blocks)
        num_new = -(-len(query) // self.size) - len(match.blocks)
        while self.pool.num_free < num_new and self.pool.num_evictable:
            self.evict_one(demote and not len(match.host_blocks))
        if self.pool.num_free >= num_new:
            new = self.pool.take(num_new)
            if match.host_node is not None:
                num_promoted = len(match.host_blocks)
                self.tree.promote(match.host_node, new[:num_promoted])
                for index in range(num_promoted):
                    table.num_known += self.size
                    known = self.model.paths[partition][query[: table.num_known]]
                    known.tier, known.block = Tier.DEVICE, int(new[index])
                self.model.touch(partition, query[: table.num_known])
                table.node = match.host_node
            table.blocks = np.concatenate([table.blocks, new])
            self.host.release(match.host_blocks)
        else:
            self.host.release(match.host_blocks)
            self.leave_table(table)
        if match.host_node is not None:
            self.tree.offer(match.host_node)

    def leave_table(self, table: Table) -> None:
        self.tables = [other for other in self.tables if other is not table]
        self.pool.release(table.blocks)
        self.tree.offer(table.node)

    def insert(self, table: Table, length: int, priority: int, leaving: bool) -> None:
        num_blocks = -(-length // self.size)
        path, blocks = table.tokens[:length], table.blocks[:num_blocks]
        start = min(table.num_known, length // self.size * self.size)
        end = self.model.insert(table.partition, path, blocks.tolist(), priority, leaving, self.evictable_blocks())
        node, num_known = self.tree.root(table.partition), start // self.size
        if num_known:
            node = self.tree.end_at(table.node, Tier.DEVICE, blocks.item(num_known - 1))
        insert = self.tree.insert_leaving if leaving else self.tree.insert
        inserted = insert(node, array(path[start:]), blocks[num_known:], BlockOwner(ME, table.partition, priority))
        if len(end) >= table.num_known:
            table.node = inserted.node
        table.stuck = table.stuck or inserted.conflict
        table.sealed = table.sealed or length % self.size != 0
        if not inserted.conflict:
            table.num_known = max(table.num_known, length // self.size * self.size)

    @precondition(lambda self: any(not table.stuck and not table.sealed for table in self.tables))
    @rule(data=st.data(), priority=st.integers(0, 2))
    def commit(self, data: st.DataObject, priority: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if not table.stuck and not table.sealed]))
        self.insert(table, data.draw(st.integers(1, len(table.tokens))), priority, leaving=False)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), priority=st.integers(0, 2))
    def finish(self, data: st.DataObject, priority: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if not table.sealed:
            self.insert(table, data.draw(st.integers(1, len(table.tokens))), priority, leaving=True)
        self.leave_table(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def drop_tail(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        keep = data.draw(st.integers(0, len(table.blocks)))
        kept, gone = table.blocks[:keep], table.blocks[keep:]
        table.blocks, table.tokens = kept, table.tokens[: keep * self.size]
        table.num_known = min(table.num_known, len(table.tokens))
        table.sealed = True
        self.pool.release(gone)
        self.tree.offer(table.node)
        if not keep:
            self.leave_table(table)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        held = self.held()
        evicted = self.tree.evict(count, 0, None)
        for _ in range(evicted.num_blocks):
            victim = self.model.victim(Tier.DEVICE, held)
            assert victim is not None
            self.model.remove(*victim)
        assert evicted.num_blocks == count or self.model.victim(Tier.DEVICE, held) is None

    @rule()
    def demote(self) -> None:
        self.evict_one(demote=True)

    @rule()
    def reset(self) -> None:
        self.tree.reset()
        while (victim := self.model.victim(Tier.HOST, {})) is not None:
            self.model.remove(*victim)
        while (victim := self.model.victim(Tier.DEVICE, self.held())) is not None:
            self.model.remove(*victim)

    @invariant()
    def sound(self) -> None:
        self.tree.audit()
        self.pool.audit()
        self.host.audit()
        held = self.held()
        cached = {k.block for paths in self.model.paths.values() for k in paths.values() if k.tier is Tier.DEVICE}
        for block in range(1, self.pool.num_blocks + 1):
            assert self.pool.references(block) == held.get(block, 0) + (block in cached)
        for partition, paths in self.model.paths.items():
            leaves = {path for path in paths if not any(self.model.hangs(other, path) for other in paths)}
            assert self.tree.contents(partition) == leaves


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
