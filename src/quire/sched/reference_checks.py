"""Slow references beside the fast parts of a scheduler, compared at every call. For `quire check`.

Each class is the shipped one with its contract checked: the virtual clocks of tenants, the order of the queue against a
scan of all waiting groups (so starvation across classes, tenants and lanes is seen where it begins), matches against a
scan of all cached paths of the partition, evictions against a scan of all leaves. The references share no state with
the fast paths.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from math import inf, isclose

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray
from quire.core.moves import Tier
from quire.core.request import BlockOwner, RequestGroup
from quire.kv.block_pool import BlockPool
from quire.kv.eviction import EvictionQueue
from quire.kv.radix_node import TOKEN_BYTES, Node, encode
from quire.kv.radix_tree import Inserted, PrefixMatch, RadixTree
from quire.sched.fairness import Billing, WeightedFairShares
from quire.sched.prefix_dedup import InflightPrefixes
from quire.sched.queue import OrderPolicy, WaitingQueue
from quire.sched.scheduler import Scheduler


def add_reference_checks(scheduler: Scheduler) -> None:
    """Replace the parts of a new scheduler."""
    state, kv = scheduler._state, scheduler.kv
    assert not state.groups, "requests were added before"
    state.shares = _CheckedShares(scheduler.policy.order.weights)
    state.billing = Billing(state.shares, scheduler.max_rows)
    state.waiting = _CheckedQueue(scheduler.policy.order, state.shares)
    state.inflight_prefixes = _CheckedPrefixes(kv.block_size)
    if kv.tree is not None:
        kv.tree = _CheckedTree(kv.block_size, kv.pool, kv.host)


def service_totals(scheduler: Scheduler, tenants: Iterable[str]) -> list[float]:
    """What each tenant was charged since the start."""
    return [scheduler._state.shares.total(tenant) for tenant in tenants]


class _CheckedShares(WeightedFairShares):
    """The virtual clocks of all tenants, by scans."""

    __slots__ = ("_active", "_clocks", "_highest", "_weight_of")

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(weights)
        self._weight_of = dict(weights)
        self._clocks: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        self._highest = 0.0  # of tenants that became idle

    def arrive(self, tenant: str) -> None:
        super().arrive(tenant)
        if tenant not in self._active:
            least = min([self._clocks[each] for each in self._active], default=self._highest)
            self._clocks[tenant] = max(self._clocks.get(tenant, 0.0), least)
        self._active[tenant] += 1

    def depart(self, tenant: str) -> None:
        super().depart(tenant)
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            self._highest = max(self._highest, self._clocks[tenant])

    def charge(self, tenant: str, cost: float) -> None:
        super().charge(tenant, cost)
        self._clocks[tenant] += cost / self._weight_of.get(tenant, 1.0)

    def charge_many(self, indices: NDArray[np.int64], costs: NDArray[np.float64]) -> None:
        super().charge_many(indices, costs)
        names = {index: tenant for tenant, index in self._index_of.items()}
        for index, cost in zip(indices.tolist(), costs.tolist(), strict=True):
            self._clocks[names[index]] += cost / self._weight_of.get(names[index], 1.0)

    def service(self, tenant: str) -> float:
        found, right = super().service(tenant), self._clocks[tenant]
        assert isclose(found, right, abs_tol=1e-6), f"the service of tenant {tenant!r} is {found}, not {right}"
        return found


class _CheckedQueue(WaitingQueue):
    """The order of the policy, computed anew from all waiting groups."""

    __slots__ = ("_all", "_may_leave", "_order", "_tenants")

    def __init__(self, policy: OrderPolicy, shares: WeightedFairShares) -> None:
        super().__init__(policy, shares)
        self._order = policy
        self._tenants = shares
        self._all: dict[int, tuple[RequestGroup, float]] = {}  # by order, with since when it waits
        self._may_leave: set[int] = set()  # the last candidates

    def push(self, group: RequestGroup, since_s: float) -> None:
        waits = not group.was_assigned
        assert not waits or since_s == group.arrived_s, f"{group} waits since {since_s}, it came at {group.arrived_s}"
        super().push(group, since_s)
        self._all[group.order] = (group, since_s)

    def pop(self, group: RequestGroup) -> float:
        first = group.finished or group.order in self._may_leave
        assert first, f"{group} was taken, and {self._may_leave} are first"
        del self._all[group.order]
        return super().pop(group)

    def candidates(self, now_s: float) -> tuple[RequestGroup, ...]:
        found = super().candidates(now_s)
        first = self._first(now_s)
        assert [group.order for group in found] == first, f"{found} are first in the queue, not {first}"
        self._may_leave = set(first)
        return found

    def best_class_head(self, now_s: float) -> RequestGroup:
        found = super().best_class_head(now_s)
        best = min(group.request.priority for group, _ in self._all.values())
        first = int(self._heads_of(best, now_s)[0][-1])
        assert found.order == first, f"{found} is first of class {best}, not {first}"
        self._may_leave.add(first)
        return found

    def _first(self, now_s: float) -> list[int]:
        heads = [self._heads_of(each, now_s) for each in {group.request.priority for group, _ in self._all.values()}]
        return [int(key[-1]) for key in min(heads, default=[])]

    def _heads_of(self, priority: int, now_s: float) -> list[tuple[float, ...]]:
        """Of one class: the key of its first group, and that of a group which may overtake it."""
        order = self._order
        lanes: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
        for group, _ in self._all.values():
            request = group.request
            if request.priority == priority:
                service = self._tenants.service(request.tenant) if order.fair else 0.0
                deadline_s = inf if request.deadline_s is None else request.deadline_s
                lanes[len(request.prompt) >= order.long_prompt].append((service, deadline_s, group.order))
        heads = {is_long: min(keys) for is_long, keys in lanes.items() if keys}
        waited_s = {is_long: now_s - self._all[int(head[-1])][1] for is_long, head in heads.items()}
        aged = priority - (int(max(*waited_s.values(), 0.0) / order.ageing_s) if order.ageing_s else 0)
        keys: list[tuple[float, ...]] = []
        for is_long, (service, deadline_s, number) in heads.items():
            yields = is_long and waited_s[is_long] < order.lane_patience_s
            keys.append((aged, service, yields, deadline_s, number))
        first, *other = nsmallest(2, keys)
        return [first, *other] if first[2] else [first]


class _CheckedPrefixes(InflightPrefixes):
    """Followers are requeued by class, none is left behind."""

    __slots__ = ()

    def take_ready(self, most: int) -> list[RequestGroup]:
        taken = super().take_ready(most)
        classes = [group.request.priority for group in taken]
        left = [group for groups in self._ready.values() for group in groups if self.follows(group)]
        order = sorted(classes) + sorted(group.request.priority for group in left)
        assert order == sorted(order) and classes == order[: len(classes)], f"followers of {classes} first, {left} left"
        assert len(taken) == most or not left, f"{left} are ready and not requeued"
        for leader, goals in self._parked.items():
            assert leader in self._start_of, f"{goals} wait for {leader}, which computes nothing"
        return taken


class _CheckedEvictionQueue(EvictionQueue):
    """The next leaf to evict, by a scan of the tree."""

    __slots__ = ("_blocks", "_tree", "_where")

    def __init__(self, tier: Tier, pool: BlockPool, tree: RadixTree) -> None:
        super().__init__(tier, pool)
        self._where = tier
        self._blocks = pool
        self._tree = tree

    def least(self) -> Node | None:
        """The least recently used leaf of the lowest class."""
        leaves = [node for node in self._tree.nodes() if node.tier is self._where and self._ends(node)]
        return min(leaves, key=lambda node: (-node.priority, node.last_use, node.serial), default=None)

    def first(self) -> Node | None:
        found = super().first()
        least = self.least()
        assert found is least, f"{found} is evicted first, not {least}"
        return found

    def _ends(self, node: Node) -> bool:
        below = [child for child in node.children.values() if child.tier is self._where]
        return not below and self._blocks.is_evictable(node.blocks.item(-1))


class _CheckedTree(RadixTree):
    """Matches and insertions, by the paths and blocks of the whole tree."""

    __slots__ = ("_known", "_paths")

    def __init__(self, block_size: int, pool: BlockPool, host: BlockPool | None = None) -> None:
        super().__init__(block_size, pool, host)
        self._queue = _CheckedEvictionQueue(Tier.DEVICE, self._pool, self)
        self._host_queue = _CheckedEvictionQueue(Tier.HOST, self._host, self)
        self._known = -1  # the generation of the paths
        self._paths: dict[str, list[bytes]] = {}  # to each leaf, by partition

    def match(self, partition: str, tokens: IntArray, limit: int) -> PrefixMatch:
        found = super().match(partition, tokens, limit)
        assert found.node.partition == partition, f"a request of partition {partition!r} matches {found.node}"
        if self._known != self.generation:
            self._known, self._paths = self.generation, {}
            for node in self.nodes():
                if not node.children:
                    self._paths.setdefault(node.partition, []).append(node.path())
        data = encode(tokens[:limit])
        longest = max([_common(path, data) for path in self._paths.get(partition, ())], default=0)
        partial = 0 if found.partial is None else found.partial.num_tokens
        num_found = found.num_tokens + len(found.host_blocks) * self.block_size + partial
        assert num_found == longest, f"{num_found} tokens of partition {partition!r} were found, {longest} are cached"
        return found

    def root(self, partition: str) -> Node:
        root = super().root(partition)
        assert root.partition == partition, f"the root of partition {partition!r} is that of {root.partition!r}"
        return root

    def insert(self, node: Node, tokens: IntArray, blocks: IntArray, owner: BlockOwner) -> Inserted:
        inserted = super().insert(node, tokens, blocks, owner)
        end = inserted.node
        if inserted.conflict and end is not node and len(end.blocks):
            assert end.blocks.item(-1) in blocks.tolist(), f"an insertion with a conflict ends in another copy: {end}"
        assert end.last_use == self._clock and end.priority <= owner.priority, f"the inserted {end} is not in use"
        return inserted

    def touch(self, match: PrefixMatch) -> PrefixMatch:
        touched = super().touch(match)
        for node, blocks in ((touched.node, match.blocks), (touched.host_node, match.host_blocks)):
            if node is not None and len(blocks):
                assert node.blocks.item(-1) == blocks.item(-1), f"a match of {blocks} ends at {node}"
                assert node.last_use > self._clock - 2, f"the matched {node} is not in use"
        return touched


def _common(path: bytes, data: bytes) -> int:
    """Tokens that two paths have in common from their start."""
    size = min(len(path), len(data))
    if path[:size] == data[:size]:
        return size // TOKEN_BYTES
    return next(at for at in range(size) if path[at] != data[at]) // TOKEN_BYTES
