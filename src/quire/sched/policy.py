"""The scheduling policy, the batching regimes, and the specification that builds a scheduler.

A `SchedulerSpec` is one frozen value: the same spec builds the same scheduler again. A journal starts with it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from quire.kv.manager import KVManager
from quire.sched.cost_model import UNMEASURED, Constants, CostTable
from quire.sched.queue import OrderPolicy
from quire.sched.reservation import Overcommit
from quire.sched.speculation import SpeculationPolicy


@dataclass(frozen=True, slots=True)
class Regime:
    """Which techniques, from static batching to prefix caching, are switched on."""

    name: str = "prefix"
    sealed: bool = False  # static batching: a batch is filled once and runs until its last sequence ends
    window_s: float = 0.0  # how long a sealed batch waits for more requests, unless it is full
    padded: bool = False  # every row computes as many positions as the longest
    contiguous: bool = False  # the whole length is reserved at admission
    chunked: bool = True  # chunked prefill
    prefix: bool = True  # prefix caching


STATIC = Regime("static", sealed=True, padded=True, contiguous=True, chunked=False, prefix=False)
DYNAMIC = Regime("dynamic", sealed=True, window_s=0.1, padded=True, contiguous=True, chunked=False, prefix=False)
ORCA = Regime("continuous", contiguous=True, chunked=False, prefix=False)
PAGED = Regime("paged", chunked=False, prefix=False)
CHUNKED = Regime("chunked", prefix=False)
PREFIX = Regime()
REGIMES = {regime.name: regime for regime in (STATIC, DYNAMIC, ORCA, PAGED, CHUNKED, PREFIX)}


class CapturedSizes(NamedTuple):
    """Step sizes with a captured CUDA graph: a slightly smaller step takes as long."""

    rows: int  # most decoding rows
    prompt_tokens: tuple[int, ...]  # in the same step, ascending


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of one scheduler."""

    regime: Regime = PREFIX
    order: OrderPolicy = field(default_factory=OrderPolicy)
    overcommit: Overcommit = Overcommit.HEDGE
    itl_target_s: float | None = None  # target step time; None: the token budget alone decides
    ttft_target_s: float | None = None  # target of what prompts wait for; None: the ITL target is kept whatever waits
    itl_per_decode: float = 0.0  # the target is at least this factor times the decode-only step
    max_step_s: float | None = None  # largest predicted time of a step with prompts; None: the token budget decides
    captured_sizes: tuple[CapturedSizes, ...] = ()  # ascending
    max_preemptions: int = 3  # of one request group; then its whole length is reserved, and only a share takes rows
    max_waiting: int | None = None  # request groups
    max_waiting_tokens: int | None = None  # prompt tokens of waiting groups
    speculation: SpeculationPolicy = field(default_factory=SpeculationPolicy)
    num_stages: int = 1  # of a pipeline

    def captured_beside(self, num_rows: int) -> tuple[int, ...]:
        """Prompt sizes captured for a step with this many decoding rows; empty if no such step is captured."""
        return next((sizes.prompt_tokens for sizes in self.captured_sizes if sizes.rows >= num_rows), ())

    def with_regime(self, regime: Regime) -> "Policy":
        return replace(self, regime=regime)


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """Sizes, cost constants and policy of one scheduler."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_step_tokens: int
    num_host_blocks: int = 0
    policy: Policy = field(default_factory=Policy)
    constants: Constants = UNMEASURED
    largest_chunk: int = 2048  # tokens; the chunk size assumed for recomputation
    seconds_per_block: float | None = None  # one-way copy to the host; None: there is no host tier
    resident_limit: int | None = None  # blocks that unheld prefixes may touch at first; None: all

    def kv(self, worth_keeping: Callable[[int, int], bool]) -> KVManager:
        return KVManager(
            self.num_blocks,
            self.block_size,
            self.max_rows,
            prefix=self.policy.regime.prefix,
            num_host_blocks=self.num_host_blocks,
            resident_limit=self.resident_limit,
            worth_keeping=worth_keeping,
        )

    def cost(self) -> CostTable:
        table = CostTable(self.constants, self.largest_chunk)
        table.set_transfer(self.seconds_per_block)
        return table

    def to_json(self) -> str:
        plain = asdict(self)
        plain["policy"]["overcommit"] = self.policy.overcommit.value
        plain["policy"] = {_JSON_KEYS.get(name, name): value for name, value in plain["policy"].items()}
        return json.dumps(plain)


# The header of a journal keeps the keys of its first version.
_JSON_KEYS = {"overcommit": "stance", "captured_sizes": "grains"}


def read_spec(text: str) -> SchedulerSpec:
    """The inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    plain = json.loads(text)
    policy = plain.pop("policy")
    regime, order = Regime(**policy.pop("regime")), OrderPolicy(**policy.pop("order"))
    constants = Constants(**plain.pop("constants"))
    sizes = tuple(CapturedSizes(rows, tuple(prompt_tokens)) for rows, prompt_tokens in policy.pop("grains"))
    overcommit = Overcommit(policy.pop("stance"))
    speculation = SpeculationPolicy(**policy.pop("speculation"))
    made = Policy(
        regime=regime, order=order, overcommit=overcommit, captured_sizes=sizes, speculation=speculation, **policy
    )
    return SchedulerSpec(policy=made, constants=constants, **plain)
