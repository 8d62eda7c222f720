"""Everything about a scheduler that can be chosen, in one place; and the regimes of the arc as choices of it.

Everything that a scheduler is built from, as one value: the same blueprint builds the same scheduler again.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from quire.kv.manager import KVManager
from quire.sched.cost_model import UNMEASURED, Constants, CostTable
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit


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


class CapturedSizes(NamedTuple):
    """Sizes of steps that a device computes as soon as anything a little smaller."""

    rows: int  # up to so many decode
    prompt_tokens: tuple[int, ...]  # beside them, ascending


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices of one scheduler."""

    regime: Regime = PREFIX
    order: OrderPolicy = field(default_factory=OrderPolicy)
    stance: Overcommit = Overcommit.HEDGE
    itl_target_s: float | None = None  # no step should take longer; None: the token budget alone decides
    itl_stretch: float = 1.0  # so many times longer it may take, at the most, while prompts pile up
    itl_per_decode: float = 0.0  # or so many times as long as without prompts, if that is longer
    grains: tuple[CapturedSizes, ...] = ()  # ascending
    max_preemptions: int = 3  # of one family; then it comes back with its whole length promised
    max_waiting: int | None = None  # families
    max_waiting_tokens: int | None = None  # of their prompts

    def grains_beside(self, num_rows: int) -> tuple[int, ...]:
        """Of prompts in a step in which so many decode; none if nothing is known of such steps."""
        return next((grains.prompt_tokens for grains in self.grains if grains.rows >= num_rows), ())

    def with_regime(self, regime: Regime) -> "Policy":
        return replace(self, regime=regime)


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """A machine's sizes, what its steps are taken to cost, and a policy."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_step_tokens: int
    num_host_blocks: int = 0
    policy: Policy = field(default_factory=Policy)
    constants: Constants = UNMEASURED
    largest_chunk: int = 2048  # that recomputing is reckoned with
    seconds_per_block: float | None = None  # to carry one to the host; None: there is nowhere to carry it

    def kv(self, worth_keeping: Callable[[int, int], bool]) -> KVManager:
        return KVManager(
            self.num_blocks,
            self.block_size,
            self.max_rows,
            prefix=self.policy.regime.prefix,
            num_host_blocks=self.num_host_blocks,
            worth_keeping=worth_keeping,
        )

    def cost(self) -> CostTable:
        table = CostTable(self.constants, self.largest_chunk)
        table.set_transfer(self.seconds_per_block)
        return table

    def to_json(self) -> str:
        plain = asdict(self)
        plain["policy"]["stance"] = self.policy.stance.value
        return json.dumps(plain)


def read_blueprint(text: str) -> SchedulerSpec:
    """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    plain = json.loads(text)
    policy = plain.pop("policy")
    regime, order = Regime(**policy.pop("regime")), OrderPolicy(**policy.pop("order"))
    constants = Constants(**plain.pop("constants"))
    grains = tuple(CapturedSizes(rows, tuple(prompt_tokens)) for rows, prompt_tokens in policy.pop("grains"))
    made = Policy(regime=regime, order=order, stance=Overcommit(policy.pop("stance")), grains=grains, **policy)
    return SchedulerSpec(policy=made, constants=constants, **plain)
