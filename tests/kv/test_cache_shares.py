"""What one tenant caches does not evict what another still uses, up to an equal part of the cache."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import BlockOwner, partition_name, tenant_of
from quire.kv.eviction import ACTIVE_WINDOW
from quire.kv.manager import KVManager
from quire.kv.tree_checks import add_tree_checks

ROW = Row(0)


class Cache:
    """A cache of blocks of four tokens, used by one request after another."""

    def __init__(self, num_blocks: int, *, host: int = 0, resident_limit: int | None = None, rows: int = 1) -> None:
        self.kv = KVManager(num_blocks, 4, rows, num_host_blocks=host, resident_limit=resident_limit)
        add_tree_checks(self.kv)
        self._num_requests = 0
        self._next_token = 1000

    def run(self, tenant: str, prompt: IntArray, *, salt: str = "", priority: int = 0) -> int:
        """Compute a prompt and leave it cached; how many of its tokens were found."""
        self._num_requests += 1
        owner = BlockOwner(RequestId(self._num_requests), partition_name(tenant, salt), priority)
        match = self.kv.match(owner, prompt, len(prompt) - 1)
        num_more = len(prompt) // 4 - (0 if match is None else len(match.blocks))
        num_found = self.kv.open(ROW, owner, match, num_more)
        self.kv.note_miss(owner, prompt, num_found)
        self.kv.grow_to(ROW, len(prompt), owner.request)
        self.kv.take_moves()
        self.kv.close(ROW, owner, prompt)
        self.kv.audit()
        return num_found

    @property
    def num_touched(self) -> int:
        return self.kv.pool.num_blocks - self.kv.pool.num_untouched

    def junk(self, tenant: str, num_blocks: int, *, salts: bool = False, priority: int = 0) -> None:
        """Prompts of four blocks that never come again."""
        for number in range(num_blocks // 4):
            salt = str(number) if salts else ""
            self.run(tenant, self.fresh(16), salt=salt, priority=priority)

    def fresh(self, num_tokens: int) -> IntArray:
        self._next_token += num_tokens
        return np.arange(self._next_token - num_tokens, self._next_token, dtype=np.int32)


@pytest.mark.parametrize("salts", [False, True])
@pytest.mark.parametrize("num_junk", [100, 300])
def test_a_prefix_that_is_used_stays_however_much_another_tenant_caches(num_junk: int, salts: bool) -> None:
    """One tenant's prompt of 40 blocks comes again and again; between two uses another caches more than all."""
    cache = Cache(100)
    prompt = cache.fresh(160)
    cache.run("innocent", prompt)
    for _ in range(5):
        cache.junk("hostile", num_junk, salts=salts)
        assert cache.run("innocent", prompt) == 159


def test_every_prefix_can_be_evicted_however_many_there_are_and_in_whatever_order_they_came() -> None:
    cache = Cache(400)
    for number in range(390):
        cache.run("x", cache.fresh(4), priority=(7 * number) % 3)
    for _ in range(3):
        cache.run("x", cache.fresh(4 * 390), priority=-1)


def test_a_tenant_above_its_share_loses_its_own_least_recent_first() -> None:
    cache = Cache(40)
    old, new = cache.fresh(80), cache.fresh(80)  # 20 blocks each
    cache.run("x", old)
    cache.run("x", new)
    cache.run("y", cache.fresh(48))  # 12 blocks, when none is free
    assert cache.run("x", new) == 79
    assert cache.run("x", old) < 79


def test_with_one_tenant_the_least_recently_used_goes_whatever_the_salt() -> None:
    cache = Cache(40)
    first, second = cache.fresh(80), cache.fresh(80)
    cache.run("x", first, salt="a")
    cache.run("x", second, salt="b")
    cache.run("x", first, salt="a")
    cache.run("x", cache.fresh(80), salt="c")
    assert cache.run("x", first, salt="a") == 79


def test_a_tenant_that_is_gone_keeps_no_share() -> None:
    """After the others have cached some times the whole cache, what it had goes first."""
    cache = Cache(40)
    gone = cache.fresh(64)
    cache.run("gone", gone)
    cache.junk("x", ACTIVE_WINDOW * 40 - 40)
    assert cache.run("gone", gone) == 63, "it used it within the window"
    cache.junk("x", ACTIVE_WINDOW * 40 + 40)
    assert cache.run("gone", gone) == 0
    kept = cache.fresh(80)
    cache.run("x", kept)
    cache.junk("x", 16)
    assert cache.run("x", kept) == 79


def test_a_lower_class_goes_first_whatever_its_tenant() -> None:
    cache = Cache(40)
    low, high = cache.fresh(16), cache.fresh(96)
    cache.run("modest", low, priority=1)
    cache.run("large", high)
    cache.run("third", cache.fresh(64))
    assert cache.run("large", high) == 95
    assert cache.run("modest", low, priority=1) == 0


@given(st.text(max_size=12), st.text(max_size=12), st.text(max_size=12), st.text(max_size=12))
def test_a_partition_names_its_tenant_and_no_two_are_the_same(tenant: str, salt: str, other: str, more: str) -> None:
    assert tenant_of(partition_name(tenant, salt)) == tenant
    same = (tenant, salt) == (other, more)
    assert (partition_name(tenant, salt) == partition_name(other, more)) == same


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 5), st.integers(0, 2)), max_size=60), st.integers(0, 8)
)
def test_evictions_against_a_scan_of_the_tree(uses: list[tuple[str, int, int]], num_host: int) -> None:
    """The reference beside the tree compares every eviction; blocks by tenant are recounted after each use."""
    cache = Cache(24, host=num_host)
    prompts = [cache.fresh(4 * length) for length in (3, 5, 7, 9, 11, 20)]
    for tenant, number, priority in uses:
        cache.run(tenant, prompts[number], priority=priority)


def test_unheld_prefixes_fill_the_resident_limit_until_one_that_was_evicted_is_missed() -> None:
    """Prompts of four blocks that never come again touch no more memory; one that comes again adds 16."""
    cache = Cache(100, resident_limit=20)
    first = cache.fresh(16)
    cache.run("", first)
    assert cache.num_touched == 4
    cache.junk("", 200)
    assert cache.num_touched == 20
    assert cache.run("", first) == 0, "it was evicted"
    for _ in range(3):
        cache.junk("", 24)
        assert cache.run("", first) == 15, "28 blocks stay cached now"
    assert cache.num_touched == 36
    for _ in range(6):
        evicted = cache.fresh(16)
        cache.run("", evicted)
        cache.junk("", 400)
        assert cache.run("", evicted) == 0
    assert cache.num_touched == 100, "the limit ends at the size of the cache"


def test_prefixes_keep_a_quarter_of_the_limit_however_much_rows_hold() -> None:
    cache = Cache(100, resident_limit=40, rows=2)
    cache.junk("", 40)
    assert cache.num_touched == 40
    owner = BlockOwner(RequestId(1000), "", 0)
    cache.kv.open(Row(1), owner, None, 60)
    cache.kv.grow_to(Row(1), 30 * 4, owner.request)
    assert (cache.num_touched, cache.kv.pool.num_evictable) == (40, 8), "whole prompts are evicted"
    cache.kv.grow_to(Row(1), 60 * 4, owner.request)
    assert (cache.num_touched, cache.kv.pool.num_evictable) == (68, 8)
    cache.kv.close(Row(1), owner, cache.fresh(240))
    cache.junk("", 40)
    assert cache.num_touched == 68
    cache.kv.audit()
