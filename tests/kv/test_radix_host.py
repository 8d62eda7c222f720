"""Prefixes that went to the host tier and came back, by hand-computed examples."""

import numpy as np

from quire.core.moves import Move, Place, Tier
from quire.kv.eviction import CacheMiss, CacheMissKind
from tests.kv.radix_bench import OTHER, Desk, ids


def test_a_leaf_may_end_in_part_of_a_block() -> None:
    desk = Desk()
    inserted = desk.put(1, 2, 3, 4, 5, 6)
    assert inserted.num_adopted == 2 and desk.tree.contents("") == {(1, 2, 3, 4, 5, 6)}
    match = desk.tree.match("", ids(1, 2, 3, 4, 5, 6, 7, 8), 8)
    assert match.num_tokens == 4 and match.partial is not None and match.partial.num_tokens == 2
    assert match.partial.place == Place(Tier.DEVICE, inserted.node.blocks.item(1))
    assert desk.length(1, 2, 3, 4, 5, 9) == 5 and desk.length(1, 2, 3, 4) == 4


def test_demoted_tails_come_back() -> None:
    desk = Desk(num_host=8)
    desk.put(*range(10))
    moves = desk.evict(2, demote=True)
    match = desk.use(*range(12))
    assert match.num_tokens == 4 and len(match.host_blocks) == 1 and match.host_node is not None
    assert match.partial is not None and match.partial.place.tier is Tier.HOST and match.partial.num_tokens == 2
    assert [move.dst.block for move in moves] == [*match.host_blocks.tolist(), match.partial.place.block]
    assert all(move.src.tier is Tier.DEVICE and move.dst.tier is Tier.HOST for move in moves)
    desk.pool.share(match.blocks)
    new = desk.pool.take(1)
    generation = desk.tree.generation
    (move,) = desk.tree.promote(match.host_node, new)
    assert move == Move(Place(Tier.HOST, int(match.host_blocks[0])), Place(Tier.DEVICE, int(new[0])))
    assert desk.tree.generation > generation and desk.host.num_cached == 1
    desk.audit()
    assert desk.length(*range(12)) == 10
    desk.drop(np.concatenate([match.blocks, new]), match.host_node)
    desk.evict(2)
    assert desk.host.num_free == 8, "what is dropped takes its host part along"


def test_a_promotion_survives_a_split_of_its_nodes() -> None:
    desk = Desk(num_host=8)
    desk.put(*range(12))
    desk.evict(3, demote=True)
    match = desk.tree.match("", ids(*range(12)), 12)
    assert len(match.host_blocks) == 3 and match.host_node is not None and match.node.parent is None
    desk.use(*range(4))
    moves = desk.tree.promote(match.host_node, new := desk.pool.take(3))
    assert [move.src.block for move in moves] == match.host_blocks.tolist()
    desk.drop(new, match.host_node)
    assert desk.tree.match("", ids(*range(12)), 12).blocks.tolist() == new.tolist()


def test_a_computed_block_replaces_its_host_copy() -> None:
    desk = Desk(num_host=8)
    desk.put(*range(10))
    desk.evict(3, demote=True)
    inserted = desk.put(*range(10))
    assert inserted.num_adopted == 3 and not inserted.conflict and desk.host.num_free == 8


def test_part_of_a_block_does_not_replace_a_whole_one_on_the_host() -> None:
    desk = Desk(num_host=1)
    desk.put(1, 2, 3, 4)
    desk.evict(1, demote=True)
    assert desk.put(1, 2).num_adopted == 0 and desk.pool.num_cached == 0 and desk.length(1, 2, 3, 4) == 4


def test_the_tree_does_not_read_its_callers_tables() -> None:
    desk = Desk(num_host=2)
    blocks, inserted = desk.hold(ids(*range(8)))
    known = blocks.copy()
    desk.drop(blocks, inserted.node)
    blocks[:] = 0
    assert desk.tree.match("", ids(*range(8)), 8).blocks.tolist() == known.tolist()
    desk.evict(2, demote=True)
    new = desk.pool.take(2)
    desk.tree.promote(inserted.node, new)
    desk.pool.release(new)
    desk.tree.offer(inserted.node)
    new[:] = 0
    desk.audit()


def test_the_host_evicts_its_own_least_recently_used() -> None:
    desk = Desk(num_host=2)
    for token in (1, 2, 3):
        desk.put(*[token] * 4)
    desk.evict(2, demote=True)
    desk.use(1, 1, 1, 1)
    desk.evict(1, demote=True)
    assert desk.tree.contents("") == {(1, 1, 1, 1), (3, 3, 3, 3)} and desk.pool.num_cached == 0
    assert desk.tree.miss_reason("", ids(2, 2, 2, 2), 0) == CacheMiss(CacheMissKind.EVICTED, 0, OTHER)


def test_what_the_host_cannot_hold_is_dropped() -> None:
    desk = Desk(num_host=2)
    desk.put(*range(12))
    assert desk.evict(3, demote=True) == () and desk.tree.num_blocks == 0


def test_a_pinned_host_block_is_not_evicted() -> None:
    desk = Desk(num_host=1)
    desk.put(1, 1, 1, 1)
    desk.put(2, 2, 2, 2)
    desk.evict(1, demote=True)
    match = desk.tree.match("", ids(1, 1, 1, 1), 4)
    assert match.host_node is not None
    desk.host.share(match.host_blocks)
    assert desk.evict(1, demote=True) == ()
    assert desk.tree.contents("") == {(1, 1, 1, 1)}
    desk.host.release(match.host_blocks)
    desk.tree.offer(match.host_node)
    assert desk.tree.reset() == 1 and desk.host.num_free == 1
