"""Events of a request inside the engine, in the order they happened: what its explanation is made of."""

from enum import Enum
from typing import NamedTuple

from quire.core.ids import RequestId


class WaitCause(Enum):
    """What a waiting request waits for. Clients read the values."""

    ORDER = "order"  # other requests come first: class, fair share, lane, deadline or arrival
    BUDGET = "budget"  # the step's token budget was used up
    ROWS = "seats"  # every row was assigned
    BLOCKS = "blocks"  # the KV cache had too few blocks
    PRESSURE = "pressure"  # a running row was denied a block: nothing is admitted
    PREFIX = "prefix"  # another request computes the same prefix: waiting is cheaper than computing it twice


class EventKind(Enum):
    """The kinds of event. Clients read the values."""

    ARRIVED = "arrived"
    WAITED = "waited"  # `cause` says for what; noted when the cause changes
    ADMITTED = "seated"  # it got a row; `tokens` of the prefix were found in the cache
    MISSED = "missed"  # `tokens` of the prompt were not found; `detail` is the reason for the first of them
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"  # by `other`; `tokens` had been computed
    FORKED = "forked"  # `tokens` were shared with its sibling
    FINISHED = "finished"  # `detail` is the reason


class RequestEvent(NamedTuple):
    """One event of a request."""

    step: int
    what: EventKind
    tokens: int = 0
    other: RequestId | None = None
    cause: WaitCause | None = None
    detail: str = ""
