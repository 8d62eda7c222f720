"""Prefixes that went to the host tier and came back, by hand-computed examples."""

import numpy as np

from quire.core.moves import Move, Place, Tier
from quire.kv.eviction import CacheMiss, CacheMissKind
from tests.kv.radix_bench import OTHER, TreeBench, ids


def test_a_leaf_may_end_in_part_of_a_block() -> None:
    bench = TreeBench()
    inserted = bench.put(1, 2, 3, 4, 5, 6)
    assert inserted.num_adopted == 2 and bench.tree.contents("") == {(1, 2, 3, 4, 5, 6)}
    match = bench.tree.match("", ids(1, 2, 3, 4, 5, 6, 7, 8), 8)
    assert match.num_tokens == 4 and match.partial is not None and match.partial.num_tokens == 2
    assert match.partial.place == Place(Tier.DEVICE, inserted.node.blocks.item(1))
    assert bench.length(1, 2, 3, 4, 5, 9) == 5 and bench.length(1, 2, 3, 4) == 4


def test_demoted_tails_come_back() -> None:
    bench = TreeBench(num_host=8)
    bench.put(*range(10))
    moves = bench.evict(2, demote=True)
    match = bench.use(*range(12))
    assert match.num_tokens == 4 and len(match.host_blocks) == 1 and match.host_node is not None
    assert match.partial is not None and match.partial.place.tier is Tier.HOST and match.partial.num_tokens == 2
    assert [move.dst.block for move in moves] == [*match.host_blocks.tolist(), match.partial.place.block]
    assert all(move.src.tier is Tier.DEVICE and move.dst.tier is Tier.HOST for move in moves)
    bench.pool.share(match.blocks)
    new = bench.pool.take(1)
    generation = bench.tree.generation
    (move,) = bench.tree.promote(match.host_node, new)
    assert move == Move(Place(Tier.HOST, int(match.host_blocks[0])), Place(Tier.DEVICE, int(new[0])))
    assert bench.tree.generation > generation and bench.host.num_cached == 1
    bench.audit()
    assert bench.length(*range(12)) == 10
    bench.drop(np.concatenate([match.blocks, new]), match.host_node)
    bench.evict(2)
    assert bench.host.num_free == 8, "what is dropped takes its host part along"


def test_a_promotion_survives_a_split_of_its_nodes() -> None:
    bench = TreeBench(num_host=8)
    bench.put(*range(12))
    bench.evict(3, demote=True)
    match = bench.tree.match("", ids(*range(12)), 12)
    assert len(match.host_blocks) == 3 and match.host_node is not None and match.node.parent is None
    bench.use(*range(4))
    moves = bench.tree.promote(match.host_node, new := bench.pool.take(3))
    assert [move.src.block for move in moves] == match.host_blocks.tolist()
    bench.drop(new, match.host_node)
    assert bench.tree.match("", ids(*range(12)), 12).blocks.tolist() == new.tolist()


def test_a_computed_block_replaces_its_host_copy() -> None:
    bench = TreeBench(num_host=8)
    bench.put(*range(10))
    bench.evict(3, demote=True)
    inserted = bench.put(*range(10))
    assert inserted.num_adopted == 3 and not inserted.conflict and bench.host.num_free == 8


def test_part_of_a_block_does_not_replace_a_whole_one_on_the_host() -> None:
    bench = TreeBench(num_host=1)
    bench.put(1, 2, 3, 4)
    bench.evict(1, demote=True)
    assert bench.put(1, 2).num_adopted == 0 and bench.pool.num_cached == 0 and bench.length(1, 2, 3, 4) == 4


def test_the_tree_does_not_read_its_callers_tables() -> None:
    bench = TreeBench(num_host=2)
    blocks, inserted = bench.hold(ids(*range(8)))
    known = blocks.copy()
    bench.drop(blocks, inserted.node)
    blocks[:] = 0
    assert bench.tree.match("", ids(*range(8)), 8).blocks.tolist() == known.tolist()
    bench.evict(2, demote=True)
    new = bench.pool.take(2)
    bench.tree.promote(inserted.node, new)
    bench.pool.release(new)
    bench.tree.offer(inserted.node)
    new[:] = 0
    bench.audit()


def test_the_host_evicts_its_own_least_recently_used() -> None:
    bench = TreeBench(num_host=2)
    for token in (1, 2, 3):
        bench.put(*[token] * 4)
    bench.evict(2, demote=True)
    bench.use(1, 1, 1, 1)
    bench.evict(1, demote=True)
    assert bench.tree.contents("") == {(1, 1, 1, 1), (3, 3, 3, 3)} and bench.pool.num_cached == 0
    assert bench.tree.miss_reason("", ids(2, 2, 2, 2), 0) == CacheMiss(CacheMissKind.EVICTED, 0, OTHER)


def test_what_the_host_cannot_hold_is_dropped() -> None:
    bench = TreeBench(num_host=2)
    bench.put(*range(12))
    assert bench.evict(3, demote=True) == () and bench.tree.num_blocks == 0


def test_a_pinned_host_block_is_not_evicted() -> None:
    bench = TreeBench(num_host=1)
    bench.put(1, 1, 1, 1)
    bench.put(2, 2, 2, 2)
    bench.evict(1, demote=True)
    match = bench.tree.match("", ids(1, 1, 1, 1), 4)
    assert match.host_node is not None
    bench.host.share(match.host_blocks)
    assert bench.evict(1, demote=True) == ()
    assert bench.tree.contents("") == {(1, 1, 1, 1)}
    bench.host.release(match.host_blocks)
    bench.tree.offer(match.host_node)
    assert bench.tree.reset() == 1 and bench.host.num_free == 1
