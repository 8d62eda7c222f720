"""Preemption: selects the request groups to preempt when blocks or rows run out.

The choice of victims is pure functions over the running groups. A preempted group keeps its place in the queue; its
blocks stay in the prefix tree until they are evicted.

The share of a tenant is its part of the rows by weight among the tenants with requests, in whole rows, at least one. A
tenant gets rows back only up to its share, and loses them only down to its share: so no two tenants preempt each other
in turns. Rows that come free by themselves go to any tenant.

KV blocks are shared by the same rule. Where no set of groups leaves every tenant its share, a group is taken from a
tenant that is above a share of its own before, which may leave it below by a part of that group: one of many rows, or
of a long context. A waiting group that stays within the shares of its tenant gets its rows and blocks if the groups of
tenants above theirs are preemptible: without what they hold beyond, at most the shares of all others are held. The
share is the tenant's part of the blocks in service. It holds the blocks in the tables of its rows, each once, and those
reserved for its rows; a block that several tenants hold counts for each. All is counted from the tables when a search
needs it: nothing is kept between steps.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from quire.core.ids import RequestId, Row
from quire.core.request import RequestGroup, SequenceState
from quire.kv.manager import KVManager
from quire.sched.state import SchedulerState


class PreemptionCandidate(NamedTuple):
    """A running group that could be preempted."""

    group: RequestGroup
    num_rows: int
    num_computed: int  # positions: the cost of recomputation grows with them


def victim_key(candidate: PreemptionCandidate, above_share: frozenset[str] = frozenset()) -> tuple[int, bool, int, int]:
    """The lowest priority class first, in it tenants above their share, then the least lost work, then the latest
    arrival."""
    request = candidate.group.request
    within = request.tenant not in above_share
    return (-request.priority, within, candidate.num_computed, -candidate.group.order)


def choose_victim(
    running: Iterable[PreemptionCandidate],
    is_preemptible: Callable[[RequestGroup], bool],
    num_freed: Callable[[RequestGroup], int],
    above_share: frozenset[str] = frozenset(),
) -> RequestGroup | None:
    """The group to preempt so that others can continue: of its class one of a tenant above its share of the blocks, if
    there is one. Never the oldest of the highest class among the other tenants (of all, if there are no others), and
    none whose preemption frees no block."""

    def precedence(each: PreemptionCandidate) -> tuple[int, bool, int]:
        request = each.group.request
        return (request.priority, request.tenant in above_share, each.group.order)

    candidates = list(running)
    first = min(candidates, key=precedence, default=None)
    for each in sorted(candidates, key=lambda each: victim_key(each, above_share)):
        if each is not first and is_preemptible(each.group) and num_freed(each.group) > 0:
            return each.group
    return None


class PreemptionCandidates(NamedTuple):
    """What may be preempted for a waiting group."""

    lower: list[PreemptionCandidate]  # of lower classes
    equal: list[PreemptionCandidate]  # of its class, each no larger than what its tenant can spare
    num_spare: dict[str, int]  # rows of the tenants of `equal` beyond their shares, if all `lower` are preempted


def choose_for_waiting(
    victims: PreemptionCandidates, num_rows: int, num_blocks: int, num_freed: Callable[[RequestGroup], int]
) -> tuple[PreemptionCandidate, ...]:
    """A minimal set that frees this many rows and blocks and leaves every tenant its share; empty if none is found.

    Least lost work first. Where that frees too few blocks, the groups that free most: then a set is found if there is
    one, unless groups of several rows are among them.
    """
    by_work = _within_spare(sorted(victims.equal, key=victim_key), victims.num_spare)
    chosen = _minimal_set(victims.lower + by_work, num_rows, num_blocks, num_freed)
    if chosen or len(by_work) == len(victims.equal):
        return chosen
    by_blocks = _within_spare(_most_blocks_first(victims, num_freed), victims.num_spare)
    return _minimal_set(victims.lower + by_blocks, num_rows, num_blocks, num_freed)


def can_suffice(
    victims: PreemptionCandidates, num_rows: int, num_blocks: int, num_freed: Callable[[RequestGroup], int]
) -> bool:
    """Whether the victims might free this many rows and blocks, if each group of several rows counted as one.

    Depends on no order, so a search that cannot succeed now cannot while the same groups have rows: each block granted
    to one of them is a block fewer to free.
    """
    of_equal: Counter[str] = Counter()
    for each in victims.equal:
        of_equal[each.group.request.tenant] += each.num_rows
    most_rows = sum(each.num_rows for each in victims.lower)
    most_rows += sum(min(victims.num_spare[tenant], count) for tenant, count in of_equal.items())
    if most_rows < num_rows:
        return False
    as_one = [each._replace(num_rows=1) for each in _most_blocks_first(victims, num_freed)]
    most = victims.lower + _within_spare(as_one, victims.num_spare)
    return sum(num_freed(each.group) for each in most) >= num_blocks


def _most_blocks_first(
    victims: PreemptionCandidates, num_freed: Callable[[RequestGroup], int]
) -> list[PreemptionCandidate]:
    return sorted(victims.equal, key=lambda each: (-num_freed(each.group), victim_key(each)))


def _within_spare(some: list[PreemptionCandidate], num_spare: Mapping[str, int]) -> list[PreemptionCandidate]:
    """The first ones that leave every tenant its share."""
    num_left, kept = dict(num_spare), []
    for each in some:
        tenant = each.group.request.tenant
        if each.num_rows <= num_left[tenant]:
            num_left[tenant] -= each.num_rows
            kept.append(each)
    return kept


def _minimal_set(
    candidates: list[PreemptionCandidate], num_rows: int, num_blocks: int, num_freed: Callable[[RequestGroup], int]
) -> tuple[PreemptionCandidate, ...]:
    """A minimal set that frees this many rows and blocks; empty if all together do not."""
    chosen: list[PreemptionCandidate] = []
    freed: dict[int, int] = {}

    def enough(some: list[PreemptionCandidate]) -> bool:
        rows, blocks = sum(each.num_rows for each in some), sum(freed[each.group.order] for each in some)
        return rows >= num_rows and blocks >= num_blocks

    for each in sorted(candidates, key=victim_key):
        if enough(chosen):
            break
        freed[each.group.order] = num_freed(each.group)
        chosen.append(each)
    if not enough(chosen):
        return ()
    for each in tuple(chosen):
        without = [other for other in chosen if other is not each]
        if enough(without):
            chosen = without
    return tuple(chosen)


class BlockReaders:
    """The blocks of some rows, each with the number of these rows that hold it, and the rows' reservations."""

    __slots__ = ("_blocks", "_counts", "_kv", "num_held")

    def __init__(self, kv: KVManager, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self._kv = kv
        self._blocks, self._counts = np.unique(np.concatenate([kv.tables.of(row) for row in rows]), return_counts=True)
        self.num_held = len(self._blocks) + sum(kv.tables.reserved.item(row) for row in rows)

    def remove(self, rows: Iterable[Row]) -> None:
        """Count without these rows."""
        for row in rows:
            at = np.searchsorted(self._blocks, self._kv.tables.of(row))
            self._counts[at] -= 1
            self.num_held -= int(np.count_nonzero(self._counts[at] == 0)) + self._kv.tables.reserved.item(row)

    def restore(self, rows: Iterable[Row]) -> None:
        """Undo `remove`."""
        for row in rows:
            at = np.searchsorted(self._blocks, self._kv.tables.of(row))
            self.num_held += int(np.count_nonzero(self._counts[at] == 0)) + self._kv.tables.reserved.item(row)
            self._counts[at] += 1


class TenantBlocks:
    """What each tenant holds, and what it would hold without the groups taken from it. No row is being released."""

    __slots__ = ("_all", "_held", "_num_before", "_num_rows", "_state")

    def __init__(self, state: SchedulerState) -> None:
        assert not state.rows.releasing, "rows are being released"
        self._state = state
        rows: dict[str, list[Row]] = {}
        for row, sequence in state.rows.assigned.items():
            rows.setdefault(sequence.request.tenant, []).append(row)
        self._held = {tenant: BlockReaders(state.kv, some) for tenant, some in rows.items()}
        self._num_rows = Counter({tenant: len(some) for tenant, some in rows.items()})
        self._all = BlockReaders(state.kv, state.rows.assigned)
        self._num_before = self._all.num_held

    @property
    def num_freed(self) -> int:
        """Blocks and reservations that the groups taken so far free together."""
        return self._num_before - self._all.num_held

    def num_above(self, tenant: str) -> int:
        """Blocks that a tenant holds beyond its share; negative if it is below."""
        held = self._held.get(tenant)
        share = self._state.shares.part(tenant, self._state.kv.pool.num_in_service)
        return (0 if held is None else held.num_held) - share

    def may_take(self, group: RequestGroup) -> bool:
        """Whether the tenant of a group is above its share of the blocks or of the rows."""
        tenant, state = group.request.tenant, self._state
        return self.num_above(tenant) > 0 or self._num_rows[tenant] > state.shares.part(tenant, state.rows.max_rows)

    def take(self, group: RequestGroup) -> None:
        """Count without a running group."""
        tenant, rows = group.request.tenant, self._rows_of(group)
        self._num_rows[tenant] -= len(rows)
        self._held[tenant].remove(rows)
        self._all.remove(rows)

    def give_back(self, group: RequestGroup) -> None:
        """Undo `take`."""
        tenant, rows = group.request.tenant, self._rows_of(group)
        self._num_rows[tenant] += len(rows)
        self._held[tenant].restore(rows)
        self._all.restore(rows)

    def _rows_of(self, group: RequestGroup) -> list[Row]:
        return [sequence.row for sequence in self._state.running_sequences(group) if sequence.row is not None]


def choose_above_share(
    held: TenantBlocks,
    lower: list[PreemptionCandidate],
    equal: list[PreemptionCandidate],
    num_rows: int,
    num_blocks: int,
) -> tuple[PreemptionCandidate, ...]:
    """A minimal set that frees this many rows and blocks together, also blocks that only its members share; empty if
    none is found. First groups of lower classes, then of its class, while their tenants are above a share: of the
    tenant with the most blocks above first. In each the least lost work."""
    above = {tenant: held.num_above(tenant) for tenant in {each.group.request.tenant for each in equal}}
    ordered = sorted(equal, key=lambda each: (-above[each.group.request.tenant], victim_key(each)))
    taken: list[PreemptionCandidate] = []

    def enough(some: list[PreemptionCandidate]) -> bool:
        return held.num_freed >= num_blocks and sum(each.num_rows for each in some) >= num_rows

    for each in [*sorted(lower, key=victim_key), *ordered]:
        if enough(taken):
            break
        if each in lower or held.may_take(each.group):
            held.take(each.group)
            taken.append(each)
    if not enough(taken):
        return ()
    for each in tuple(taken):
        held.give_back(each.group)
        without = [other for other in taken if other is not each]
        if enough(without):
            taken = without
        else:
            held.take(each.group)
    return tuple(taken)


class _FailedSearch(NamedTuple):
    """A search without result: it holds while the same groups have rows and no less is missing, for as many steps as a
    block has tokens: rows grow, tenants come above their shares, time slices end."""

    order: int
    rows: int  # its generation
    weight: float  # of the active tenants, if their shares count
    period: int  # of steps
    missing_rows: int
    shortage: int


class Preemption:
    """Preempts groups, least lost work first, each a bounded number of times, then once a time slice for a share."""

    __slots__ = ("_failed_search", "_state")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._failed_search: _FailedSearch | None = None

    def preempt_for_block(self, by: RequestId) -> bool:
        """Preempt a group so that a running row gets a block; False if none may be, or need be, preempted.

        Invariant (b): while blocks are being released, wait for them.
        """
        state = self._state
        if state.rows.releasing or state.calendar.num_finishing:
            return False
        victim = choose_victim(self._candidates(), self._is_preemptible, state.num_freed, self._above_share())
        if victim is None:
            return False
        state.preempt(victim, by)
        return True

    def outranks(self, priority: int) -> bool:
        """Whether a class is higher than that of some running row. Ageing does not count: two ageing classes would
        preempt each other forever."""
        return self._state.rows.lowest_class > priority

    def is_below_share(self, group: RequestGroup, now_s: float) -> bool:
        """Whether rows are due to a waiting group: its tenant is within its share also with it, for some time now."""
        state, order = self._state, self._state.policy.order
        if not order.fair or state.policy.regime.sealed or state.shares.num_active < 2:
            return False
        tenant = group.request.tenant
        fits = state.rows.num_of(tenant) + len(group.unfinished) <= self._share(tenant)
        return fits and state.waiting.waited_s(group, now_s) >= order.share_patience_s

    def preempt_for_waiting(self, group: RequestGroup, num_rows: int, shortage: int, *, below_share: bool) -> bool:
        """Preempt a minimal set of groups, so that this group fits, which lacks `shortage` blocks: groups of lower
        classes, and if its tenant is below its share, groups of its class whose tenants are above theirs.

        This is not memory pressure: no running row was denied a block.
        """
        state, rows, priority = self._state, self._state.rows, group.request.priority
        missing_rows = num_rows - rows.num_free
        if not rows.assigned:  # what is missing is held for other engines
            return False
        if rows.releasing or (not below_share and missing_rows > rows.num_below(priority)):
            return False
        weight = state.shares.active_weight if below_share else 0.0
        period = state.last_planned // state.kv.block_size
        search = _FailedSearch(group.order, rows.generation, weight, period, missing_rows, shortage)
        if self._failed_before(search):
            return False
        victims, num_freed = self._victims(priority, below_share=below_share), cache(state.num_freed)
        chosen = choose_for_waiting(victims, missing_rows, shortage, num_freed)
        if not chosen and (below_share or shortage > 0):
            chosen = self._choose_above_share(group, missing_rows, shortage, below_share=below_share)
        found = chosen or can_suffice(victims, missing_rows, shortage, num_freed)
        self._failed_search = None if found else search
        for each in chosen:
            if each.group.request.priority > priority:
                state.counters.class_preemptions += 1
            else:
                state.counters.share_preemptions += 1
            state.preempt(each.group, group.request.id)
        return bool(chosen)

    def _victims(self, priority: int, *, below_share: bool) -> PreemptionCandidates:
        lower, equal = self._preemptible(priority)
        if not below_share:
            return PreemptionCandidates(lower, [], {})
        num_lower: Counter[str] = Counter()
        for each in lower:
            num_lower[each.group.request.tenant] += each.num_rows
        num_spare = {
            tenant: self._state.rows.num_of(tenant) - num_lower[tenant] - self._share(tenant)
            for tenant in {each.group.request.tenant for each in equal}
        }
        return PreemptionCandidates(
            lower, [each for each in equal if each.num_rows <= num_spare[each.group.request.tenant]], num_spare
        )

    def _choose_above_share(
        self, group: RequestGroup, num_rows: int, shortage: int, *, below_share: bool
    ) -> tuple[PreemptionCandidate, ...]:
        """Lower classes, and all groups of tenants above a share, if the group stays within those of its own."""
        held = TenantBlocks(self._state)
        lower, equal = self._preemptible(group.request.priority)
        num_more = shortage + self._state.kv.num_available  # blocks that no row holds yet
        due = below_share and (shortage <= 0 or held.num_above(group.request.tenant) + num_more <= 0)
        return choose_above_share(held, lower, equal if due else [], num_rows, shortage)

    def _preemptible(self, priority: int) -> tuple[list[PreemptionCandidate], list[PreemptionCandidate]]:
        """Groups of lower classes, and of this class."""
        over = self._slices_over()
        free = [each for each in self._candidates() if self._is_preemptible(each.group) or each.group in over]
        lower = [each for each in free if each.group.request.priority > priority]
        return lower, [each for each in free if each.group.request.priority == priority]

    def _above_share(self) -> frozenset[str]:
        """The tenants that hold more blocks than their share; none if shares do not count."""
        state = self._state
        if not state.policy.order.fair or state.shares.num_active < 2:
            return frozenset()
        held = TenantBlocks(state)
        tenants = {sequence.request.tenant for sequence in state.rows.assigned.values()}
        return frozenset(tenant for tenant in tenants if held.num_above(tenant) > 0)

    def _share(self, tenant: str) -> int:
        return self._state.shares.part(tenant, self._state.rows.max_rows)

    def _failed_before(self, search: _FailedSearch) -> bool:
        """Whether the search would fail as last time. Rows that only continue to compute do not help."""
        last = self._failed_search
        if last is None or last[:4] != search[:4]:
            return False
        return search.missing_rows >= last.missing_rows and search.shortage >= last.shortage

    def _is_preemptible(self, group: RequestGroup) -> bool:
        return group.num_preemptions < self._state.policy.max_preemptions

    def _slices_over(self) -> set[RequestGroup]:
        """Groups that were preempted too often, and have kept their rows for a time slice since all their tokens were
        computed again, while their tenants are above a share. Without one, any of them could keep every row to its
        end; recomputing is not part of it, so each slice makes progress."""
        state, order = self._state, self._state.policy.order
        if not order.fair or state.shares.num_active < 2:
            return set()
        kept = {sequence.group for sequence in state.rows.assigned.values()}
        kept = {group for group in kept if not self._is_preemptible(group) and self._is_slice_over(group)}
        held = TenantBlocks(state) if kept else None
        return {group for group in kept if held is not None and held.may_take(group)}

    def _is_slice_over(self, group: RequestGroup) -> bool:
        state = self._state
        since_s = group.caught_up_s
        return since_s is not None and state.now_s - since_s >= state.policy.order.share_slice_s

    def _candidates(self) -> Iterator[PreemptionCandidate]:
        """Every running group, once."""
        state = self._state
        num_computed = state.calendar.num_computed(state.last_planned).tolist()
        seen: set[int] = set()
        for row, sequence in state.rows.assigned.items():
            group = sequence.group
            if sequence.state is not SequenceState.RUNNING or group.order in seen:
                continue
            if len(group.sequences) == 1:
                yield PreemptionCandidate(group, 1, max(num_computed[row], sequence.num_planned))
            else:
                seen.add(group.order)
                sequences = state.running_sequences(group)
                yield PreemptionCandidate(
                    group, len(sequences), sum(state.num_computed(member) for member in sequences)
                )
