"""The prefix tree by hand-computed examples. tests/kv/test_radix_machine.py holds it against an obvious model."""

import numpy as np
import pytest

from quire.core.moves import Place, Tier
from quire.core.request import BlockOwner
from quire.kv.eviction import CacheMiss, CacheMissKind, EvictionHistory
from quire.kv.radix_node import encode
from tests.kv.radix_bench import ME, MINE, OTHER, TreeBench, ids, snapshot


def test_an_empty_tree_matches_nothing() -> None:
    bench = TreeBench()
    match = bench.tree.match("", ids(1, 2, 3, 4, 5), 5)
    assert (match.num_tokens, len(match.blocks), match.partial, match.host_node) == (0, 0, None, None)
    bench.tree.offer(match.node)
    assert bench.tree.num_nodes == 0 and bench.evict(3) == ()


@pytest.mark.parametrize("offset", range(12))
def test_a_divergence_is_found_to_the_token(offset: int) -> None:
    bench = TreeBench()
    known = list(range(1, 13))
    blocks, inserted = bench.hold(ids(*known))
    query = [*known[:offset], 99, *known[offset + 1 :]]
    match = bench.tree.match("", ids(*query), 12)
    whole = offset // 4
    assert match.num_tokens == whole * 4 and match.blocks.tolist() == blocks[:whole].tolist()
    if offset % 4:
        assert match.partial is not None
        assert match.partial.place == Place(Tier.DEVICE, int(blocks[whole])) and match.partial.num_tokens == offset % 4
    else:
        assert match.partial is None
    assert bench.tree.touch(match).node.path() == encode(ids(*known[: whole * 4]))
    bench.drop(blocks, inserted.node)


@pytest.mark.parametrize("limit", range(13))
def test_a_match_obeys_its_limit(limit: int) -> None:
    bench = TreeBench()
    bench.put(*range(12))
    match = bench.tree.match("", ids(*range(12)), limit)
    assert match.num_tokens == limit // 4 * 4
    assert (match.partial.num_tokens if match.partial else 0) == limit % 4


@pytest.mark.parametrize("demoted", [0, 2, 4])
def test_match_does_not_change_the_tree(demoted: int) -> None:
    bench = TreeBench(num_host=8)
    bench.put(*range(14))
    bench.put(*range(4), 50, 51, 52)
    bench.evict(demoted, demote=True)
    before = snapshot(bench.tree)
    for query in ([*range(14)], [*range(6)], [*range(8), 99], [0, 1, 2, 3, 50, 51], [99], []):
        for limit in range(len(query) + 1):
            bench.tree.match("", ids(*query), limit)
            bench.tree.match("other", ids(*query), limit)
    assert snapshot(bench.tree) == before
    bench.audit()


def test_a_match_stays_valid_while_its_nodes_are_split_and_extended() -> None:
    bench = TreeBench()
    blocks = bench.pool.take(4)
    node = bench.tree.insert(bench.tree.root(""), ids(*range(12)), blocks[:3], MINE).node
    match = bench.tree.match("", ids(*range(8)), 8)
    generation = bench.tree.generation
    bench.use(0, 1, 2, 3)
    bench.use(*range(8), 99)
    assert bench.tree.generation == generation
    bench.tree.insert(node, ids(*range(12, 16)), blocks[3:], MINE)
    touched = bench.tree.touch(match)
    assert touched.node.path() == encode(ids(*range(8))) and touched.blocks.tolist() == blocks[:2].tolist()
    assert bench.tree.num_nodes == 3 and bench.tree.contents("") == {tuple(range(16))}
    bench.audit()


@pytest.mark.parametrize("demote", [False, True])
def test_a_match_of_evicted_blocks_is_refused(demote: bool) -> None:
    bench = TreeBench(num_host=4)
    bench.put(*range(8))
    match, generation = bench.tree.match("", ids(*range(8)), 8), bench.tree.generation
    bench.evict(1, demote)
    assert bench.tree.generation > generation
    with pytest.raises(AssertionError, match="stale match"):
        bench.tree.touch(match)


