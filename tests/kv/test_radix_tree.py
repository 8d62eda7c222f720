"""The prefix tree by hand-computed examples. tests/kv/test_radix_machine.py holds it against an obvious model."""

import pytest

from quire.core.moves import Place, Tier
from quire.core.request import BlockOwner
from quire.kv.eviction import CacheMiss, CacheMissKind, EvictionHistory
from quire.kv.radix_node import encode
from tests.kv.radix_bench import ME, MINE, OTHER, Desk, ids, snapshot


def test_an_empty_tree_knows_nothing() -> None:
    desk = Desk()
    match = desk.tree.match("", ids(1, 2, 3, 4, 5), 5)
    assert (match.num_tokens, len(match.blocks), match.partial, match.host_node) == (0, 0, None, None)
    desk.tree.offer(match.node)
    assert desk.tree.num_nodes == 0 and desk.evict(3) == ()


@pytest.mark.parametrize("offset", range(12))
def test_a_divergence_is_found_to_the_token(offset: int) -> None:
    desk = Desk()
    known = list(range(1, 13))
    blocks, inserted = desk.hold(ids(*known))
    query = [*known[:offset], 99, *known[offset + 1 :]]
    match = desk.tree.match("", ids(*query), 12)
    whole = offset // 4
    assert match.num_tokens == whole * 4 and match.blocks.tolist() == blocks[:whole].tolist()
    if offset % 4:
        assert match.partial is not None
        assert match.partial.place == Place(Tier.DEVICE, int(blocks[whole])) and match.partial.num_tokens == offset % 4
    else:
        assert match.partial is None
    assert desk.tree.touch(match).node.path() == encode(ids(*known[: whole * 4]))
    desk.drop(blocks, inserted.node)


@pytest.mark.parametrize("limit", range(13))
def test_a_match_obeys_its_limit(limit: int) -> None:
    desk = Desk()
    desk.put(*range(12))
    match = desk.tree.match("", ids(*range(12)), limit)
    assert match.num_tokens == limit // 4 * 4
    assert (match.partial.num_tokens if match.partial else 0) == limit % 4


@pytest.mark.parametrize("demoted", [0, 2, 4])
def test_match_leaves_the_tree_unchanged(demoted: int) -> None:
    desk = Desk(num_host=8)
    desk.put(*range(14))
    desk.put(*range(4), 50, 51, 52)
    desk.evict(demoted, demote=True)
    before = snapshot(desk.tree)
    for query in ([*range(14)], [*range(6)], [*range(8), 99], [0, 1, 2, 3, 50, 51], [99], []):
        for limit in range(len(query) + 1):
            desk.tree.match("", ids(*query), limit)
            desk.tree.match("other", ids(*query), limit)
    assert snapshot(desk.tree) == before
    desk.audit()


def test_a_match_stays_valid_while_its_nodes_are_split_and_extended() -> None:
    desk = Desk()
    blocks = desk.pool.take(4)
    node = desk.tree.insert(desk.tree.root(""), ids(*range(12)), blocks[:3], MINE).node
    match = desk.tree.match("", ids(*range(8)), 8)
    generation = desk.tree.generation
    desk.use(0, 1, 2, 3)
    desk.use(*range(8), 99)
    assert desk.tree.generation == generation
    desk.tree.insert(node, ids(*range(12, 16)), blocks[3:], MINE)
    touched = desk.tree.touch(match)
    assert touched.node.path() == encode(ids(*range(8))) and touched.blocks.tolist() == blocks[:2].tolist()
    assert desk.tree.num_nodes == 3 and desk.tree.contents("") == {tuple(range(16))}
    desk.audit()


@pytest.mark.parametrize("demote", [False, True])
def test_a_match_of_evicted_blocks_is_refused(demote: bool) -> None:
    desk = Desk(num_host=4)
    desk.put(*range(8))
    match, generation = desk.tree.match("", ids(*range(8)), 8), desk.tree.generation
    desk.evict(1, demote)
    assert desk.tree.generation > generation
    with pytest.raises(AssertionError, match="stale match"):
        desk.tree.touch(match)


def test_byte_order_does_not_hide_the_nearest_child() -> None:
    desk = Desk(num_blocks=64)
    for token in range(0, 600, 15):
        desk.put(7, token, 1, 1)
    assert desk.length(7, 255, 1, 5) == 3 and desk.length(7, 256, 1, 1) == 1 and desk.length(8, 255, 1, 1) == 0
    assert desk.tree.num_nodes == 40


