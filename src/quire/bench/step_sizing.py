"""Step sizing: time to first token and time between tokens with and without an ITL target, simulated.

A workload runs through the real scheduler. A step takes the time of Llama-3.1-8B on an H200: matrix products by tokens,
interpolated between measured sizes; attention by the keys that are read. The model was fitted to that GPU
(docs/performance/ledger, section 38, compares both). Planning and HTTP take no time.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from quire.bench.regimes import VOCAB_SIZE, SimulatedMachine
from quire.bench.service_levels import ServedRequest, TokenArrival
from quire.core.ids import RequestId
from quire.core.request import Request
from quire.core.sampling import RowSampling
from quire.engine.build_scheduler import captured_sizes
from quire.kv.manager import KVManager
from quire.sched.batching import MAX_STRETCH, PER_DECODE, usual_target_s
from quire.sched.cost_model import CostTable, StepShape
from quire.sched.policy import PREFIX, Policy
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


# KV cache of 141 GB at 90 % without the weights; the context of the model.
H200_MACHINE = SimulatedMachine(num_blocks=54_000, max_model_len=131_072)


class StepSizing(NamedTuple):
    """A policy for the size of steps."""

    name: str
    target_s: float | None  # None: up to the token budget
    stretch: float = 1.0
    per_decode: float = 0.0


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


class ServingOverhead(NamedTuple):
    """What HTTP and the server's processes add to a first token."""

    request_s: float = 0.0  # from sending a request until the scheduler has it
    prompt_token_s: float = 0.0  # the same, for each prompt token
    delivery_s: float = 0.0  # from the end of a step until the client has its tokens

    def arrival_s(self, row: TraceRow) -> float:
        return row.arrived_s + self.request_s + self.prompt_token_s * row.num_prompt


NO_OVERHEAD = ServingOverhead()
HTTP_OVERHEAD = ServingOverhead()


def simulate(
    rows: Many[TraceRow],
    machine: SimulatedMachine,
    sizing: StepSizing,
    overhead: ServingOverhead = NO_OVERHEAD,
) -> list[ServedRequest]:
    """What the clients of a server would see."""
    scheduler = _scheduler(machine, sizing)
    requests = _requests(_cut(rows, machine), overhead)
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
        for number, row in enumerate(_cut(rows, machine))
    ]


def _scheduler(machine: SimulatedMachine, sizing: StepSizing) -> Scheduler:
    most = machine.max_step_tokens
    policy = Policy(
        PREFIX,
        itl_target_s=sizing.target_s,
        itl_stretch=sizing.stretch,
        itl_per_decode=sizing.per_decode,
        captured_sizes=captured_sizes(machine.max_rows, most),
    )
    kv = KVManager(machine.num_blocks, machine.block_size, machine.max_rows, prefix=True)
    table = CostTable(machine.constants, largest_chunk=most)  # which learns the real times
    return Scheduler(kv, max_rows=machine.max_rows, max_step_tokens=most, policy=policy, cost=table)


def _cut(rows: Many[TraceRow], machine: SimulatedMachine) -> list[TraceRow]:
    """Requests that fit the context."""
    cut = []
    for row in rows:
        num_prompt = min(row.num_prompt, machine.max_model_len - 1)
        num_output = min(row.num_output, machine.max_model_len - num_prompt)
        cut.append(row._replace(num_prompt=num_prompt, num_output=num_output))
    return cut


def _requests(rows: Many[TraceRow], overhead: ServingOverhead) -> list[SimulatedArrival]:
    """Requests with max_tokens equal to their output length."""
    return [
        SimulatedArrival(
            overhead.arrival_s(row),
            Request(RequestId(number), prompt_of(row, number, VOCAB_SIZE), row.num_output, RowSampling(end_ids=())),
        )
        for number, row in enumerate(rows)
    ]
