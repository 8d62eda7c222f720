"""Slow references beside the fast parts of a scheduler, compared at every call. For `quire check`.

Each class is the shipped one with its contract checked: the virtual clocks of tenants, the order of the queue against a
scan of all waiting groups (so starvation across classes, tenants and lanes is seen where it begins), the order of
followers, searches for victims that are skipped. The references share no state with the fast paths. `kv/tree_checks.py`
does the same for the prefix tree.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from heapq import nsmallest
from math import inf, isclose

import numpy as np
from numpy.typing import NDArray

from quire.core.request import RequestGroup
from quire.kv.tree_checks import add_tree_checks
from quire.sched.fairness import Billing, WeightedFairShares
from quire.sched.preemption import Preemption, _FailedSearch, choose_for_waiting
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
    preemption = _CheckedPreemption(state)
    scheduler._admission._preemption = scheduler._batcher._preemption = preemption
    add_tree_checks(kv)


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
                lanes[group.num_uncached >= order.long_prompt].append((service, deadline_s, group.order))
        heads = {is_long: min(keys) for is_long, keys in lanes.items() if keys}
        waited_s = {is_long: now_s - self._all[int(head[-1])][1] for is_long, head in heads.items()}
        aged = priority - (int(max(*waited_s.values(), 0.0) / order.ageing_s) if order.ageing_s else 0)
        keys: list[tuple[float, ...]] = []
        for is_long, (service, deadline_s, number) in heads.items():
            yields = is_long and waited_s[is_long] < order.lane_patience_s
            keys.append((aged, service, yields, deadline_s, number))
        first, *other = nsmallest(2, keys)
        return [first, *other] if first[2] else [first]


class _CheckedPreemption(Preemption):
    """A search for victims that is skipped would find none. Rows taken back for a share are due to its tenant, and no
    tenant that loses them falls below its own share."""

    __slots__ = ("_below_share",)

    def preempt_for_waiting(self, group: RequestGroup, num_rows: int, shortage: int, *, below_share: bool) -> bool:
        state, self._below_share = self._state, below_share
        counters = state.counters
        before, num_before, running = counters.share_preemptions, self._rows_by_tenant(), self._running()
        found = super().preempt_for_waiting(group, num_rows, shortage, below_share=below_share)
        if counters.share_preemptions > before:
            shares, tenant, num_after = self._shares(), group.request.tenant, self._rows_by_tenant()
            waited_s = state.now_s - state.waiting._queued[group.order].since_s
            assert waited_s >= state.policy.order.share_patience_s, f"{group} has waited for {waited_s} s only"
            num_due = num_before[tenant] + num_rows
            assert num_due <= shares[tenant], f"{tenant!r} gets {num_due} rows of {shares[tenant]}"
            equal = [each for each in running - self._running() if each.request.priority == group.request.priority]
            for loser in {each.request.tenant for each in equal}:
                num_left = num_after[loser]
                assert num_left >= shares[loser], f"{loser!r} is left {num_left} rows of {shares[loser]}"
        return found

    def _running(self) -> set[RequestGroup]:
        return {group for group in self._state.groups.values() if self._state.running_sequences(group)}

    def _rows_by_tenant(self) -> Counter[str]:
        """Rows that run; those being released do not count."""
        sequences = [s for group in self._state.groups.values() for s in self._state.running_sequences(group)]
        return Counter(sequence.request.tenant for sequence in sequences)

    def _shares(self) -> dict[str, int]:
        state = self._state
        weights = {group.request.tenant: 1.0 for group in state.groups.values()}
        weights |= {tenant: weight for tenant, weight in state.policy.order.weights.items() if tenant in weights}
        num_rows, total = state.rows.max_rows, sum(map(Fraction, weights.values()))
        return {tenant: max(1, int(num_rows * Fraction(weight) / total)) for tenant, weight in weights.items()}

    def _failed_before(self, search: _FailedSearch) -> bool:
        failed = super()._failed_before(search)
        if failed:
            (group,) = [group for group in self._state.groups.values() if group.order == search.order]
            victims = self._victims(group.request.priority, below_share=self._below_share)
            num_rows = len(group.unfinished) - self._state.rows.num_free
            found = choose_for_waiting(victims, num_rows, search.shortage, self._state.num_freed)
            assert not found, f"{group} waits, and {found} could be preempted for it"
        return failed


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
