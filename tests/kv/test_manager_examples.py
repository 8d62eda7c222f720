"""Tables, reservations and prefixes by hand: one idea in each."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.core.ids import BlockId, IntArray, RequestId, Row
from quire.core.moves import Tier
from quire.core.request import BlockOwner
from quire.kv.manager import KVManager, count_blocks


def ids(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)


ME = BlockOwner(RequestId(1), "", 0)


def filled(kv: KVManager, tokens: list[int]) -> None:
    """A row computed these and was closed."""
    kv.open(Row(0), ME, None, count_blocks(len(tokens), kv.block_size))
    kv.grow_to(Row(0), len(tokens), ME.request)
    kv.close(Row(0), ME, ids(tokens))


def test_other_packages_import_the_manager_and_the_tree_alone() -> None:
    package = Path(quire.__file__).parent
    lines = [
        line for path in package.rglob("*.py") if path.parent.name != "kv" for line in path.read_text().splitlines()
    ]
    imported = {match[1] for line in lines if (match := re.match(r"\s*(?:from|import) quire\.kv\.(\w+)", line))}
    # `tree_checks` for `quire check`, `block_events` for those who publish them, `prefix_holds` for its type.
    assert imported == {"manager", "radix_tree", "tree_checks", "block_events", "prefix_holds"}


def test_blocks_are_counted_upwards() -> None:
    assert [count_blocks(n, 16) for n in (0, 1, 15, 16, 17)] == [0, 1, 1, 1, 2]


def test_a_block_evicted_for_a_partial_hit_on_the_host_is_not_demoted_over_it() -> None:
    kv = KVManager(2, 4, 2, num_host_blocks=1)
    filled(kv, [1, 2, 3, 4])
    filled(kv, [11, 12, 13, 14, 15, 16, 17, 18])
    assert len(kv.take_moves()) == 1, "the first is on the host"
    match = kv.match(ME, ids([1, 2, 3, 9]), 3)
    assert match is not None and kv.num_found(match) == 3
    assert kv.open(Row(1), ME, match, 1) == 3
    (move,) = kv.take_moves()
    assert move.src.tier is Tier.HOST and move.dst.block == kv.tables.last(Row(1))


def test_a_hit_shares_whole_blocks_and_copies_the_partial_one() -> None:
    kv = KVManager(8, 4, 2)
    filled(kv, [1, 2, 3, 4, 5, 6, 7])
    match = kv.match(ME, ids([1, 2, 3, 4, 5, 6, 9]), 6)
    assert match is not None and kv.num_found(match) == 6
    assert kv.open(Row(1), ME, match, 1) == 6
    (move,) = kv.take_moves()
    first, copy = kv.tables.of(Row(1)).tolist()
    assert (first, move.src.block, move.dst.block) == (1, 2, copy) and copy not in (1, 2)
    assert kv.pool.references(BlockId(1)) == 2 and kv.pool.references(BlockId(2)) == 1


def test_the_source_of_a_copy_may_be_evicted_for_its_target() -> None:
    """The cache is full: to hold the copy, the very block it is copied from must be evicted. It is still right."""
    kv = KVManager(2, 4, 2)
    filled(kv, [1, 2, 3, 4, 5, 6, 7])
    match = kv.match(ME, ids([1, 2, 3, 4, 5, 9]), 5)
    assert kv.open(Row(1), ME, match, 1) == 5
    assert [(move.src.block, move.dst.block) for move in kv.take_moves()] == [(2, 2)]


def test_a_row_that_does_not_fit_cannot_be_opened() -> None:
    kv = KVManager(2, 4, 2)
    assert not kv.fits(None, 3)
    with pytest.raises(AssertionError):
        kv.open(Row(0), ME, None, 3)


def test_a_matched_evictable_block_is_not_available_twice() -> None:
    """Both blocks are cached: the match holds one, so only the other can be reserved."""
    kv = KVManager(2, 4, 2)
    filled(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    match = kv.match(ME, ids([1, 2, 3, 4, 9]), 4)
    assert kv.num_available == 2
    assert kv.fits(match, 1) and not kv.fits(match, 2)


def test_a_row_cannot_grow_beyond_its_reservation() -> None:
    kv = KVManager(4, 4, 2)
    kv.open(Row(0), ME, None, 1)
    with pytest.raises(AssertionError):
        kv.grow_to(Row(0), 5, ME.request)


def test_discarded_blocks_are_not_found_again() -> None:
    kv = KVManager(8, 4, 2)
    filled(kv, [1, 2, 3, 4])
    known = ids([1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = BlockOwner(RequestId(2), "", 0)
    kv.open(Row(1), other, kv.match(other, known, 8), 2)
    kv.grow_to(Row(1), 9, other.request)
    kv.commit(Row(1), other, known)
    assert kv.num_found(kv.match(ME, known, 9)) == 8
    kv.discard(Row(1), other)
    assert kv.num_found(kv.match(ME, known, 9)) == 4, "what another request wrote stays"
    kv.audit()


def test_a_lost_device_drops_copies_and_prefixes() -> None:
    kv = KVManager(4, 4, 2, num_host_blocks=4)
    filled(kv, [1, 2, 3, 4, 5, 6])
    match = kv.match(ME, ids([1, 2, 3, 4, 5, 9]), 5)
    kv.open(Row(1), ME, match, 1)
    with pytest.raises(AssertionError, match="open tables"):
        kv.invalidate()
    kv.close(Row(1), ME, ids([]))
    assert kv.has_moves
    kv.invalidate()
    assert kv.take_moves() == ()
    assert kv.num_found(kv.match(ME, ids([1, 2, 3, 4, 5, 6]), 6)) == 0
    assert kv.pool.num_free == 4


def test_the_later_of_two_equal_rows_keeps_its_copies_until_it_closes() -> None:
    """Row 1 finds its blocks in the tree already. The next in row 1 has nothing to do with that."""
    kv = KVManager(8, 4, 2)
    known, fresh = ids([1, 2, 3, 4]), ids([5, 6, 7, 8])
    for row in (Row(0), Row(1)):
        kv.open(row, ME, None, 2)
        kv.grow_to(row, 4, ME.request)
        kv.commit(row, ME, known)
    assert [kv.pool.references(BlockId(int(kv.tables.last(row)))) for row in (Row(0), Row(1))] == [2, 1]
    kv.close(Row(1), ME, known)
    kv.open(Row(1), ME, None, 1)
    kv.grow_to(Row(1), 4, ME.request)
    kv.commit(Row(1), ME, fresh)
    assert kv.num_found(kv.match(ME, fresh, 4)) == 4
    kv.audit()


def forked_from_copies(kv: KVManager) -> IntArray:
    """Row 0 published two blocks first; row 1 has copies of its own and one block more, and row 2 forked from it."""
    known = ids(range(1, 13))
    for row, length in ((Row(0), 8), (Row(1), 12)):
        kv.open(row, ME, None, 3)
        kv.grow_to(row, length, ME.request)
        kv.commit(row, ME, known[:length])
    kv.fork(Row(1), Row(2), ME, known)
    kv.close(Row(0), ME, known[:8])
    return known


def test_blocks_of_a_fork_are_not_inserted_below_evictable_blocks() -> None:
    kv = KVManager(12, 4, 3)
    known = forked_from_copies(kv)
    kv.close(Row(1), ME, known)
    kv.audit()
    assert kv.num_found(kv.match(ME, known, 12)) == 8
    kv.close(Row(2), ME, known)
    kv.audit()
    assert kv.num_found(kv.match(ME, known, 12)) == 12, "the last row that reads it caches it"


def test_a_fork_of_private_copies_publishes_none_of_them() -> None:
    """Even when the blocks that stood before them are gone: row 1 would not know that its own are in the tree."""
    kv = KVManager(12, 4, 3)
    known = forked_from_copies(kv)
    kv.reset_cache()
    kv.commit(Row(2), ME, known)
    assert kv.num_found(kv.match(ME, known, 12)) == 0
    kv.audit()


def cached_by_its_sibling(kv: KVManager) -> IntArray:
    """Row 1 closes and caches blocks that row 2, its fork, still holds; another request splits them into two nodes."""
    known = forked_from_copies(kv)
    kv.reset_cache()
    kv.close(Row(1), ME, known)
    kv.open(Row(0), ME, kv.match(ME, known, 8), 0)
    kv.close(Row(0), ME, known[:8])
    return known


@pytest.mark.parametrize("num_kept", [0, 4, 8, 12])
def test_blocks_of_a_fork_that_its_sibling_cached_are_evictable_once_it_closes(num_kept: int) -> None:
    kv = KVManager(12, 4, 3)
    known = cached_by_its_sibling(kv)
    kv.close(Row(2), ME, known[:num_kept])
    kv.audit()
    assert kv.num_found(kv.match(ME, known, 12)) == 12
    assert kv.reset_cache() == 3 and kv.pool.num_free == 12


def test_blocks_of_a_fork_that_its_sibling_cached_are_not_found_once_it_is_discarded() -> None:
    kv = KVManager(12, 4, 3)
    known = cached_by_its_sibling(kv)
    kv.discard(Row(2), ME)
    kv.audit()
    assert kv.num_found(kv.match(ME, known, 12)) == 0 and kv.pool.num_free == 12


def test_what_a_hold_copied_follows_its_own_blocks_though_their_node_was_extended() -> None:
    """Two blocks are held, with room for a third. Meanwhile another row goes on behind the two in the same node."""
    kv = KVManager(16, 4, 2)
    common, copied, other = list(range(8)), [101, 102, 103, 104], [201, 202, 203, 204]
    filled(kv, common)
    held = kv.holds.hold(kv, ME, ids(common + copied), with_room=True)
    assert held is not None and (len(held.cached), len(held.room)) == (2, 1)
    match = kv.match(ME, ids(common + other), 12)
    kv.open(Row(1), ME, match, 1)
    kv.grow_to(Row(1), 12, ME.request)
    kv.commit(Row(1), ME, ids(common + other))
    kv.holds.release(kv, held.number, written=True)
    kv.audit()
    found = kv.match(ME, ids(common + copied), 12)
    assert found is not None and found.blocks.tolist() == [*held.cached.tolist(), *held.room.tolist()]
    found = kv.match(ME, ids(common + other), 12)
    assert found is not None and found.blocks.tolist() == kv.tables.of(Row(1)).tolist()
    behind = kv.match(ME, ids(common + other + copied), 16)
    assert behind is not None and kv.num_found(behind) == 12, "nothing was computed behind the other row's tokens"
