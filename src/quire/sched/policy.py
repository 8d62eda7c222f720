"""Everything about a scheduler that can be chosen, in one place; and the regimes of the arc as choices of it."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire.sched.order import OrderPolicy
from quire.sched.reserve import Stance


@dataclass(frozen=True, slots=True)
class Regime:
    """Which steps of the arc from static batching to prefix reuse are switched on."""

    name: str = "prefix"
    sealed: bool = False  # a batch is filled once and runs until its last member is done
    window_s: float = 0.0  # a sealed batch waits so long for more members, unless it is full
    padded: bool = False  # every member computes as many positions as the longest
    contiguous: bool = False  # the whole length is reserved when a sequence sits down
    chunked: bool = True  # a prompt may be computed in pieces
    prefix: bool = True  # what was computed before is found again


STATIC = Regime("static", sealed=True, padded=True, contiguous=True, chunked=False, prefix=False)
DYNAMIC = Regime("dynamic", sealed=True, window_s=0.1, padded=True, contiguous=True, chunked=False, prefix=False)
ORCA = Regime("continuous", contiguous=True, chunked=False, prefix=False)
PAGED = Regime("paged", chunked=False, prefix=False)
CHUNKED = Regime("chunked", prefix=False)
PREFIX = Regime()
REGIMES = {regime.name: regime for regime in (STATIC, DYNAMIC, ORCA, PAGED, CHUNKED, PREFIX)}


class Grains(NamedTuple):
    """Sizes of steps that a device computes as soon as anything a little smaller."""

    rows: int  # up to so many decode
    prompt_tokens: tuple[int, ...]  # beside them, ascending


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices of one scheduler."""

    regime: Regime = PREFIX
    order: OrderPolicy = field(default_factory=OrderPolicy)
    stance: Stance = Stance.HEDGE
    itl_target_s: float | None = None  # no step should take longer; None: the token budget alone decides
    itl_stretch: float = 1.0  # so many times longer it may take, at the most, while prompts pile up
    itl_per_decode: float = 0.0  # or so many times as long as without prompts, if that is longer
    grains: tuple[Grains, ...] = ()  # ascending
    max_preemptions: int = 3  # of one family; then it comes back with its whole length promised
    max_waiting: int | None = None  # families
    max_waiting_tokens: int | None = None  # of their prompts

    def grains_beside(self, num_rows: int) -> tuple[int, ...]:
        """Of prompts in a step in which so many decode; none if nothing is known of such steps."""
        return next((grains.prompt_tokens for grains in self.grains if grains.rows >= num_rows), ())

    def with_regime(self, regime: Regime) -> "Policy":
        return replace(self, regime=regime)