def test_what_one_owner_goes_on_writing_is_one_node() -> None:
    """Two chunks, then an answer that ends in a partial block; another request's answer to the same is its own."""
    desk = Desk()
    blocks = desk.pool.take(4)
    for stop in (4, 12):
        node = desk.tree.insert(desk.tree.root(""), ids(*range(stop)), blocks[: stop // 4], MINE).node
    last = desk.tree.insert_leaving(node, ids(12, 13), blocks[3:], MINE).node
    assert desk.tree.num_nodes == 1 and last.blocks.tolist() == blocks.tolist()
    assert desk.length(*range(14)) == 14
    desk.drop(blocks, last)
    others = desk.pool.take(4)
    path, theirs = ids(*range(12), 77, 78), BlockOwner(OTHER, "", 0)
    desk.drop(others, desk.tree.insert_leaving(desk.tree.root(""), path, others, theirs).node)
    assert desk.tree.num_nodes == 3, "the common part, and what follows it for each"
    assert desk.tree.reset() == 5


def test_a_partial_leaf_gives_way_to_what_continues_it() -> None:
    desk = Desk()
    desk.put(1, 2, 3, 4, 5)
    desk.put(1, 2, 3, 4, 5, 6)
    assert desk.pool.num_cached == 2
    desk.put(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert desk.pool.num_cached == 3 and desk.tree.contents("") == {(1, 2, 3, 4, 5, 6, 7, 8, 9)}
    assert not desk.put(1, 2, 3, 4, 5, 6).num_adopted, "a tail that is covered is not adopted"


def test_a_partial_leaf_in_use_stays() -> None:
    desk = Desk()
    blocks, inserted = desk.hold(ids(5, 6))
    desk.put(5, 6, 7, 8)
    assert desk.tree.contents("") == {(5, 6), (5, 6, 7, 8)}
    desk.drop(blocks, inserted.node)
    assert desk.pool.num_evictable == 2
    desk.evict(2)
    assert desk.tree.num_blocks == 0


def test_a_tail_known_through_the_same_table_is_found_again() -> None:
    desk = Desk()
    blocks, inserted = desk.hold(ids(1, 2, 3, 4, 5))
    upper = desk.tree.end_at(inserted.node, Tier.DEVICE, blocks.item(0))
    again = desk.tree.insert_leaving(upper, ids(5), blocks[1:], MINE)
    assert again.node.tokens == encode(ids(5)) and again.node is inserted.node and not again.num_adopted
    desk.drop(blocks, again.node)
    desk.evict(2)


def test_a_split_keeps_the_handle_of_the_lower_part() -> None:
    desk = Desk()
    blocks, inserted = desk.hold(ids(*range(12)))
    upper = desk.use(0, 1, 2, 3, 50).node
    assert upper is not inserted.node and inserted.node.parent is upper
    assert inserted.node.blocks.tolist() == blocks[1:].tolist()
    desk.drop(blocks, inserted.node)
    desk.evict(3)
    assert desk.pool.num_free == 32


def test_a_conflict_keeps_both_copies() -> None:
    desk = Desk()
    mine, first = desk.hold(ids(*range(8)))
    theirs, second = desk.hold(ids(*range(8), 8, 9, 10, 11))
    assert (first.num_adopted, second.num_adopted) == (2, 1)
    assert desk.tree.match("", ids(*range(12)), 12).blocks.tolist() == [*mine.tolist(), int(theirs[2])]
    desk.pool.release(theirs)
    desk.tree.offer(second.node)
    desk.drop(mine, first.node)


def test_who_stays_adopts_nothing_below_a_conflict() -> None:
    desk = Desk()
    desk.put(*range(4))
    blocks = desk.pool.take(2)
    inserted = desk.tree.insert(desk.tree.root(""), ids(*range(8)), blocks, MINE)
    assert inserted.conflict and inserted.num_adopted == 0 and inserted.node.parent is None
    desk.audit()


def test_a_table_inserts_as_it_goes() -> None:
    desk = Desk()
    blocks = desk.pool.take(3)
    node = desk.tree.root("")
    for i in range(3):
        inserted = desk.tree.insert(node, ids(*range(4 * i, 4 * i + 4)), blocks[i : i + 1], MINE)
        node = inserted.node
        assert inserted.num_adopted == 1 and not inserted.conflict
        desk.audit()
    desk.drop(blocks, node)
    desk.evict(3)


def test_eviction_takes_the_least_recently_used_leaf_from_its_tail() -> None:
    desk = Desk()
    desk.put(*range(8))
    desk.put(*range(20, 28))
    desk.use(*range(8))
    desk.evict(1)
    assert desk.tree.contents("") == {tuple(range(8)), (20, 21, 22, 23)}
    desk.evict(2)
    assert desk.tree.contents("") == {(0, 1, 2, 3)}
    assert desk.tree.num_evicted == 3


@pytest.mark.parametrize("demote", [False, True])
def test_a_parent_is_as_recent_as_the_child_it_lost(demote: bool) -> None:
    desk = Desk(num_host=1)
    desk.put(1, 1, 1, 1)
    desk.put(2, 2, 2, 2)
    desk.put(1, 1, 1, 1, 3, 3, 3, 3, priority=5)
    desk.evict(1, demote)
    desk.evict(1)
    assert desk.length(1, 1, 1, 1) == 4 and desk.length(2, 2, 2, 2) == 0


@pytest.mark.parametrize("demote", [False, True])
def test_a_parent_is_as_important_as_the_child_it_lost(demote: bool) -> None:
    desk = Desk(num_host=1)
    desk.put(1, 1, 1, 1, priority=5)
    desk.put(1, 1, 1, 1, 3, 3, 3, 3, priority=0)
    desk.evict(1, demote)
    desk.put(2, 2, 2, 2, priority=3)
    desk.evict(1)
    assert desk.length(1, 1, 1, 1) == 4 and desk.length(2, 2, 2, 2) == 0


def test_the_least_important_class_goes_first() -> None:
    desk = Desk()
    desk.put(1, 1, 1, 1, priority=5)
    desk.put(2, 2, 2, 2, priority=0)
    desk.put(3, 3, 3, 3, priority=5)
    desk.put(1, 1, 1, 1, priority=0)
    desk.evict(1)
    assert desk.tree.contents("") == {(1, 1, 1, 1), (2, 2, 2, 2)}
    desk.evict(1)
    assert desk.tree.contents("") == {(1, 1, 1, 1)}


def test_held_blocks_are_never_evicted() -> None:
    desk = Desk()
    blocks, inserted = desk.hold(ids(*range(8)))
    desk.put(*range(12))
    desk.evict(32)
    assert desk.tree.contents("") == {tuple(range(8))}
    desk.pool.release(blocks[1:])
    desk.tree.offer(inserted.node)
    desk.evict(32)
    assert desk.tree.contents("") == {(0, 1, 2, 3)}, "of a node half held the tail can go"
    desk.drop(blocks[:1], inserted.node)
    desk.evict(1)
    assert desk.pool.num_free == 32


def test_a_batch_rounds_up_within_a_leaf() -> None:
    desk = Desk()
    desk.put(*range(40))
    desk.put(*range(50, 54))
    assert desk.tree.evict(1, 0, None, batch=4).num_blocks == 4
    assert desk.tree.evict(7, 0, None, batch=4).num_blocks == 7, "six were left of the leaf, one of the other"


@pytest.mark.parametrize("demote", [False, True])
def test_a_handle_leads_on_when_its_node_is_gone(demote: bool) -> None:
    desk = Desk(num_host=1)
    blocks, upper = desk.hold(ids(1, 1, 1, 1))
    lower_block = desk.pool.take(1)
    lower = desk.tree.insert_leaving(upper.node, ids(2, 2, 2, 2), lower_block, MINE)
    desk.pool.release(lower_block)
    desk.tree.offer(lower.node)
    desk.evict(1, demote)
    desk.drop(blocks, lower.node)
    desk.evict(1)
    assert upper.node.parent is not None and desk.pool.num_free == 32


def test_partitions_never_share() -> None:
    desk = Desk()
    desk.put(*range(8), partition="a")
    desk.put(*range(8), partition="b")
    assert desk.pool.num_cached == 4 and desk.length(*range(8), partition="c") == 0
    assert desk.length(0, 1, 2, 99, partition="c") == 0


def test_a_miss_says_why() -> None:
    desk = Desk()
    desk.put(*range(12), partition="a")
    query = ids(*range(12))
    assert desk.tree.miss_reason("b", query, 0) == CacheMiss(CacheMissKind.OTHER_PARTITION)
    assert desk.tree.miss_reason("b", ids(*range(4), 9, 9, 9, 9), 4) == CacheMiss(CacheMissKind.NEVER_SEEN)
    assert desk.tree.miss_reason("a", ids(*range(14)), 12) is None
    desk.evict(2, step=7)
    assert desk.tree.miss_reason("a", query, 4) == CacheMiss(CacheMissKind.EVICTED, 7, OTHER)
    assert desk.tree.miss_reason("b", query, 4) == CacheMiss(CacheMissKind.NEVER_SEEN)
    assert desk.tree.miss_reason("b", query, 0) == CacheMiss(CacheMissKind.OTHER_PARTITION)


def test_only_some_partitions_are_compared() -> None:
    desk = Desk()
    for name in "abcdefgh":
        desk.put(*range(4), partition=name)
    desk.put(*range(8), partition="i")
    assert desk.tree.miss_reason("z", ids(*range(8)), 4) == CacheMiss(CacheMissKind.NEVER_SEEN)
    assert desk.tree.miss_reason("a", ids(*range(8)), 4) == CacheMiss(CacheMissKind.OTHER_PARTITION)


def test_ghosts_are_bounded() -> None:
    ghosts = EvictionHistory(capacity=2)
    for step, path in enumerate((b"a", b"b", b"a", b"c")):
        ghosts.remember("", path, CacheMiss(CacheMissKind.EVICTED, step))
    assert len(ghosts) == 2 and ghosts.find("", b"b") is None
    assert ghosts.find("", b"a") == CacheMiss(CacheMissKind.EVICTED, 2, None)
    assert ghosts.find("a", b"") is None, "partition and path are told apart"


def test_reset_drops_what_is_idle() -> None:
    desk = Desk(num_host=4)
    desk.put(*range(8))
    desk.evict(1, demote=True)
    desk.put(*range(20, 28))
    blocks, inserted = desk.hold(ids(1, 1, 1, 1))
    assert desk.tree.reset() == 4
    assert desk.tree.contents("") == {(1, 1, 1, 1)}
    assert desk.tree.miss_reason("", ids(*range(8)), 0) == CacheMiss(CacheMissKind.NEVER_SEEN)
    desk.drop(blocks, inserted.node)
    assert desk.tree.reset() == 1 and desk.tree.num_nodes == 0


def test_the_generation_tells_when_a_match_is_stale() -> None:
    desk = Desk()
    seen = {desk.tree.generation}
    desk.put(*range(8))
    seen.add(desk.tree.generation)
    desk.use(0, 1, 2, 3)
    desk.put(*range(8))
    assert desk.tree.generation in seen, "nothing new was inserted"
    desk.evict(1)
    seen.add(desk.tree.generation)
    assert len(seen) == 3


def test_many_touches_do_not_grow_the_heap() -> None:
    desk = Desk(block_size=1, num_blocks=8)
    for turn in range(300):
        desk.tree.evict(1, turn, None) if not desk.pool.num_free else None
        desk.put(turn)
        desk.use(turn)
    assert desk.tree.contents("") == {(turn,) for turn in range(292, 300)}


def test_all_that_one_wrote_is_dropped_and_nothing_of_others() -> None:
    """The path of 12 is in three nodes: others diverged from it after 4 and after 8, and were evicted."""
    desk = Desk()
    known = tuple(range(1, 13))
    blocks, inserted = desk.hold(ids(*known))
    for shared in (4, 8):
        assert desk.use(*known[:shared], 99).num_tokens == shared
    desk.drop(blocks, inserted.node)
    assert desk.tree.num_nodes >= 3
    desk.tree.drop(inserted.node, OTHER)
    assert desk.length(*known) == 12, "it was another who failed"
    generation = desk.tree.generation
    desk.tree.drop(inserted.node, ME)
    desk.audit()
    assert desk.length(*known) == 0 and desk.pool.num_free == 32
    assert desk.tree.generation > generation


def test_a_leaf_that_was_held_when_the_others_were_tidied_up_is_evicted_later() -> None:
    desk = Desk(num_blocks=200)
    leaf = desk.put(1, 2, 3, 4).node
    desk.pool.share(leaf.blocks)
    for token in range(10, 110):
        desk.put(token, 2, 3, 4)
    desk.drop(leaf.blocks, leaf)
    desk.evict(101)
    assert desk.pool.num_free == 200
