"""Families that wait, for tests of the waiting queue."""

import numpy as np

from quire.core.ids import RequestId
from quire.core.request import Request, RequestGroup
from quire.core.sampling import RowSampling
from quire.sched.fairness import WeightedFairShares
from quire.sched.queue import OrderPolicy, WaitingQueue

SAMPLING = RowSampling()
LONG = 8  # tokens of a long prompt in these tests


def group(
    order: int,
    *,
    priority: int = 0,
    tenant: str = "",
    num_tokens: int = 1,
    deadline_s: float | None = None,
    arrived_s: float = 0.0,
) -> RequestGroup:
    prompt = np.zeros(num_tokens, dtype=np.int32)
    request = Request(RequestId(order), prompt, 4, SAMPLING, tenant=tenant, priority=priority, deadline_s=deadline_s)
    return RequestGroup(request, order, arrived_s)


def queue_of(
    groups: list[RequestGroup], policy: OrderPolicy | None = None, shares: WeightedFairShares | None = None
) -> WaitingQueue:
    queue = WaitingQueue(policy or OrderPolicy(long_prompt=LONG), shares or WeightedFairShares({}))
    for each in groups:
        queue.push(each, each.arrived_s)
    return queue


def drain(queue: WaitingQueue, now_s: float = 0.0) -> list[int]:
    """Admit all groups, always the head."""
    orders = []
    while queue:
        head = queue.candidates(now_s)[0]
        queue.pop(head)
        orders.append(head.order)
    return orders
