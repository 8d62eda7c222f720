"""The slow references of `quire check` see a wrong answer of the part beside them, and nothing where there is none."""

from collections.abc import Callable

import numpy as np
import pytest

from quire.core.ids import IntArray, RequestId
from quire.core.request import BlockOwner, Request, RequestGroup
from quire.core.sampling import RowSampling
from quire.kv.eviction import EvictionQueue
from quire.kv.manager import KVManager
from quire.kv.radix_node import NO_BLOCKS, Node
from quire.kv.trie import Trie
from quire.sched import queue
from quire.sched.fairness import WeightedFairShares
from quire.sched.overtaking import OvertakingQueue, QueuePlace
from quire.sched.policy import Policy
from quire.sched.prefix_dedup import InflightPrefixes, PrefixWait
from quire.sched.queue import OrderPolicy
from quire.sched.reference_checks import add_reference_checks, service_totals
from quire.sched.scheduler import Scheduler
from tests.sched.inspection import state_of
from tests.sched.stepping import counting

BLOCK = 4


def ids(tokens: list[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)


class CheckedScheduler:
    """A scheduler whose answers are compared."""

    def __init__(self) -> None:
        order = OrderPolicy(ageing_s=10.0, long_prompt=30, overtaking=0.1, lane_patience_s=5.0, weights={"x": 2.0})
        kv = KVManager(16, BLOCK, 4, num_host_blocks=4)
        self.scheduler = Scheduler(kv, max_rows=4, max_step_tokens=64, policy=Policy(order=order))
        add_reference_checks(self.scheduler)
        self.kv = kv
        self.state = state_of(self.scheduler)
        self._number = 0

    def add(self, now_s: float = 0.0, num_tokens: int = 3, **also: object) -> RequestGroup:
        self._number += 1
        prompt = ids(counting(1, num_tokens))
        request = Request(RequestId(self._number), prompt, 4, RowSampling(), **also)  # type: ignore[arg-type]
        return self.scheduler.add(request, now_s)[0].group

    def first(self, now_s: float) -> list[RequestGroup]:
        return list(self.state.waiting.candidates(now_s))

    def cache(self, tokens: list[int], partition: str = "") -> None:
        """A row computes these tokens and leaves them in the cache."""
        owner, row = BlockOwner(RequestId(99), partition, 0), self.state.rows.take_row()
        self.kv.open(row, owner, None, len(tokens) // BLOCK)
        self.kv.grow_to(row, len(tokens), owner.request)
        self.kv.close(row, owner, ids(tokens))


def ageing(bench: CheckedScheduler) -> None:
    low, high = bench.add(0.0, priority=3), bench.add(35.0, priority=1)
    assert bench.first(1.0) == [high] and bench.first(45.0) == [low]


def tenants(bench: CheckedScheduler) -> None:
    heavy, light = bench.add(tenant="x"), bench.add(tenant="y")
    bench.state.shares.charge("x", 8.0)
    bench.state.shares.charge("y", 3.0)
    assert bench.first(0.0) == [light]
    bench.scheduler.abort(light.request.id)
    assert bench.first(0.0) == [heavy]
    assert bench.first(0.0) == [heavy] and bench.add(tenant="z") in bench.state.waiting
    assert bench.state.shares.service("z") == 4.0, "idle time earns nothing"
    assert service_totals(bench.scheduler, "xyz") == [8.0, 3.0, 0.0]


def lanes(bench: CheckedScheduler) -> None:
    long, short = bench.add(0.0, num_tokens=40), bench.add(1.0)
    assert bench.first(1.0) == [short] and bench.first(6.0) == [long]


def overtaking(bench: CheckedScheduler) -> None:
    first, second = bench.add(num_tokens=40), bench.add(num_tokens=30)
    assert bench.first(9.0) == [first], "4 tokens may overtake it"
    bench.scheduler.abort(first.request.id)
    assert bench.first(9.0) == [second]


def followers(bench: CheckedScheduler) -> None:
    groups = [bench.add(priority=priority) for priority in (2, 0, 1)]
    prefixes, (leader,) = bench.state.inflight_prefixes, bench.add(num_tokens=9).sequences
    prefixes.begin(leader)
    for group in groups:
        prefixes.park(group, PrefixWait(leader, BLOCK))
    prefixes.end(leader)
    assert [group.request.priority for group in prefixes.take_ready(9)] == [0, 1, 2]


def partitions(bench: CheckedScheduler) -> None:
    bench.cache(counting(1, 8), "a")
    for partition, found in (("a", 7), ("b", 0)):
        match = bench.kv.match(BlockOwner(RequestId(1), partition, 0), ids(counting(1, 8)), 7)
        assert bench.kv.num_found(match) == found


def evictions(bench: CheckedScheduler) -> None:
    for first in (100, 200, 300):
        bench.cache(counting(first, 8))
    assert bench.kv.tree is not None
    bench.kv.tree.evict(3, step=0)
    assert bench.kv.tree.contents("") == {tuple(counting(200, 4)), tuple(counting(300, 8))}


def shortest(self: OvertakingQueue) -> QueuePlace:
    return min(self._waiting.values(), key=lambda each: each.work).place


def reversed_ready(self: InflightPrefixes, most: int) -> list[RequestGroup]:
    return ORIGINAL_READY(self, most)[::-1]


def foreign_root(self: Trie, partition: str) -> Node:
    return next(iter(self._roots.values()), Node(partition, b"", NO_BLOCKS, 0))


def banked(self: WeightedFairShares, tenant: str, index: int) -> None:
    ORIGINAL_ACTIVATE(self, tenant, index)
    self._service[index] = 0.0


def last_leaf(self: EvictionQueue) -> Node | None:
    ORIGINAL_FIRST(self)
    return max((entry[3] for entry in self._sorted if self.is_evictable(entry[3])), key=lambda node: node.serial)


ORIGINAL_READY, ORIGINAL_ACTIVATE = InflightPrefixes.take_ready, WeightedFairShares._activate
ORIGINAL_FIRST = EvictionQueue.first
CASES: dict[str, tuple[Callable[[CheckedScheduler], None], object, str, object]] = {
    "ageing": (ageing, queue, "aged_class", lambda priority, waited_s, ageing_s: priority - min(waited_s > 10, 1)),
    "tenants": (tenants, WeightedFairShares, "_activate", banked),
    "lanes": (lanes, queue, "yields", lambda lane, waited_s, patience_s: bool(lane)),
    "overtaking": (overtaking, OvertakingQueue, "head", shortest),
    "followers": (followers, InflightPrefixes, "take_ready", reversed_ready),
    "partitions": (partitions, Trie, "root", foreign_root),
    "evictions": (evictions, EvictionQueue, "first", last_leaf),
}


@pytest.mark.parametrize("name", CASES)
def test_a_right_answer_passes(name: str) -> None:
    CASES[name][0](CheckedScheduler())


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_answer_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, where, method, wrong = CASES[name]
    monkeypatch.setattr(where, method, wrong)
    with pytest.raises(AssertionError) as seen:
        run(CheckedScheduler())
    assert seen.traceback[-1].path.stem in ("reference_checks", "tree_checks"), "not this test's own assertions"
