"""Many rows on a small block pool against the closed form, for a fast runner: forks, shared prefixes, aborts,
preemptions and copies to the host. `quire check` does the same with few rows and audits every invariant."""

import random
from dataclasses import dataclass, field

import numpy as np

from quire.core.ids import IntArray, RequestId, SequenceId
from quire.core.oracle import continuation
from quire.core.request import Request, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import Runner
from quire.core.step_output import StepOutput
from quire.engine.oracle_runner import TorchOracleRunner
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS, DraftKernels
from quire.kernels.row_interface import RowKernels
from quire.kv.manager import KVManager
from quire.runner.graph_shapes import MAX_VERIFIED
from quire.runner.kv_store import CopyBlocks
from quire.sched.audit import audit, audit_rest
from quire.sched.cost_model import Constants, CostTable
from quire.sched.loop import Loop
from quire.sched.policy import Policy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import SpeculationPolicy

VOCAB = 97
BLOCK = 16


@dataclass(frozen=True, slots=True)
class ManyRows:
    """The number of rows, and the sizes of requests, pool and step."""

    rows: int
    max_prompt: int
    max_output: int
    num_blocks: int
    num_host_blocks: int
    step_tokens: int
    max_drafts: int = 0  # of a row in a step: right, wrong and right up to some place

    @property
    def max_length(self) -> int:
        return self.max_prompt + self.max_output


@dataclass(slots=True)
class Seen:
    """The results of a run."""

    tokens: int = 0
    steps: int = 0
    aborts: int = 0
    scheduler: Scheduler | None = None
    expected: dict[SequenceId, list[int]] = field(default_factory=dict)
    num_received: dict[SequenceId, int] = field(default_factory=dict)
    live: dict[RequestId, tuple[Sequence, ...]] = field(default_factory=dict)


def torch_runner(
    load: ManyRows,
    device: str,
    row_kernels: RowKernels,
    copy_blocks: CopyBlocks | None = None,
    draft_kernels: DraftKernels = REFERENCE_DRAFT_KERNELS,
) -> TorchOracleRunner:
    return TorchOracleRunner(
        vocab_size=VOCAB,
        num_blocks=load.num_blocks,
        block_size=BLOCK,
        num_host_blocks=load.num_host_blocks,
        max_rows=load.rows,
        max_length=load.max_length,
        device=device,
        row_kernels=row_kernels,
        copy_blocks=copy_blocks,
        draft_kernels=draft_kernels,
    )


def run_many_rows(load: ManyRows, runner: Runner, num_tokens: int, seed: int, depth: int = 1) -> Seen:
    """Run until `num_tokens` tokens were received, compare each with the closed form, and finish all requests."""
    dice, seen, now_s = random.Random(seed), Seen(), 0.0
    seen.scheduler = scheduler = _scheduler(load)
    loop = Loop(scheduler, runner, depth, lambda: now_s)
    prefixes = [_tokens(dice, load.max_prompt // 2) for _ in range(4)]
    number = 0
    while seen.tokens < num_tokens or not scheduler.idle:
        now_s += 0.01
        while seen.tokens < num_tokens and len(seen.live) < load.rows:
            request = _request(dice, load, number, prefixes)
            number += 1
            seen.live[request.id] = sequences = scheduler.add(request, now_s)
            seen.expected |= {sequence.id: _continuation(request, sequence.index) for sequence in sequences}
        if seen.live and dice.random() < 0.1:
            scheduler.abort(dice.choice(list(seen.live)))
            seen.aborts += 1
        absorbed = loop.step()
        if absorbed is not None:
            seen.steps += 1
            _receive(seen, absorbed)
        if seen.steps % 64 == 0:
            audit(scheduler, tree=True)
        seen.live = {name: sequences for name, sequences in seen.live.items() if not all(m.finished for m in sequences)}
    audit_rest(scheduler)
    return seen


def assert_all_happened(load: ManyRows, seen: Seen) -> None:
    """The run had aborts, preemptions, forks, copies and cache hits, and drafts right and wrong if it was to."""
    assert seen.scheduler is not None
    counters = seen.scheduler.counters
    happened = (seen.aborts, counters.preemptions, counters.forks, counters.moved_blocks, counters.cached_tokens)
    assert all(happened), (seen.aborts, counters)
    drafts = (counters.accepted_tokens, counters.drafted_tokens - counters.accepted_tokens)
    assert all(drafts) if load.max_drafts else not any(drafts), (load, counters)


def _receive(seen: Seen, absorbed: StepOutput) -> None:
    for name, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
        place = seen.num_received.get(name, 0)
        right = seen.expected[name][place]
        assert token == right, f"token {place} of sequence {name} is {token}, not {right}"
        seen.num_received[name] = place + 1
    seen.tokens += len(absorbed.tokens)
    for over in absorbed.finished:
        assert seen.num_received.pop(over.sequence) == len(seen.expected.pop(over.sequence)), over


def _scheduler(load: ManyRows) -> Scheduler:
    cost = CostTable(Constants(1e-3, 1e-3, 1e-4, 0.0, 0.0), load.step_tokens)
    cost.set_transfer(1e-5)  # cheap, so that preempted rows are swapped out
    drafts = SpeculationPolicy(load.max_drafts, governed=False, max_verified=MAX_VERIFIED)
    kv = KVManager(load.num_blocks, BLOCK, load.rows, num_host_blocks=load.num_host_blocks, worth_keeping=_always)
    return Scheduler(
        kv,
        max_rows=load.rows,
        max_step_tokens=load.step_tokens,
        policy=Policy(overcommit=Overcommit.OPTIMISTIC, speculation=drafts),
        cost=cost,
    )


def _always(start: int, stop: int) -> bool:
    return True


def _request(dice: random.Random, load: ManyRows, number: int, prefixes: list[IntArray]) -> Request:
    shared = dice.choice(prefixes)[: dice.randint(0, load.max_prompt // 2)]
    fresh = _tokens(dice, dice.randint(1, load.max_prompt // 2))
    return Request(
        id=RequestId(number),
        prompt=np.concatenate([shared, fresh]),
        max_tokens=dice.randint(load.max_output // 3, load.max_output),
        sampling=RowSampling(),
        num_sequences=dice.choice((1, 1, 1, 1, 2, 4)),
    )


def _tokens(dice: random.Random, count: int) -> IntArray:
    return np.array([dice.randrange(VOCAB) for _ in range(count)], dtype=np.int32)


def _continuation(request: Request, index: int) -> list[int]:
    tokens = continuation(request.prompt, VOCAB, index)
    return [next(tokens) for _ in range(request.max_tokens)]
