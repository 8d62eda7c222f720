"""Everything that a scheduler is built from, as one value: the same blueprint builds the same scheduler again."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from quire.kv.manager import KVManager
from quire.sched.cost import UNMEASURED, Constants, CostTable
from quire.sched.order import OrderPolicy
from quire.sched.policy import Grains, Policy, Regime
from quire.sched.reserve import Stance


@dataclass(frozen=True, slots=True)
class Blueprint:
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


def read_blueprint(text: str) -> Blueprint:
    """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    plain = json.loads(text)
    policy = plain.pop("policy")
    regime, order = Regime(**policy.pop("regime")), OrderPolicy(**policy.pop("order"))
    constants = Constants(**plain.pop("constants"))
    grains = tuple(Grains(rows, tuple(prompt_tokens)) for rows, prompt_tokens in policy.pop("grains"))
    made = Policy(regime=regime, order=order, stance=Stance(policy.pop("stance")), grains=grains, **policy)
    return Blueprint(policy=made, constants=constants, **plain)