def test_byte_order_does_not_hide_the_nearest_child() -> None:
    bench = TreeBench(num_blocks=64)
    for token in range(0, 600, 15):
        bench.put(7, token, 1, 1)
    assert bench.length(7, 255, 1, 5) == 3 and bench.length(7, 256, 1, 1) == 1 and bench.length(8, 255, 1, 1) == 0
    assert bench.tree.num_nodes == 40


def test_an_owner_extends_its_own_leaf() -> None:
    """Two chunks, then an answer that ends in a partial block; another request's answer to the same is its own."""
    bench = TreeBench()
    blocks = bench.pool.take(4)
    for stop in (4, 12):
        node = bench.tree.insert(bench.tree.root(""), ids(*range(stop)), blocks[: stop // 4], MINE).node
    last = bench.tree.insert_leaving(node, ids(12, 13), blocks[3:], MINE).node
    assert bench.tree.num_nodes == 1 and last.blocks.tolist() == blocks.tolist()
    assert bench.length(*range(14)) == 14
    bench.drop(blocks, last)
    others = bench.pool.take(4)
    path, theirs = ids(*range(12), 77, 78), BlockOwner(OTHER, "", 0)
    bench.drop(others, bench.tree.insert_leaving(bench.tree.root(""), path, others, theirs).node)
    assert bench.tree.num_nodes == 3, "the common part, and what follows it for each"
    assert bench.tree.reset() == 5


def test_a_partial_leaf_is_replaced_by_its_continuation() -> None:
    bench = TreeBench()
    bench.put(1, 2, 3, 4, 5)
    bench.put(1, 2, 3, 4, 5, 6)
    assert bench.pool.num_cached == 2
    bench.put(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert bench.pool.num_cached == 3 and bench.tree.contents("") == {(1, 2, 3, 4, 5, 6, 7, 8, 9)}
    assert not bench.put(1, 2, 3, 4, 5, 6).num_adopted, "a tail that is covered is not adopted"


def test_a_partial_leaf_in_use_stays() -> None:
    bench = TreeBench()
    blocks, inserted = bench.hold(ids(5, 6))
    bench.put(5, 6, 7, 8)
    assert bench.tree.contents("") == {(5, 6), (5, 6, 7, 8)}
    bench.drop(blocks, inserted.node)
    assert bench.pool.num_evictable == 2
    bench.evict(2)
    assert bench.tree.num_blocks == 0


def test_a_tail_known_through_the_same_table_is_found_again() -> None:
    bench = TreeBench()
    blocks, inserted = bench.hold(ids(1, 2, 3, 4, 5))
    upper = bench.tree.end_at(inserted.node, Tier.DEVICE, blocks.item(0))
    again = bench.tree.insert_leaving(upper, ids(5), blocks[1:], MINE)
    assert again.node.tokens == encode(ids(5)) and again.node is inserted.node and not again.num_adopted
    bench.drop(blocks, again.node)
    bench.evict(2)


def test_a_split_keeps_the_handle_of_the_lower_part() -> None:
    bench = TreeBench()
    blocks, inserted = bench.hold(ids(*range(12)))
    upper = bench.use(0, 1, 2, 3, 50).node
    assert upper is not inserted.node and inserted.node.parent is upper
    assert inserted.node.blocks.tolist() == blocks[1:].tolist()
    bench.drop(blocks, inserted.node)
    bench.evict(3)
    assert bench.pool.num_free == 32


def test_a_conflict_keeps_both_copies() -> None:
    bench = TreeBench()
    mine, first = bench.hold(ids(*range(8)))
    theirs, second = bench.hold(ids(*range(8), 8, 9, 10, 11))
    assert (first.num_adopted, second.num_adopted) == (2, 1)
    assert bench.tree.match("", ids(*range(12)), 12).blocks.tolist() == [*mine.tolist(), int(theirs[2])]
    bench.pool.release(theirs)
    bench.tree.offer(second.node)
    bench.drop(mine, first.node)


def test_a_conflict_in_the_middle_of_a_node_ends_at_the_last_shared_block() -> None:
    """Siblings share two blocks, and each wrote the same tokens to a third of its own."""
    bench = TreeBench()
    mine, _ = bench.hold(ids(*range(12)))
    bench.pool.share(mine[:2])
    theirs = np.concatenate([mine[:2], bench.pool.take(1)])
    inserted = bench.tree.insert(bench.tree.root(""), ids(*range(12)), theirs, MINE)
    assert inserted.conflict and inserted.num_adopted == 0
    assert inserted.node.blocks.tolist() == mine[:2].tolist()
    bench.audit()


def test_a_table_that_stays_adopts_nothing_below_a_conflict() -> None:
    bench = TreeBench()
    bench.put(*range(4))
    blocks = bench.pool.take(2)
    inserted = bench.tree.insert(bench.tree.root(""), ids(*range(8)), blocks, MINE)
    assert inserted.conflict and inserted.num_adopted == 0 and inserted.node.parent is None
    bench.audit()


def test_a_table_inserts_as_it_goes() -> None:
    bench = TreeBench()
    blocks = bench.pool.take(3)
    node = bench.tree.root("")
    for i in range(3):
        inserted = bench.tree.insert(node, ids(*range(4 * i, 4 * i + 4)), blocks[i : i + 1], MINE)
        node = inserted.node
        assert inserted.num_adopted == 1 and not inserted.conflict
        bench.audit()
    bench.drop(blocks, node)
    bench.evict(3)


def test_eviction_takes_the_least_recently_used_leaf_from_its_tail() -> None:
    bench = TreeBench()
    bench.put(*range(8))
    bench.put(*range(20, 28))
    bench.use(*range(8))
    bench.evict(1)
    assert bench.tree.contents("") == {tuple(range(8)), (20, 21, 22, 23)}
    bench.evict(2)
    assert bench.tree.contents("") == {(0, 1, 2, 3)}
    assert bench.tree.num_evicted == 3


@pytest.mark.parametrize("demote", [False, True])
def test_a_parent_is_as_recent_as_the_child_it_lost(demote: bool) -> None:
    bench = TreeBench(num_host=1)
    bench.put(1, 1, 1, 1)
    bench.put(2, 2, 2, 2)
    bench.put(1, 1, 1, 1, 3, 3, 3, 3, priority=5)
    bench.evict(1, demote)
    bench.evict(1)
    assert bench.length(1, 1, 1, 1) == 4 and bench.length(2, 2, 2, 2) == 0


@pytest.mark.parametrize("demote", [False, True])
def test_a_parent_is_as_important_as_the_child_it_lost(demote: bool) -> None:
    bench = TreeBench(num_host=1)
    bench.put(1, 1, 1, 1, priority=5)
    bench.put(1, 1, 1, 1, 3, 3, 3, 3, priority=0)
    bench.evict(1, demote)
    bench.put(2, 2, 2, 2, priority=3)
    bench.evict(1)
    assert bench.length(1, 1, 1, 1) == 4 and bench.length(2, 2, 2, 2) == 0


def test_the_least_important_class_goes_first() -> None:
    bench = TreeBench()
    bench.put(1, 1, 1, 1, priority=5)
    bench.put(2, 2, 2, 2, priority=0)
    bench.put(3, 3, 3, 3, priority=5)
    bench.put(1, 1, 1, 1, priority=0)
    bench.evict(1)
    assert bench.tree.contents("") == {(1, 1, 1, 1), (2, 2, 2, 2)}
    bench.evict(1)
    assert bench.tree.contents("") == {(1, 1, 1, 1)}


def test_held_blocks_are_never_evicted() -> None:
    bench = TreeBench()
    blocks, inserted = bench.hold(ids(*range(8)))
    bench.put(*range(12))
    bench.evict(32)
    assert bench.tree.contents("") == {tuple(range(8))}
    bench.pool.release(blocks[1:])
    bench.tree.offer(inserted.node)
    bench.evict(32)
    assert bench.tree.contents("") == {(0, 1, 2, 3)}, "of a node half held the tail can go"
    bench.drop(blocks[:1], inserted.node)
    bench.evict(1)
    assert bench.pool.num_free == 32


def test_a_batch_rounds_up_within_a_leaf() -> None:
    bench = TreeBench()
    bench.put(*range(40))
    bench.put(*range(50, 54))
    assert bench.tree.evict(1, 0, None, batch=4).num_blocks == 4
    assert bench.tree.evict(7, 0, None, batch=4).num_blocks == 7, "six were left of the leaf, one of the other"


@pytest.mark.parametrize("demote", [False, True])
def test_a_removed_node_still_leads_to_its_parent(demote: bool) -> None:
    bench = TreeBench(num_host=1)
    blocks, upper = bench.hold(ids(1, 1, 1, 1))
    lower_block = bench.pool.take(1)
    lower = bench.tree.insert_leaving(upper.node, ids(2, 2, 2, 2), lower_block, MINE)
    bench.pool.release(lower_block)
    bench.tree.offer(lower.node)
    bench.evict(1, demote)
    bench.drop(blocks, lower.node)
    bench.evict(1)
    assert upper.node.parent is not None and bench.pool.num_free == 32


def test_partitions_never_share() -> None:
    bench = TreeBench()
    bench.put(*range(8), partition="a")
    bench.put(*range(8), partition="b")
    assert bench.pool.num_cached == 4 and bench.length(*range(8), partition="c") == 0
    assert bench.length(0, 1, 2, 99, partition="c") == 0


def test_a_miss_has_a_reason() -> None:
    bench = TreeBench()
    bench.put(*range(12), partition="a")
    query = ids(*range(12))
    assert bench.tree.miss_reason("b", query, 0) == CacheMiss(CacheMissKind.OTHER_PARTITION)
    assert bench.tree.miss_reason("b", ids(*range(4), 9, 9, 9, 9), 4) == CacheMiss(CacheMissKind.NEVER_SEEN)
    assert bench.tree.miss_reason("a", ids(*range(14)), 12) is None
    bench.evict(2, step=7)
    assert bench.tree.miss_reason("a", query, 4) == CacheMiss(CacheMissKind.EVICTED, 7, OTHER)
    assert bench.tree.miss_reason("b", query, 4) == CacheMiss(CacheMissKind.NEVER_SEEN)
    assert bench.tree.miss_reason("b", query, 0) == CacheMiss(CacheMissKind.OTHER_PARTITION)


def test_only_some_partitions_are_compared() -> None:
    bench = TreeBench()
    for name in "abcdefgh":
        bench.put(*range(4), partition=name)
    bench.put(*range(8), partition="i")
    assert bench.tree.miss_reason("z", ids(*range(8)), 4) == CacheMiss(CacheMissKind.NEVER_SEEN)
    assert bench.tree.miss_reason("a", ids(*range(8)), 4) == CacheMiss(CacheMissKind.OTHER_PARTITION)


def test_the_eviction_history_is_bounded() -> None:
    history = EvictionHistory(capacity=2)
    for step, path in enumerate((b"a", b"b", b"a", b"c")):
        history.remember("", path, CacheMiss(CacheMissKind.EVICTED, step))
    assert len(history) == 2 and history.find("", b"b") is None
    assert history.find("", b"a") == CacheMiss(CacheMissKind.EVICTED, 2, None)
    assert history.find("a", b"") is None, "partition and path are separate"


def test_reset_drops_all_evictable_blocks() -> None:
    bench = TreeBench(num_host=4)
    evicted = ids(*range(40, 44))
    bench.put(*range(40, 44))
    bench.evict(1)
    miss = bench.tree.miss_reason("", evicted, 0)
    assert miss is not None and miss.kind is CacheMissKind.EVICTED
    bench.put(*range(8))
    bench.evict(1, demote=True)
    bench.put(*range(20, 28))
    blocks, inserted = bench.hold(ids(1, 1, 1, 1))
    assert bench.tree.reset() == 4
    assert bench.tree.contents("") == {(1, 1, 1, 1)}
    for forgotten in (ids(*range(8)), evicted):
        assert bench.tree.miss_reason("", forgotten, 0) == CacheMiss(CacheMissKind.NEVER_SEEN)
    bench.drop(blocks, inserted.node)
    assert bench.tree.reset() == 1 and bench.tree.num_nodes == 0


def test_the_generation_changes_when_a_match_is_stale() -> None:
    bench = TreeBench()
    seen = {bench.tree.generation}
    bench.put(*range(8))
    seen.add(bench.tree.generation)
    bench.use(0, 1, 2, 3)
    bench.put(*range(8))
    assert bench.tree.generation in seen, "nothing new was inserted"
    bench.evict(1)
    seen.add(bench.tree.generation)
    assert len(seen) == 3


def test_many_touches_do_not_grow_the_heap() -> None:
    bench = TreeBench(block_size=1, num_blocks=8)
    for turn in range(300):
        bench.tree.evict(1, turn, None) if not bench.pool.num_free else None
        bench.put(turn)
        bench.use(turn)
    assert bench.tree.contents("") == {(turn,) for turn in range(292, 300)}


def test_drop_removes_what_one_owner_wrote_and_nothing_else() -> None:
    """The path of 12 is in three nodes: others diverged from it after 4 and after 8, and were evicted."""
    bench = TreeBench()
    known = tuple(range(1, 13))
    blocks, inserted = bench.hold(ids(*known))
    for shared in (4, 8):
        assert bench.use(*known[:shared], 99).num_tokens == shared
    bench.drop(blocks, inserted.node)
    assert bench.tree.num_nodes >= 3
    bench.tree.drop(inserted.node, OTHER)
    assert bench.length(*known) == 12, "another owner"
    generation = bench.tree.generation
    bench.tree.drop(inserted.node, ME)
    bench.audit()
    assert bench.length(*known) == 0 and bench.pool.num_free == 32
    assert bench.tree.generation > generation


def test_a_leaf_held_during_a_purge_of_the_queue_is_evicted_later() -> None:
    bench = TreeBench(num_blocks=200)
    leaf = bench.put(1, 2, 3, 4).node
    bench.pool.share(leaf.blocks)
    for token in range(10, 110):
        bench.put(token, 2, 3, 4)
    bench.drop(leaf.blocks, leaf)
    bench.evict(101)
    assert bench.pool.num_free == 200


def test_an_outline_is_the_most_used_part() -> None:
    bench = TreeBench()
    for first in range(0, 60, 20):
        bench.put(*range(first, first + 8))
    bench.put(*range(20, 24), 97, 98, 99, 100)
    for _ in range(2):
        bench.tree.touch(bench.tree.match("", ids(*range(20, 28)), 8), hit=True)
    bench.tree.touch(bench.tree.match("", ids(*range(40, 48)), 8), hit=True)
    bench.tree.touch(bench.tree.match("", ids(*range(8)), 8))
    whole = bench.tree.outline(100, 100)
    assert len(whole) == bench.tree.num_nodes and sum(node.num_blocks for node in whole) == bench.tree.num_blocks
    assert (whole[0].parent, whole[0].num_blocks, whole[0].num_hits) == (-1, 2, 1), "only the end of a match counts"
    assert sorted(node.num_hits for node in whole) == [0, 0, 0, 1, 2]
    assert bench.tree.outline(2, 100) == whole[:2] and len(bench.tree.outline(100, 3)) == 3
    assert bench.tree.outline(0, 100) == bench.tree.outline(100, 0) == []
