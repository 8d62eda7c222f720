"""Simulated machines: batching regimes, overcommit policies and step sizing compared, and a server under a load.

Requests run through the real scheduler; nothing is timed here. For the regimes, from static batching to prefix caching,
a step takes the time that a roofline model predicts for an 8B model on one H200; memory is counted by
`sim/simulator.py`. For step sizing and for a server under a load, a step takes the time of Llama-3.1-8B on an H200
under lasting load: matrix products by tokens, interpolated between measured sizes; attention by the keys that are read
(docs/performance/ledger, sections 38 and 52, compare both). Planning takes no time.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from quire.bench.service_levels import ServedRequest, TokenArrival
from quire.core.ids import RequestId
from quire.core.request import Request
from quire.core.sampling import RowSampling
from quire.engine.build_scheduler import captured_sizes
from quire.kv.manager import KVManager
from quire.sched.cost_model import Constants, CostTable, StepShape, roofline
from quire.sched.pacing import PER_DECODE, TTFT_PER_ITL, usual_itl_s
from quire.sched.policy import PREFIX, REGIMES, Policy, Regime
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


# A server.


class H200:
    """The time of a step of Llama-3.1-8B."""

    tokens = (1, 32, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
    # With everything else that grows with tokens only. A few steps behind each other take some 8 to 12 % less; prompts
    # for ten seconds without a pause up to 8 % more, as the card reaches its power limit (ledger, section 55).
    products_ms = (3.9, 4.9, 5.8, 7.7, 10.8, 13.0, 22.9, 45.5, 88.5, 174.0)
    prompt_ms = 0.25  # per step with prefill
    prompt_token_ms = 6e-4
    context_token_ms = 3.36e-5  # per key that a decoding row reads
    pair_ms = 8.1e-7  # per key that a prompt token reads
    short_chunks = 1.6  # factor of pair_ms in chunks shorter than
    long_chunk = 1024

    def predict_s(self, shape: StepShape) -> float:
        num_tokens = shape.num_rows + shape.num_chunk_tokens
        taken_ms = float(np.interp(num_tokens, self.tokens, self.products_ms))
        taken_ms += self.context_token_ms * shape.num_context
        if shape.num_chunk_tokens:
            slower = self.short_chunks if shape.num_chunk_tokens < self.long_chunk else 1.0
            taken_ms += self.prompt_ms + self.prompt_token_ms * num_tokens
            taken_ms += self.pair_ms * slower * shape.chunk_context
        return taken_ms / 1000


# KV cache of 141 GB at 90 % without the weights; the context of the model.
H200_MACHINE = SimulatedMachine(num_blocks=54_000, max_model_len=131_072)


class StepSizing(NamedTuple):
    """A policy for the size of steps."""

    name: str
    target_s: float | None  # None: up to the token budget
    ttft_s: float | None = None
    per_decode: float = 0.0


def sizings(itl_s: float | None = None, ttft_s: float | None = None) -> list[StepSizing]:
    """The compared policies, the last with the targets of a server; None: its defaults."""
    default_s = usual_itl_s(H200.products_ms[0] / 1000)
    target_s = default_s if itl_s is None else itl_s
    return [
        StepSizing("none", None),
        StepSizing("kept", target_s),
        StepSizing(
            "usual" if itl_s is None and ttft_s is None else "named",
            target_s,
            TTFT_PER_ITL * target_s if ttft_s is None else ttft_s,
            PER_DECODE if itl_s is None else 0.0,
        ),
    ]


class ServingOverhead(NamedTuple):
    """What HTTP and the server's processes add to a first token."""

    request_s: float = 0.0  # from sending a request until the scheduler has it
    prompt_token_s: float = 0.0  # the same, for each prompt token
    delivery_s: float = 0.0  # from the end of a step until the client has its tokens

    def arrival_s(self, row: TraceRow) -> float:
        return row.arrived_s + self.request_s + self.prompt_token_s * row.num_prompt


NO_OVERHEAD = ServingOverhead()
HTTP_OVERHEAD = ServingOverhead(request_s=1.5e-3, prompt_token_s=1e-6, delivery_s=3e-4)  # fitted to section 43


def simulate(
    rows: Many[TraceRow],
    machine: SimulatedMachine,
    sizing: StepSizing,
    overhead: ServingOverhead = NO_OVERHEAD,
) -> list[ServedRequest]:
    """What the clients of a server would see."""
    scheduler = make_scheduler(machine, sizing)
    requests = simulated_requests(rows, machine, overhead)
    simulation = Simulation(scheduler, requests, H200(), depth=1)
    numbers = [int(each.request.id) for each in sorted(requests, key=lambda each: each.at_s)]  # of each sequence
    arrivals: list[list[TokenArrival]] = [[] for _ in rows]
    cached: dict[int, int] = {}
    for absorbed in simulation.turns():
        if absorbed is None:
            continue
        arrival = TokenArrival(simulation.now_s + overhead.delivery_s, 1)
        for sequence in absorbed.sequences.tolist():
            arrivals[numbers[sequence]].append(arrival)
        for first in absorbed.first_tokens:
            cached[first.number] = first.num_cached
    return [
        ServedRequest(
            number,
            row.arrived_s,
            row.arrived_s,
            row.num_prompt,
            row.num_output,
            tuple(arrivals[number]),
            arrivals[number][-1].at_s if arrivals[number] else None,
            cached.get(number),
        )
        for number, row in enumerate(fitting(rows, machine))
    ]


def make_scheduler(machine: SimulatedMachine, sizing: StepSizing) -> Scheduler:
    most = machine.max_step_tokens
    policy = Policy(
        PREFIX,
        itl_target_s=sizing.target_s,
        ttft_target_s=sizing.ttft_s,
        itl_per_decode=sizing.per_decode,
        captured_sizes=captured_sizes(machine.max_rows, most),
    )
    kv = KVManager(machine.num_blocks, machine.block_size, machine.max_rows, prefix=True)
    table = CostTable(machine.constants, largest_chunk=most)  # which learns the real times
    return Scheduler(kv, max_rows=machine.max_rows, max_step_tokens=most, policy=policy, cost=table)


def fitting(rows: Many[TraceRow], machine: SimulatedMachine) -> list[TraceRow]:
    """Requests that fit the context."""
    cut = []
    for row in rows:
        num_prompt = min(row.num_prompt, machine.max_model_len - 1)
        num_output = min(row.num_output, machine.max_model_len - num_prompt)
        cut.append(row._replace(num_prompt=num_prompt, num_output=num_output))
    return cut


def simulated_requests(
    rows: Many[TraceRow], machine: SimulatedMachine, overhead: ServingOverhead
) -> list[SimulatedArrival]:
    """Requests that fit the context, with max_tokens equal to their output length."""
    return [
        SimulatedArrival(
            overhead.arrival_s(row),
            Request(RequestId(number), prompt_of(row, number, VOCAB_SIZE), row.num_output, RowSampling(end_ids=())),
        )
        for number, row in enumerate(fitting(rows, machine))
    ]
