"""Many rows at once on a tight pool against the closed form, for a body that is fast enough: forks, shared prefixes,
aborts, preemptions and copies to the host. What a world of `quire check` does with a few rows and every law audited."""

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
from quire.kernels.row_interface import RowKernels
from quire.kv.manager import KVManager
from quire.runner.kv_store import CopyBlocks
from quire.sched.audit import audit, audit_rest
from quire.sched.cost_model import Constants, CostTable
from quire.sched.loop import Loop
from quire.sched.policy import Policy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler

VOCAB = 97
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Throng:
    """How many there are, and what they ask for."""

    rows: int
    max_prompt: int
    max_output: int
    num_blocks: int
    num_host_blocks: int
    step_tokens: int

    @property
    def max_length(self) -> int:
        return self.max_prompt + self.max_output


@dataclass(slots=True)
class Seen:
    """What came of it."""

    tokens: int = 0
    steps: int = 0
    aborts: int = 0
    scheduler: Scheduler | None = None
    expected: dict[SequenceId, list[int]] = field(default_factory=dict)
    heard: dict[SequenceId, int] = field(default_factory=dict)
    live: dict[RequestId, tuple[Sequence, ...]] = field(default_factory=dict)


def torch_body(
    throng: Throng, device: str, row_kernels: RowKernels, copy_blocks: CopyBlocks | None = None
) -> TorchOracleRunner:
    return TorchOracleRunner(
        vocab_size=VOCAB,
        num_blocks=throng.num_blocks,
        block_size=BLOCK,
        num_host_blocks=throng.num_host_blocks,
        max_rows=throng.rows,
        max_length=throng.max_length,
        device=device,
        row_kernels=row_kernels,
        copy_blocks=copy_blocks,
    )


def run_throng(throng: Throng, body: Runner, num_tokens: int, seed: int, depth: int = 1) -> Seen:
    """Until so many tokens were heard, each of which is what the closed form says; then to rest."""
    dice, seen, now_s = random.Random(seed), Seen(), 0.0
    seen.scheduler = scheduler = _scheduler(throng)
    loop = Loop(scheduler, body, depth, lambda: now_s)
    prefixes = [_tokens(dice, throng.max_prompt // 2) for _ in range(4)]
    number = 0
    while seen.tokens < num_tokens or not scheduler.idle:
        now_s += 0.01
        while seen.tokens < num_tokens and len(seen.live) < throng.rows:
            request = _request(dice, throng, number, prefixes)
            number += 1
            seen.live[request.id] = sequences = scheduler.add(request, now_s)
            seen.expected |= {sequence.id: _continuation(request, sequence.index) for sequence in sequences}
        if seen.live and dice.random() < 0.1:
            scheduler.abort(dice.choice(list(seen.live)))
            seen.aborts += 1
        absorbed = loop.step()
        if absorbed is not None:
            seen.steps += 1
            _hear(seen, absorbed)
        if seen.steps % 64 == 0:
            audit(scheduler, tree=True)
        seen.live = {name: sequences for name, sequences in seen.live.items() if not all(m.finished for m in sequences)}
    audit_rest(scheduler)
    return seen


def assert_all_happened(seen: Seen) -> None:
    """A run in which nobody was aborted, preempted, forked, carried or found in the cache has shown little."""
    assert seen.scheduler is not None
    tally = seen.scheduler.counters
    happened = (seen.aborts, tally.preemptions, tally.forks, tally.moved_blocks, tally.cached_tokens)
    assert all(happened), (seen.aborts, tally)


def _hear(seen: Seen, absorbed: StepOutput) -> None:
    for name, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
        place = seen.heard.get(name, 0)
        right = seen.expected[name][place]
        assert token == right, f"token {place} of sequence {name} is {token}, not {right}"
        seen.heard[name] = place + 1
    seen.tokens += len(absorbed.tokens)
    for over in absorbed.finished:
        assert seen.heard.pop(over.sequence) == len(seen.expected.pop(over.sequence)), over


def _scheduler(throng: Throng) -> Scheduler:
    cost = CostTable(Constants(1e-3, 1e-3, 1e-4, 0.0, 0.0), throng.step_tokens)
    cost.set_transfer(1e-5)  # so that whoever has to go is carried to the host
    kv = KVManager(throng.num_blocks, BLOCK, throng.rows, num_host_blocks=throng.num_host_blocks, worth_keeping=_always)
    return Scheduler(
        kv,
        max_rows=throng.rows,
        max_step_tokens=throng.step_tokens,
        policy=Policy(overcommit=Overcommit.OPTIMISTIC),
        cost=cost,
    )


def _always(start: int, stop: int) -> bool:
    return True


def _request(dice: random.Random, throng: Throng, number: int, prefixes: list[IntArray]) -> Request:
    shared = dice.choice(prefixes)[: dice.randint(0, throng.max_prompt // 2)]
    fresh = _tokens(dice, dice.randint(1, throng.max_prompt // 2))
    return Request(
        id=RequestId(number),
        prompt=np.concatenate([shared, fresh]),
        max_tokens=dice.randint(throng.max_output // 3, throng.max_output),
        sampling=RowSampling(),
        num_sequences=dice.choice((1, 1, 1, 1, 2, 4)),
    )


def _tokens(dice: random.Random, count: int) -> IntArray:
    return np.array([dice.randrange(VOCAB) for _ in range(count)], dtype=np.int32)


def _continuation(request: Request, index: int) -> list[int]:
    said = continuation(request.prompt, VOCAB, index)
    return [next(said) for _ in range(request.max_tokens)]
