"""The waiting queue: request groups in the order of the policy, and their deadlines. Does not depend on blocks.

The order, from the most to the least important: aged priority class, least service of the tenant by weight (weighted
fair queuing), lane, deadline, arrival. Within the long lane of a tenant a shorter prompt may overtake an earlier one,
within bounds (`sched/overtaking.py`). With one class, one tenant, one lane, no overtaking and no deadlines this is
first come first served.

A class has two lanes, a lane has one queue per tenant, and a queue orders its groups by deadline, then arrival. The
head of a lane is that of its least-served tenant. Queues, lanes and classes are compared by the `Key` of their first
groups, whether or not these are overtaken; a class is as old as the longer waiting of those two. So all tenants of a
class age together: a long backlog gives a tenant no precedence over the others. Every heap drops removed entries
lazily: an operation costs time in the number of classes and sizes in use and the logarithm of the rest, not in the
number waiting.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isfinite
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.core.request import RequestGroup
from quire.sched.fairness import WeightedFairShares
from quire.sched.overtaking import OvertakingQueue, QueuePlace


class Lane(IntEnum):
    SHORT = 0
    LONG = 1


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """The settings of the order."""

    fair: bool = True  # tenants share by service; if not, all share one queue
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant; 1 if not listed
    ageing_s: float = 30.0  # a class rises by one each time its head has waited this long; 0: never
    long_prompt: int = 512  # tokens; prompts with at least this many to compute take the long lane
    overtaking: float = 0.05  # of the work before a long prompt and its own: what shorter ones that come later may take
    lane_patience_s: float = 1.0  # a long prompt that has waited this long no longer yields to short ones
    share_patience_s: float = 0.1  # a tenant below its share waits this long for a row before others are preempted
    share_slice_s: float = 2.0  # a group that was preempted too often keeps what is beyond a share for this long

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not (isfinite(weight) and weight > 0):
                raise ConfigError(f"Tenant {tenant!r} has weight {weight}; a weight is a number above 0.")
        times_s = {
            name: getattr(self, name) for name in ("ageing_s", "lane_patience_s", "share_patience_s", "share_slice_s")
        }
        for name, seconds in times_s.items():
            if not (isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{name} is {seconds}; it must be a number of seconds, 0 or more.", param=name)
        if not (isfinite(self.overtaking) and self.overtaking >= 0):
            raise ConfigError(
                f"overtaking is {self.overtaking}; it must be a part of the work, 0 or more, such as 0.05.",
                param="overtaking",
            )
        if self.long_prompt < 1:
            raise ConfigError(
                f"long_prompt is {self.long_prompt}; it must be at least 1 token (above the context: no long lane).",
                param="long_prompt",
            )


class Key(NamedTuple):
    """The smallest goes first."""

    aged_class: int
    service: float
    yields: bool
    deadline_s: float
    order: int


def aged_class(priority: int, waited_s: float, ageing_s: float) -> int:
    """One class better for each `ageing_s` waited."""
    if ageing_s == 0 or waited_s <= 0:
        return priority
    return priority - int(waited_s / ageing_s)


def lane(num_tokens: int, long_prompt: int) -> Lane:
    return Lane.LONG if num_tokens >= long_prompt else Lane.SHORT


def yields(lane: Lane, waited_s: float, patience_s: float) -> bool:
    """Whether the short lane goes first."""
    return lane is Lane.LONG and waited_s < patience_s


_SLACK = 32  # a heap is rebuilt when it has this many more than twice its live entries


class _QueuedGroup(NamedTuple):
    group: RequestGroup
    since_s: float
    lane: "_LaneQueue"


class _QueueEntry(NamedTuple):
    """A tenant's queue in the heap of its lane, by its first place: a lower bound, since service grows and groups are
    removed."""

    service: float
    place: QueuePlace
    tenant: str


class _LaneHead(NamedTuple):
    """The least-served tenant of a lane, and the order of its group that is admitted next."""

    service: float
    place: QueuePlace  # the first of the tenant
    order: int


class _Head(NamedTuple):
    key: Key
    order: int
    overtaker: int | None  # its order


class _LaneQueue:
    """The tenants of one lane of one class, least service first."""

    __slots__ = ("_entries", "_heap", "_share", "_shares", "_tenants")

    def __init__(self, shares: WeightedFairShares | None, overtaking: float) -> None:
        self._shares = shares
        self._share = overtaking
        self._tenants: dict[str, OvertakingQueue] = {}
        self._entries: dict[str, _QueueEntry] = {}  # the valid ones in the heap
        self._heap: list[_QueueEntry] = []

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def push(self, tenant: str, place: QueuePlace, work: int) -> None:
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = OvertakingQueue(self._share)
        queue.push(place, work)
        entry = _QueueEntry(self._service(tenant), place, tenant)
        if tenant not in self._entries or entry < self._entries[tenant]:
            self._entries[tenant] = entry
            heappush(self._heap, entry)
            self._tidy()

    def remove(self, tenant: str, order: int, *, served: bool) -> None:
        queue = self._tenants[tenant]
        queue.remove(order, served=served)
        if not queue:
            del self._tenants[tenant], self._entries[tenant]
            self._tidy()

    def head(self) -> _LaneHead | None:
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry.tenant) is not entry:
                heappop(self._heap)
                continue
            queue = self._tenants[entry.tenant]
            service, place = self._service(entry.tenant), queue.first()
            if service != entry.service or place != entry.place:
                self._entries[entry.tenant] = newer = _QueueEntry(service, place, entry.tenant)
                heapreplace(self._heap, newer)
                if self._heap[0] is not newer:
                    continue
            return _LaneHead(service, place, queue.head().order)
        return None

    def only_head(self) -> int | None:
        """The order of the head if exactly one tenant waits in this lane, else None."""
        if len(self._tenants) != 1:
            return None
        (queue,) = self._tenants.values()
        return queue.head().order

    def _service(self, tenant: str) -> float:
        return 0.0 if self._shares is None else self._shares.service(tenant)

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._tenants) + _SLACK:
            self._heap = sorted(self._entries.values())


class _ClassQueue:
    """The two lanes of one class."""

    __slots__ = ("_policy", "_queued", "base_class", "long", "short")

    def __init__(
        self,
        base_class: int,
        policy: OrderPolicy,
        queued: Mapping[int, _QueuedGroup],
        shares: WeightedFairShares | None,
    ) -> None:
        self.base_class = base_class
        self.short = _LaneQueue(shares, 0.0)
        self.long = _LaneQueue(shares, policy.overtaking)
        self._policy = policy
        self._queued = queued

    def only_head(self) -> int | None:
        """The order of the head if one tenant waits in one lane and nothing need be compared, else None."""
        if not self.long:
            return self.short.only_head()
        return None if self.short else self.long.only_head()

    def head(self, now_s: float) -> _Head:
        short, long = self.short.head(), self.long.head()
        short_waited_s = 0.0 if short is None else now_s - self._queued[short.place.order].since_s
        long_waited_s = 0.0 if long is None else now_s - self._queued[long.place.order].since_s
        aged = aged_class(self.base_class, max(short_waited_s, long_waited_s), self._policy.ageing_s)
        short_key = None if short is None else Key(aged, short.service, False, *short.place)
        if long is not None:
            long_yields = yields(Lane.LONG, long_waited_s, self._policy.lane_patience_s)
            long_key = Key(aged, long.service, long_yields, *long.place)
            if short_key is None or long_key < short_key:
                return _Head(long_key, long.order, short.order if short and long_yields else None)
        assert short is not None and short_key is not None, f"class {self.base_class} is empty"
        return _Head(short_key, short.order, None)


class WaitingQueue:
    """Request groups in, the next candidates for admission out."""

    __slots__ = ("_classes", "_policy", "_queued", "_shares", "num_tokens")

    def __init__(self, policy: OrderPolicy, shares: WeightedFairShares) -> None:
        self._policy = policy
        self._shares = shares if policy.fair else None
        self._queued: dict[int, _QueuedGroup] = {}  # by order
        self._classes: dict[int, _ClassQueue] = {}
        self.num_tokens = 0  # prompt tokens of waiting groups

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, group: RequestGroup) -> bool:
        return group.order in self._queued

    # Entry and removal.

    def push(self, group: RequestGroup, since_s: float) -> None:
        """Queue a group that has waited since `since_s`. Its tenant must be active in the shares. A preempted group
        returns to its old place."""
        assert group not in self, group
        request = group.request
        self.num_tokens += len(request.prompt)
        queue = self._classes.get(request.priority)
        if queue is None:
            queue = _ClassQueue(request.priority, self._policy, self._queued, self._shares)
            self._classes[request.priority] = queue
        is_long = lane(group.num_uncached, self._policy.long_prompt) is Lane.LONG
        queued_group = _QueuedGroup(group, since_s, queue.long if is_long else queue.short)
        self._queued[group.order] = queued_group
        deadline_s = inf if request.deadline_s is None else request.deadline_s
        queued_group.lane.push(self._tenant_of(group), QueuePlace(deadline_s, group.order), max(group.num_uncached, 1))

    def pop(self, group: RequestGroup, *, served: bool = True) -> float:
        """Remove a group that is admitted (`served`) or waits elsewhere; since when it waited."""
        queued_group = self._queued.pop(group.order)
        self.num_tokens -= len(group.request.prompt)
        queued_group.lane.remove(self._tenant_of(group), group.order, served=served)
        if not queued_group.lane:
            queue = self._classes[group.request.priority]
            if not (queue.short or queue.long):
                del self._classes[group.request.priority]
        return queued_group.since_s

    def discard(self, group: RequestGroup) -> None:
        """Remove a group if it is queued."""
        if group in self:
            self.pop(group, served=False)

    # The head.

    def candidates(self, now_s: float) -> tuple[RequestGroup, ...]:
        """The head; then the group that may overtake it if it cannot be admitted: the head of the short lane of its
        class, while the head is a long prompt that still yields. No other group may, so that rows and blocks
        accumulate for the head. Invalid after a push or a pop."""
        if len(self._classes) == 1:
            (queue,) = self._classes.values()
            lone = queue.only_head()
            if lone is not None:
                return (self._queued[lone].group,)
        head = self._head(now_s)
        if head is None:
            return ()
        first = self._queued[head.order].group
        return (first,) if head.overtaker is None else (first, self._queued[head.overtaker].group)

    def short_head(self, now_s: float) -> RequestGroup | None:
        """The head of the short lane in the class of the head."""
        best = min(self._classes.values(), key=lambda queue: queue.head(now_s).key, default=None)
        head = None if best is None else best.short.head()
        return None if head is None else self._queued[head.order].group

    @property
    def best_class(self) -> int:
        """The most important waiting class; the queue must not be empty."""
        return min(self._classes)

    def best_class_head(self, now_s: float) -> RequestGroup:
        """The head of the most important class, ageing aside; the queue must not be empty."""
        return self._queued[self._classes[self.best_class].head(now_s).order].group

    def waited_s(self, group: RequestGroup, now_s: float) -> float:
        """How long a queued group has waited, since it was preempted if it was."""
        return now_s - self._queued[group.order].since_s

    def _head(self, now_s: float) -> _Head | None:
        return min([queue.head(now_s) for queue in self._classes.values()], default=None)

    def _tenant_of(self, group: RequestGroup) -> str:
        return group.request.tenant if self._shares is not None else ""


_MIN_ENTRIES = 64  # entries below which the heap is never rebuilt


class _DeadlineEntry(NamedTuple):
    deadline_s: float
    order: int
    group: RequestGroup


class Deadlines:
    """Admission deadlines of all groups, queued or waiting for a prefix. Admitted and ended ones are dropped lazily."""

    __slots__ = ("_heap", "_limit")

    def __init__(self) -> None:
        self._heap: list[_DeadlineEntry] = []
        self._limit = _MIN_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, group: RequestGroup) -> None:
        """Watch a group that has arrived, if it has a deadline."""
        if group.request.deadline_s is None:
            return
        heappush(self._heap, _DeadlineEntry(group.request.deadline_s, group.order, group))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if _waits(entry.group)]
            heapify(self._heap)
            self._limit = max(_MIN_ENTRIES, 2 * len(self._heap))

    def expire(self, now_s: float) -> list[RequestGroup]:
        """Groups not admitted before their deadline, the earliest first; each is returned once."""
        expired = []
        while self._heap and self._heap[0].deadline_s <= now_s:
            group = heappop(self._heap).group
            if _waits(group):
                expired.append(group)
        return expired


def _waits(group: RequestGroup) -> bool:
    """Neither admitted nor ended. A group admitted once has met its deadline for good."""
    return not group.was_assigned and not group.finished
