"""What happened to a request inside the engine, in the order it happened: the raw material of its explanation."""

from enum import Enum
from typing import NamedTuple

from quire.core.ids import RequestId


class WaitCause(Enum):
    """What a waiting request waits for."""

    ORDER = "order"  # others come first: class, share, lane, deadline or arrival
    BUDGET = "budget"  # the step's tokens were spent
    SEATS = "seats"  # every row was taken
    BLOCKS = "blocks"  # the KV cache had no room
    PRESSURE = "pressure"  # a running row was denied a block: nobody is admitted
    PREFIX = "prefix"  # another computes the same prefix; waiting for it is cheaper than computing it twice


class EventKind(Enum):
    """The kinds of event."""

    ARRIVED = "arrived"
    WAITED = "waited"  # `cause` says for what; noted when the cause changes
    SEATED = "seated"  # `tokens` of the prefix were found in the cache
    MISSED = "missed"  # `tokens` of the prompt were not; `detail` says why the first of them was not
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"  # by `other`; `tokens` had been computed
    FORKED = "forked"  # `tokens` were shared with its sibling
    FINISHED = "finished"  # `detail` is the reason


class RequestEvent(NamedTuple):
    """One moment in the life of a request."""

    step: int
    what: EventKind
    tokens: int = 0
    other: RequestId | None = None
    cause: WaitCause | None = None
    detail: str = ""
