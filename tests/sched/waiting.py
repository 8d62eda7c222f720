"""Families that wait, for tests of the waiting room."""

import numpy as np

from quire.core.ids import RequestId
from quire.core.request import Family, Request
from quire.core.sampling import RowSampling
from quire.sched.order import OrderPolicy
from quire.sched.queue import WaitingRoom
from quire.sched.shares import Shares

SAMPLING = RowSampling()
LONG = 8  # tokens of a long prompt in these tests


def family(
    order: int,
    *,
    priority: int = 0,
    tenant: str = "",
    num_tokens: int = 1,
    deadline_s: float | None = None,
    arrived_s: float = 0.0,
) -> Family:
    prompt = np.zeros(num_tokens, dtype=np.int32)
    request = Request(RequestId(order), prompt, 4, SAMPLING, tenant=tenant, priority=priority, deadline_s=deadline_s)
    return Family(request, order, arrived_s)


def room_of(families: list[Family], policy: OrderPolicy | None = None, shares: Shares | None = None) -> WaitingRoom:
    room = WaitingRoom(policy or OrderPolicy(long_prompt=LONG), shares or Shares({}))
    for each in families:
        room.push(each, each.arrived_s)
    return room


def drain(room: WaitingRoom, now_s: float = 0.0) -> list[int]:
    """Admit everybody, always the head."""
    orders = []
    while room:
        head = room.candidates(now_s)[0]
        room.pop(head)
        orders.append(head.order)
    return orders
