"""Batching regimes from static batching to prefix caching, and overcommit policies, compared on a simulated machine.

The same requests run through the real scheduler under each regime. A step takes the time that a roofline model predicts
for an 8B model on one H200; nothing is timed here. Memory is counted by `sim/simulator.py`.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.core.ids import RequestId
from quire.core.request import Request
from quire.core.sampling import RowSampling
from quire.kv.manager import KVManager
from quire.sched.cost_model import Constants, CostTable, roofline
from quire.sched.policy import REGIMES, Policy, Regime
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler
from quire.sim.simulator import SimulatedArrival, Simulation, SimulationAccount
from quire.workload.traces import TraceRow, prompt_of

VOCAB_SIZE = 1 << 15

# Llama-3.1-8B in bf16: 8.0e9 parameters, 32 layers × 8 KV heads × 128 × (K and V) × 2 bytes per token. The H200's
# measured ceilings: 762 TFLOP/s, 4.11 TB/s. 0.3 ms for everything else.
LLAMA_8B_ON_H200 = roofline(
    num_parameters=8_030_000_000,
    weight_bytes=16_060_000_000,
    kv_bytes_per_token=131_072,
    flops_per_s=762e12,
    bytes_per_s=4.11e12,
    overhead_s=3e-4,
)


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """The simulated machine."""

    num_blocks: int = 16_384  # of 16 tokens: 34 GB of the 8B model's KV
    block_size: int = 16
    max_rows: int = 256
    max_step_tokens: int = 8192
    max_model_len: int = 8192  # limit of requests without max_tokens; contiguous regimes reserve it
    constants: Constants = LLAMA_8B_ON_H200


class RegimeResult(NamedTuple):
    """The figures of one run."""

    name: str
    account: SimulationAccount
    num_output: int  # tokens
    preemptions: int
    recomputed_share: float  # of all computed tokens
    cached_share: float  # of prompt tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_output / self.account.finished_s


def arrivals(rows: Many[TraceRow], machine: SimulatedMachine) -> list[SimulatedArrival]:
    """Requests without max_tokens: the scheduler does not know the output lengths. Longer than the context: cut."""
    requests = []
    for number, row in enumerate(rows):
        num_prompt = min(row.num_prompt, machine.max_model_len - 2)
        num_output = min(row.num_output, machine.max_model_len - num_prompt - 1)
        request = Request(
            RequestId(number),
            prompt_of(row._replace(num_prompt=num_prompt), number, VOCAB_SIZE),
            machine.max_model_len - num_prompt,
            RowSampling(end_ids=(0,), min_tokens=num_output),
        )
        requests.append(SimulatedArrival(row.arrived_s, request))
    return requests


def run(name: str, policy: Policy, work: Many[SimulatedArrival], machine: SimulatedMachine) -> RegimeResult:
    regime = policy.regime
    kv = KVManager(machine.num_blocks, machine.block_size, machine.max_rows, prefix=regime.prefix)
    budget = max(machine.max_step_tokens, machine.max_rows)
    scheduler = Scheduler(kv, max_rows=machine.max_rows, max_step_tokens=budget, policy=policy)
    account = Simulation(scheduler, work, CostTable(machine.constants)).run()
    counters = scheduler.counters
    return RegimeResult(
        name,
        account,
        sum(arrival.request.sampling.min_tokens for arrival in work),
        counters.preemptions,
        counters.recomputed_tokens / account.tokens,
        counters.cached_tokens / counters.prompt_tokens,
    )


def compare_regimes(
    work: Many[SimulatedArrival], machine: SimulatedMachine, say: Callable[[str], None] = lambda text: None
) -> list[RegimeResult]:
    """Every regime, from the oldest to the newest."""
    results = []
    for name, regime in REGIMES.items():
        say(name)
        results.append(run(name, Policy(regime=regime), work, machine))
    return results


def compare_overcommits(
    work: Many[SimulatedArrival],
    machine: SimulatedMachine,
    regime: Regime,
    say: Callable[[str], None] = lambda text: None,
) -> list[RegimeResult]:
    """Every overcommit policy, where all requests arrive at once and the running ones need twice the KV cache."""
    lengths = [len(arrival.request.prompt) + arrival.request.sampling.min_tokens for arrival in work]
    needed = [-(-(length - 1) // machine.block_size) for length in lengths]
    demand = sum(needed) * min(len(work), machine.max_rows) // len(work)
    scarce = replace(machine, num_blocks=max(demand // 2, machine.max_model_len // machine.block_size))
    work = [arrival._replace(at_s=0.0) for arrival in work]
    results = []
    for overcommit in Overcommit:
        say(overcommit.value)
        results.append(run(overcommit.value, Policy(regime=regime, overcommit=overcommit), work, scarce))
    return results
