"""Step sizing: time to first token and time between tokens with and without an ITL target, simulated.

A workload runs through the real scheduler. A step takes the time of Llama-3.1-8B on an H200: matrix products by tokens,
interpolated between measured sizes; attention by the keys that are read. The model was fitted to that GPU
(docs/performance/ledger, section 38, compares both). Planning and HTTP take no time.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from quire.bench.regimes import VOCAB_SIZE, SimulatedMachine
from quire.bench.throughput import Percentiles, percentiles_ms
from quire.core.ids import RequestId
from quire.core.request import Request
from quire.core.sampling import RowSampling
from quire.engine.build_scheduler import captured_sizes
from quire.kv.manager import KVManager
from quire.sched.batching import MAX_STRETCH, PER_DECODE, usual_target_s
from quire.sched.cost_model import CostTable, StepShape
from quire.sched.policy import CHUNKED, Policy
from quire.sched.scheduler import Scheduler
from quire.sim.simulator import SimulatedArrival, Simulation
from quire.workload.traces import TraceRow, prompt_of


class H200:
    """The time of a step of Llama-3.1-8B."""

    tokens = (1, 32, 128, 256, 512, 2048, 8192)
    products_ms = (3.9, 4.85, 5.65, 7.45, 12.45, 42.0, 166.0)  # with everything else that grows with tokens only
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


class StepSizing(NamedTuple):
    """A policy for the size of steps."""

    name: str
    target_s: float | None  # None: up to the token budget
    stretch: float = 1.0
    per_decode: float = 0.0


class StepSizingResult(NamedTuple):
    """The figures of one run."""

    name: str
    first_tokens_ms: Percentiles
    gaps_ms: Percentiles | None
    tokens_per_s: float


def sizings(target_s: float | None = None) -> list[StepSizing]:
    """The compared policies. Target None: the default of a server."""
    default_s = usual_target_s(H200.products_ms[0] / 1000)
    if target_s is not None:
        return [StepSizing("none", None), StepSizing("named", target_s)]
    return [
        StepSizing("none", None),
        StepSizing("kept", default_s),
        StepSizing("usual", default_s, MAX_STRETCH, PER_DECODE),
    ]


def compare(
    rows: Many[TraceRow],
    machine: SimulatedMachine,
    policies: Many[StepSizing],
    say: Callable[[str], None] = lambda text: None,
) -> list[StepSizingResult]:
    """The same requests under each policy."""
    results = []
    for policy in policies:
        say(policy.name)
        results.append(run(rows, machine, policy))
    return results


def run(rows: Many[TraceRow], machine: SimulatedMachine, sizing: StepSizing) -> StepSizingResult:
    simulation = Simulation(_scheduler(machine, sizing), _arrivals(rows, machine), H200(), depth=1)
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    gaps_s: list[float] = []
    for absorbed in simulation.turns():
        for sequence in absorbed.sequences.tolist() if absorbed is not None else ():
            if sequence in last_s:
                gaps_s.append(simulation.now_s - last_s[sequence])
            else:
                first_s[sequence] = simulation.now_s
            last_s[sequence] = simulation.now_s
    waited = percentiles_ms([now_s - rows[sequence].arrived_s for sequence, now_s in first_s.items()])
    assert waited is not None, "no request was served"
    num_output = len(first_s) + len(gaps_s)
    return StepSizingResult(sizing.name, waited, percentiles_ms(gaps_s), num_output / simulation.account.finished_s)


def _scheduler(machine: SimulatedMachine, sizing: StepSizing) -> Scheduler:
    most = machine.max_step_tokens
    policy = Policy(
        CHUNKED,
        itl_target_s=sizing.target_s,
        itl_stretch=sizing.stretch,
        itl_per_decode=sizing.per_decode,
        captured_sizes=captured_sizes(machine.max_rows, most),
    )
    kv = KVManager(machine.num_blocks, machine.block_size, machine.max_rows, prefix=False)
    table = CostTable(machine.constants, largest_chunk=most)  # which learns the real times
    return Scheduler(kv, max_rows=machine.max_rows, max_step_tokens=most, policy=policy, cost=table)


def _arrivals(rows: Many[TraceRow], machine: SimulatedMachine) -> list[SimulatedArrival]:
    """Requests with max_tokens equal to their output length."""
    requests = []
    for number, row in enumerate(rows):
        num_prompt = min(row.num_prompt, machine.max_model_len - 1)
        num_output = min(row.num_output, machine.max_model_len - num_prompt)
        prompt = prompt_of(row._replace(num_prompt=num_prompt), number, VOCAB_SIZE)
        requests.append(
            SimulatedArrival(row.arrived_s, Request(RequestId(number), prompt, num_output, RowSampling(end_ids=())))
        )
    return requests
