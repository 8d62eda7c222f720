"""Who goes first, as pure functions. Knows numbers and times; nothing of queues, memory or requests.

The order, from the most to the least important: aged class, least service of the tenant by weight, lane, deadline,
arrival. With one class, one tenant, one lane and no deadlines this is first come first served.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, isfinite
from typing import NamedTuple

from quire.core.errors import ConfigError


class Lane(IntEnum):
    SHORT = 0
    LONG = 1


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """The dials of the order."""

    fair: bool = True  # tenants share by service; if not, they all stand in one queue
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants; 1 if not named
    ageing_s: float = 30.0  # a class rises by one for each so long that its head waits; 0: never
    long_prompt: int = 8192  # tokens from which on a prompt takes the long lane
    lane_patience_s: float = 10.0  # a long prompt that waited so long yields to nobody

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not (isfinite(weight) and weight > 0):
                raise ConfigError(f"Tenant {tenant!r} has weight {weight}; a weight is a number above 0.")
        for name, seconds in (("ageing_s", self.ageing_s), ("lane_patience_s", self.lane_patience_s)):
            if not (isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{name} is {seconds}; it must be a number of seconds, 0 or more.", param=name)
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
    """Whether it lets the short lane go first."""
    return lane is Lane.LONG and waited_s < patience_s


def urgent_before(deadline_s: float | None) -> float:
    """A deadline as a sort key: those without one come last."""
    return inf if deadline_s is None else deadline_s
