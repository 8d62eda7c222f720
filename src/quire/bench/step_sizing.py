"""First tokens, and the time between tokens, as steps are sized: a workload through the shipped scheduler, simulated.

The machine takes for a step what Llama-3.1-8B takes on an H200: products by their tokens, between a few sizes;
attention by the keys that are read. It was fitted to that card (docs/performance/ledger, section 38, has it beside the
card itself). Neither planning nor HTTP takes any time on it.
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
from quire.sched.batching import MOST_STRETCH, PER_DECODE, usual_target_s
from quire.sched.cost_model import CostTable, StepShape
from quire.sched.policy import CHUNKED, Policy
from quire.sched.scheduler import Scheduler
from quire.sim.simulator import SimulatedArrival, Simulation
from quire.workload.arrivals import prompt_of
from quire.workload.traces import TraceRow


class H200:
    """What a step of Llama-3.1-8B takes."""

    tokens = (1, 32, 128, 256, 512, 2048, 8192)
    products_ms = (3.9, 4.85, 5.65, 7.45, 12.45, 42.0, 166.0)  # and all else that grows with tokens alone
    prompt_ms = 0.25  # once, if there is any
    prompt_token_ms = 6e-4
    context_token_ms = 3.36e-5  # a key that a decoding row reads
    pair_ms = 8.1e-7  # a key that a token of a prompt reads
    short_chunks = 1.6  # so many times that in chunks of fewer tokens than
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
    """A way to size steps."""

    name: str
    target_s: float | None  # None: as large as the budget of tokens allows
    stretch: float = 1.0
    per_decode: float = 0.0


class StepSizingResult(NamedTuple):
    """What one run came to."""

    name: str
    first_tokens_ms: Percentiles
    gaps_ms: Percentiles | None
    tokens_per_s: float


def pacings(target_s: float | None = None) -> list[StepSizing]:
    """None: the target that a server takes by itself."""
    usual_s = usual_target_s(H200.products_ms[0] / 1000)
    if target_s is not None:
        return [StepSizing("none", None), StepSizing("named", target_s)]
    return [
        StepSizing("none", None),
        StepSizing("kept", usual_s),
        StepSizing("usual", usual_s, MOST_STRETCH, PER_DECODE),
    ]


def compare(
    rows: Many[TraceRow],
    machine: SimulatedMachine,
    ways: Many[StepSizing],
    say: Callable[[str], None] = lambda text: None,
) -> list[StepSizingResult]:
    """The same requests, each way."""
    outcomes = []
    for way in ways:
        say(way.name)
        outcomes.append(run(rows, machine, way))
    return outcomes


def run(rows: Many[TraceRow], machine: SimulatedMachine, way: StepSizing) -> StepSizingResult:
    ledger = Simulation(_scheduler(machine, way), _arrivals(rows, machine), H200(), depth=1)
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    gaps_s: list[float] = []
    for absorbed in ledger.turns():
        for sequence in absorbed.sequences.tolist() if absorbed is not None else ():
            if sequence in last_s:
                gaps_s.append(ledger.now_s - last_s[sequence])
            else:
                first_s[sequence] = ledger.now_s
            last_s[sequence] = ledger.now_s
    waited = percentiles_ms([now_s - rows[sequence].arrived_s for sequence, now_s in first_s.items()])
    assert waited is not None, "nobody was served"
    num_output = len(first_s) + len(gaps_s)
    return StepSizingResult(way.name, waited, percentiles_ms(gaps_s), num_output / ledger.account.finished_s)


def _scheduler(machine: SimulatedMachine, way: StepSizing) -> Scheduler:
    most = machine.max_step_tokens
    policy = Policy(
        CHUNKED,
        itl_target_s=way.target_s,
        itl_stretch=way.stretch,
        itl_per_decode=way.per_decode,
        captured_sizes=captured_sizes(machine.max_rows, most),
    )
    kv = KVManager(machine.num_blocks, machine.block_size, machine.max_rows, prefix=False)
    table = CostTable(machine.constants, largest_chunk=most)  # which learns what steps really take
    return Scheduler(kv, max_rows=machine.max_rows, max_step_tokens=most, policy=policy, cost=table)


def _arrivals(rows: Many[TraceRow], machine: SimulatedMachine) -> list[SimulatedArrival]:
    """Requests that say how long their answers are."""
    made = []
    for number, row in enumerate(rows):
        num_prompt = min(row.num_prompt, machine.max_model_len - 1)
        num_output = min(row.num_output, machine.max_model_len - num_prompt)
        prompt = prompt_of(row._replace(num_prompt=num_prompt), number, VOCAB_SIZE)
        made.append(
            SimulatedArrival(row.arrived_s, Request(RequestId(number), prompt, num_output, RowSampling(end_ids=())))
        )
    return made
