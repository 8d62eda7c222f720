"""Slow references beside the fast parts of a scheduler, compared at every call. For `quire check`.

Each class is the shipped one with its contract checked: the virtual clocks of tenants, the order of the queue against a
scan of all waiting groups (so starvation across classes, tenants and lanes is seen where it begins), overtaking against
sums for each prompt, the order of followers, searches for victims that are skipped, and the shares of rows and blocks,
which a tenant below its own gets from those above theirs. The references share no state with the fast paths.
`kv/tree_checks.py` does the same for the prefix tree.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from heapq import nsmallest
from math import inf, isclose
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import RequestId
from quire.core.request import RequestGroup
from quire.kv.tree_checks import add_tree_checks
from quire.sched.fairness import Billing, WeightedFairShares
from quire.sched.overtaking import size_class
from quire.sched.preemption import Preemption, PreemptionCandidate, _FailedSearch, choose_for_waiting
from quire.sched.prefix_dedup import InflightPrefixes
from quire.sched.queue import OrderPolicy, WaitingQueue
from quire.sched.scheduler import Scheduler
from quire.sched.state import SchedulerState


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


_QueueName = tuple[int, str, bool]  # class, tenant, whether it is the long lane


@dataclass(slots=True)
class _Overtaken:
    """A waiting group, with what has overtaken it."""

    group: RequestGroup
    since_s: float
    place: tuple[float, int]
    allowed: int  # tokens that may overtake it
    counted: int = 0  # tokens that overtook the first of its size
    overtook: int = 0  # tokens that overtook it, but for groups that others may have been preempted for


class _CheckedQueue(WaitingQueue):
    """The order of the policy, computed anew from all waiting groups."""

    __slots__ = ("_all", "_last", "_may_leave", "_order", "_preempted_for", "_tenants")

    def __init__(self, policy: OrderPolicy, shares: WeightedFairShares) -> None:
        super().__init__(policy, shares)
        self._order = policy
        self._tenants = shares
        self._all: dict[int, _Overtaken] = {}  # by order
        self._may_leave: set[int] = set()  # the last candidates
        self._preempted_for: set[int] = set()  # others may have been preempted for these: they are bound by nothing
        self._last: dict[_QueueName, tuple[float, int]] = {}  # the latest place in each queue since it was empty

    def push(self, group: RequestGroup, since_s: float) -> None:
        waits = not group.was_assigned
        assert not waits or since_s == group.arrived_s, f"{group} waits since {since_s}, it came at {group.arrived_s}"
        super().push(group, since_s)
        deadline_s = inf if group.request.deadline_s is None else group.request.deadline_s
        place, others, name = (deadline_s, group.order), self._rivals(group), self._name(group)
        last = self._last[name] if others else place
        before = sum(_work(each.group) for each in others) if place >= last else 0
        self._last[name] = max(last, place)
        self._all[group.order] = _Overtaken(
            group, since_s, place, int(self._order.overtaking * (before + _work(group)))
        )

    def pop(self, group: RequestGroup, *, served: bool = True) -> float:
        first = group.finished or group.order in self._may_leave
        assert first, f"{group} was taken, and {self._may_leave} are first"
        left = self._all.pop(group.order)
        if served:
            self._count(left)
        self._preempted_for.discard(group.order)
        return super().pop(group, served=served)

    def _count(self, left: _Overtaken) -> None:
        """A group is admitted before those with earlier places. All of one size count what overtakes their first."""
        rivals, work = self._rivals(left.group), _work(left.group)
        sizes = {size_class(_work(each.group)) for each in rivals if each.place < left.place}
        for each in rivals if self._is_long(left.group) else ():
            if size_class(_work(each.group)) > size_class(work) and size_class(_work(each.group)) in sizes:
                each.counted += work
            if each.place < left.place and left.group.order not in self._preempted_for:
                each.overtook += work
                assert each.overtook <= each.allowed, f"{left.group} overtook {each.group} beyond {each.allowed} tokens"

    def candidates(self, now_s: float) -> tuple[RequestGroup, ...]:
        found = super().candidates(now_s)
        first = self._first(now_s)
        assert [group.order for group in found] == first, f"{found} are first in the queue, not {first}"
        self._may_leave = set(first)
        return found

    def short_head(self, now_s: float) -> RequestGroup | None:
        found = super().short_head(now_s)
        classes = {each.group.request.priority for each in self._all.values()}
        best = min(classes, key=lambda priority: self._heads_of(priority, now_s)[0])
        short = [each for each in self._all.values() if each.group.request.priority == best]
        short = [each for each in short if not self._is_long(each.group)]
        first = min(short, key=lambda each: (self._service(each.group), *each.place), default=None)
        assert found is (None if first is None else first.group), f"{found} is first of the short lane, not {first}"
        if found is not None:
            self._may_leave.add(found.order)
        return found

    def best_class_head(self, now_s: float) -> RequestGroup:
        found = super().best_class_head(now_s)
        best = min(each.group.request.priority for each in self._all.values())
        first = self._chosen(self._heads_of(best, now_s)[0])
        assert found.order == first, f"{found} is first of class {best}, not {first}"
        self._may_leave.add(first)
        self._preempted_for.add(first)
        return found

    def _first(self, now_s: float) -> list[int]:
        classes = {each.group.request.priority for each in self._all.values()}
        return [self._chosen(key) for key in min((self._heads_of(each, now_s) for each in classes), default=[])]

    def _heads_of(self, priority: int, now_s: float) -> list[tuple[float, ...]]:
        """Of one class: the key of its first group, and that of a group which may overtake it."""
        order = self._order
        lanes: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
        for each in self._all.values():
            if each.group.request.priority == priority:
                lanes[self._is_long(each.group)].append((self._service(each.group), *each.place))
        heads = {is_long: min(keys) for is_long, keys in lanes.items() if keys}
        waited_s = {is_long: now_s - self._all[int(head[-1])].since_s for is_long, head in heads.items()}
        aged = priority - (int(max(*waited_s.values(), 0.0) / order.ageing_s) if order.ageing_s else 0)
        keys: list[tuple[float, ...]] = []
        for is_long, (service, deadline_s, number) in heads.items():
            yields = is_long and waited_s[is_long] < order.lane_patience_s
            keys.append((aged, service, yields, deadline_s, number))
        first, *other = nsmallest(2, keys)
        return [first, *other] if first[2] else [first]

    def _chosen(self, key: tuple[float, ...]) -> int:
        """The order of the group that is admitted for the first of its queue: the smallest size of which the first may
        overtake all that are before it."""
        first = self._all[int(key[-1])]
        queue = [first, *self._rivals(first.group)]
        if not self._is_long(first.group) or not self._order.overtaking:
            return first.group.order
        for each in sorted(queue, key=lambda one: (size_class(_work(one.group)), one.place)):
            size = size_class(_work(each.group))
            others = [one for one in queue if size_class(_work(one.group)) <= size]
            if any(one.place < each.place for one in others):
                continue  # it would overtake one of its size or a shorter one
            larger = [one for one in queue if size_class(_work(one.group)) > size]
            passed = {size_class(_work(one.group)) for one in larger if one.place < each.place}
            rooms = [one.allowed - one.counted for one in larger if size_class(_work(one.group)) in passed]
            if min(rooms, default=inf) >= _work(each.group):
                return each.group.order
        raise AssertionError(f"none of {queue} may be admitted")

    def _rivals(self, group: RequestGroup) -> list[_Overtaken]:
        """The others of its class, tenant and lane."""
        name = self._name(group)
        return [each for each in self._all.values() if self._name(each.group) == name and each.group is not group]

    def _name(self, group: RequestGroup) -> "_QueueName":
        request = group.request
        return request.priority, request.tenant if self._order.fair else "", self._is_long(group)

    def _is_long(self, group: RequestGroup) -> bool:
        return group.num_uncached >= self._order.long_prompt

    def _service(self, group: RequestGroup) -> float:
        return self._tenants.service(group.request.tenant) if self._order.fair else 0.0


def _work(group: RequestGroup) -> int:
    return max(group.num_uncached, 1)


class _CheckedPreemption(Preemption):
    """A search for victims that is skipped would find none, or is made as many steps later as a block has tokens. Rows
    and blocks taken back for a share are due to its tenant, and are taken from tenants above their own. None that is
    due blocks waits while others are above."""

    __slots__ = ("_below_share", "_due_since", "_found_since", "_freed_then")

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        self._due_since: int | None = None  # the step from which on searches took nothing, and should have
        self._found_since: int | None = None  # the same of searches that were skipped
        self._freed_then: dict[int, int] = {}  # blocks that each group would have freed at the last search, by order

    def preempt_for_waiting(self, group: RequestGroup, num_rows: int, shortage: int, *, below_share: bool) -> bool:
        state, self._below_share = self._state, below_share
        counters, num_available = state.counters, state.kv.num_available
        before, running = counters.share_preemptions, self._running()
        held = {each: self._held(each) for each in running}
        kept = {each for each in running if not self._is_preemptible(each)}
        kept -= {each for each in kept if self._has_kept_for_a_slice(each, held)}
        freed, last = {each.order: state.num_freed(each) for each in running}, self._failed_search
        found = super().preempt_for_waiting(group, num_rows, shortage, below_share=below_share)
        if self._failed_search is not last:
            self._freed_then = freed
        assert not kept - self._running(), f"{kept - self._running()} were preempted once more, within their slice"
        if counters.share_preemptions > before:
            tenant, waited_s = group.request.tenant, state.now_s - state.waiting._queued[group.order].since_s
            assert waited_s >= state.policy.order.share_patience_s, f"{group} has waited for {waited_s} s only"
            num_due, share = self._num_rows(held, tenant) + num_rows, self._shares(state.rows.max_rows)[tenant]
            assert num_due <= share, f"{tenant!r} gets {num_due} rows of {share}"
            taken = [each for each in running - self._running() if each.request.priority == group.request.priority]
            due = self._blocks_due(held, group, shortage + num_available)
            left = {each: blocks for each, blocks in held.items() if each in self._running() or each in taken}
            assert self._may_take(left, taken, blocks=due), f"{taken} are taken for {tenant!r}, which is due less"
        self._check_wait(group, shortage, held, waits=below_share and not found)
        return found

    def preempt_for_block(self, by: RequestId) -> bool:
        state, running = self._state, self._running()
        above = self._tenants_above({each: self._held(each) for each in running})
        if not state.policy.order.fair or state.shares.num_active < 2:
            above = set()
        first = min(running, key=lambda each: (each.request.priority, each.request.tenant in above, each.order))
        others = [each for each in running if each is not first and self._is_preemptible(each)]
        rivals = {each.request.priority for each in others if each.request.tenant in above and state.num_freed(each)}
        lost = {each: self._num_computed(each) for each in others if state.num_freed(each)}
        found = super().preempt_for_block(by)
        for victim in running - self._running():
            rank = (victim.request.priority, victim.request.tenant in above)
            least = min(lost[each] for each in lost if (each.request.priority, each.request.tenant in above) == rank)
            assert lost[victim] == least, f"{victim} lost {lost[victim]} positions, another would have lost {least}"
            assert victim is not first, f"{victim} was preempted for a block, and comes first"
            fair = victim.request.tenant in above or victim.request.priority not in rivals
            assert fair, f"{victim} was preempted for a block, and tenants {above} are above their shares"
        return found

    def _check_wait(self, group: RequestGroup, shortage: int, held: "_BlocksByGroup", *, waits: bool) -> None:
        """A group that is due rows or blocks takes them within as many steps as a block has tokens, if all that may be
        preempted for it is enough."""
        state, kv = self._state, self._state.kv
        free = [each for each in held if self._is_preemptible(each) or self._has_kept_for_a_slice(each, held)]
        lower = [each for each in free if each.request.priority > group.request.priority]
        equal = [each for each in free if each.request.priority == group.request.priority]
        misses = waits and not state.rows.releasing
        misses = misses and (shortage <= 0 or self._blocks_due(held, group, shortage + kv.num_available))
        if misses:
            shares = self._shares(state.rows.max_rows)
            left = {each: blocks for each, blocks in held.items() if each not in lower}
            for each in sorted(equal, key=lambda one: (self._num_computed(one), -one.order)):
                tenant = each.request.tenant
                if tenant in self._tenants_above(left) or self._num_rows(left, tenant) > shares[tenant]:
                    del left[each]
            num_freed = self._num_blocks(held) - self._num_blocks(left)
            num_rows = sum(held[each].num_rows for each in held if each not in left)
            misses = num_freed >= shortage and num_rows + state.rows.num_free >= len(group.unfinished)
        self._due_since = self._since(self._due_since) if misses else None
        late = misses and self._since(self._due_since) + kv.block_size < state.last_planned
        assert not late, f"{group} is due, and others keep more than their share"

    def _since(self, first: int | None) -> int:
        return self._state.last_planned if first is None else first

    def _has_kept_for_a_slice(self, group: RequestGroup, held: "_BlocksByGroup") -> bool:
        """Whether a group that was preempted too often may be once more, for a tenant below its share."""
        state, tenant = self._state, group.request.tenant
        if not state.policy.order.fair or state.shares.num_active < 2:
            return False
        running = state.running_sequences(group)
        if group.request.beam is None and any(each.num_computed < len(each.tokens) for each in running):
            return False
        if group.caught_up_s is None:
            return False
        above = self._num_rows(held, tenant) > self._shares(state.rows.max_rows)[tenant]
        within = state.now_s - group.caught_up_s < state.policy.order.share_slice_s
        return not within and (above or tenant in self._tenants_above(held))

    def _num_computed(self, group: RequestGroup) -> int:
        return sum(self._state.num_computed(sequence) for sequence in self._state.running_sequences(group))

    def _may_take(self, left: "_BlocksByGroup", taken: list[RequestGroup], *, blocks: bool) -> bool:
        """Whether there is an order in which each is taken from a tenant above its share of the rows, or of the blocks
        if they are due."""
        if not taken:
            return True
        shares = self._shares(self._state.rows.max_rows)
        for last in taken:
            tenant, others = last.request.tenant, [each for each in taken if each is not last]
            before = {each: held for each, held in left.items() if each not in others}
            above = blocks and tenant in self._tenants_above(before)
            above = above or self._num_rows(before, tenant) > shares[tenant]
            if above and self._may_take(left, others, blocks=blocks):
                return True
        return False

    def _held(self, group: RequestGroup) -> "_GroupBlocks":
        """Its blocks and rows; a reserved block has no number yet, but its row."""
        blocks, tables, sequences = set(), self._state.kv.tables, self._state.running_sequences(group)
        for sequence in sequences:
            assert sequence.row is not None, sequence
            blocks |= {(block, -1) for block in tables.of(sequence.row).tolist()}
            blocks |= {(-1 - i, sequence.row) for i in range(tables.reserved.item(sequence.row))}
        return _GroupBlocks(frozenset(blocks), len(sequences))

    def _num_rows(self, held: "_BlocksByGroup", tenant: str) -> int:
        return sum(some.num_rows for each, some in held.items() if each.request.tenant == tenant)

    def _tenants_above(self, held: "_BlocksByGroup") -> set[str]:
        shares = self._shares(self._state.kv.pool.num_in_service)
        tenants = {each.request.tenant for each in held}
        return {tenant for tenant in tenants if self._num_blocks(held, tenant) > shares[tenant]}

    def _num_blocks(self, held: "_BlocksByGroup", tenant: str | None = None) -> int:
        """Of one tenant, or of all."""
        some = [held[each].blocks for each in held if tenant is None or each.request.tenant == tenant]
        return len(frozenset().union(*some))

    def _blocks_due(self, held: "_BlocksByGroup", group: RequestGroup, num_more: int) -> bool:
        tenant = group.request.tenant
        return self._num_blocks(held, tenant) + num_more <= self._shares(self._state.kv.pool.num_in_service)[tenant]

    def _running(self) -> set[RequestGroup]:
        return {group for group in self._state.groups.values() if self._state.running_sequences(group)}

    def _shares(self, total: int) -> dict[str, int]:
        state = self._state
        weights = {group.request.tenant: 1.0 for group in state.groups.values()}
        weights |= {tenant: weight for tenant, weight in state.policy.order.weights.items() if tenant in weights}
        sum_of_weights = sum(map(Fraction, weights.values()))
        return {tenant: max(1, int(total * Fraction(weight) / sum_of_weights)) for tenant, weight in weights.items()}

    def _failed_before(self, search: _FailedSearch) -> bool:
        failed = super()._failed_before(search)
        found: tuple[PreemptionCandidate, ...] = ()
        if failed:
            (group,) = [group for group in self._state.groups.values() if group.order == search.order]
            victims = self._victims(group.request.priority, below_share=self._below_share)
            num_rows = len(group.unfinished) - self._state.rows.num_free
            found = choose_for_waiting(victims, num_rows, search.shortage, self._state.num_freed)
            as_then = victims._replace(lower=self._as_then(victims.lower), equal=self._as_then(victims.equal))
            then = choose_for_waiting(as_then, num_rows, search.shortage, lambda each: self._freed_then[each.order])
            assert not then, f"{group} waits, and {then} could be preempted for it"
        self._found_since = self._since(self._found_since) if found else None
        late = found and self._since(self._found_since) + self._state.kv.block_size < self._state.last_planned
        assert not late, f"{found} can be preempted since step {self._found_since}"
        return failed

    def _as_then(self, victims: list[PreemptionCandidate]) -> list[PreemptionCandidate]:
        """Those that the last search found as well: without groups whose time slices have ended since."""
        return [each for each in victims if each.group.order in self._freed_then and self._is_preemptible(each.group)]


class _GroupBlocks(NamedTuple):
    """What a running group holds."""

    blocks: frozenset[tuple[int, int]]
    num_rows: int


_BlocksByGroup = dict[RequestGroup, _GroupBlocks]


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
