"""A scheduler over a runner that can be computed by hand, driven step by step, so that a test can look in between."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import islice

import numpy as np

from quire.core.ids import BlockId, IntArray, RequestId, Row, SequenceId
from quire.core.oracle import continuation
from quire.core.request import BeamParams, EventKind, Request, RequestEvent, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import Chunk, FinishedRow, FinishReason, Masks, Pending, Runner, StepPlan, StepResult
from quire.core.step_output import StepOutput
from quire.kv.manager import KVManager
from quire.sched.audit import audit, audit_rest
from quire.sched.cost_model import CostTable
from quire.sched.loop import Loop
from quire.sched.policy import Policy
from quire.sched.reservation import Overcommit
from quire.sched.scheduler import Scheduler
from quire.sim.check.invariants import InFlightWatch, audit_contents
from quire.sim.runners import OracleRunner, ProposeDrafts, ToyRunner

VOCAB = 1000
OPTIMISTIC = Policy(overcommit=Overcommit.OPTIMISTIC)
NEVER = Policy(overcommit=Overcommit.NEVER)


class Recorder:
    """A runner that keeps and checks every plan. A poisoned row fails in the next result."""

    def __init__(self, runner: Runner, block_size: int) -> None:
        self.plans: list[StepPlan] = []
        self.poisoned: Row | None = None
        self.runner = runner
        self._watch = InFlightWatch(block_size)

    def launch(self, plan: StepPlan) -> "_Recorded":
        self.plans.append(plan)
        self._watch.launch(plan)
        return _Recorded(self.runner.launch(plan), self)

    def settle(self, pending: Pending) -> StepResult:
        result, row = pending.wait(), self.poisoned
        self._watch.absorb(result)
        if row is None:
            return result
        self.poisoned = None
        kept = result.rows != row
        return result._replace(
            rows=result.rows[kept],
            tokens=result.tokens[kept],
            ended=(*(each for each in result.ended if each.row != row), FinishedRow(row, FinishReason.ERROR)),
            candidates={other: top for other, top in result.candidates.items() if other != row},
            pooled={other: total for other, total in result.pooled.items() if other != row},
        )


class _Recorded:
    """A step under way, absorbed by the watch when it is waited for."""

    def __init__(self, pending: Pending, recorder: Recorder) -> None:
        self._pending = pending
        self._recorder = recorder

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self._pending.drafted

    def sample(self, masks: Masks) -> None:
        self._pending.sample(masks)

    def wait(self) -> StepResult:
        return self._recorder.settle(self._pending)


class Bench:
    """Everything a scheduling test needs. Audits after every turn."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        rows: int = 8,
        budget: int = 64,
        depth: int = 0,
        policy: Policy = OPTIMISTIC,
        host: int = 0,
        oracle: bool = False,
        cost: CostTable | None = None,
        propose: ProposeDrafts = lambda row, count: [],
    ) -> None:
        kv = KVManager(blocks, block_size, rows, prefix=policy.regime.prefix, num_host_blocks=host)
        self.scheduler = Scheduler(kv, max_rows=rows, max_step_tokens=budget, policy=policy, cost=cost)
        runner: Runner = OracleRunner(blocks, block_size, VOCAB, host, propose) if oracle else ToyRunner(VOCAB, propose)
        self.recorder = Recorder(runner, block_size)
        self.now_s = 0.0
        self.loop = Loop(self.scheduler, self.recorder, depth, lambda: self.now_s)
        self.emitted: dict[SequenceId, list[int]] = {}
        self.finished: dict[SequenceId, int] = {}  # the step it finished in
        self.pooled: dict[SequenceId, float] = {}
        self._num_requests = 0

    # Requests.

    def add(self, prompt: Many[int], max_tokens: int, end_ids: tuple[int, ...] = (), **also: object) -> Sequence:
        """One continuation."""
        (sequence,) = self.add_group(prompt, max_tokens, 1, end_ids, **also)
        return sequence

    def add_group(
        self, prompt: Many[int], max_tokens: int, count: int, end_ids: tuple[int, ...] = (), **also: object
    ) -> tuple[Sequence, ...]:
        return self.add_request(prompt, max_tokens, RowSampling(end_ids=end_ids), num_sequences=count, **also)

    def add_beams(self, prompt: Many[int], max_tokens: int, width: int, **also: object) -> tuple[Sequence, ...]:
        sampling = RowSampling(num_candidates=2 * width)
        beam = BeamParams(width, num_returned=width)
        return self.add_request(prompt, max_tokens, sampling, num_sequences=width, beam=beam, **also)

    def add_request(
        self, prompt: Many[int], max_tokens: int, sampling: RowSampling, **also: object
    ) -> tuple[Sequence, ...]:
        number = RequestId(self._num_requests)
        request = Request(number, np.array(prompt, np.int32), max_tokens, sampling, **also)  # type: ignore[arg-type]
        self._num_requests += 1
        sequences = self.scheduler.add(request, self.now_s)
        self.emitted.update({sequence.id: [] for sequence in sequences})
        return sequences

    # Steps.

    def turn(self) -> StepOutput | None:
        absorbed = self.loop.step()
        audit(self.scheduler)
        audit_contents(self.scheduler.kv, self.recorder.runner)
        if absorbed is not None:
            for number, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
                self.emitted[SequenceId(number)].append(token)
            for name, total in absorbed.pooled.items():
                assert name not in self.pooled, f"{name} was pooled twice"
                self.pooled[SequenceId(name)] = float(total[0])
            for over in absorbed.finished:
                assert over.sequence not in self.finished, f"{over} finished twice"
                self.finished[SequenceId(over.sequence)] = absorbed.step
        return absorbed

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def run_out(self, most: int = 10_000) -> None:
        """Until all requests have finished; the cache stays."""
        for _ in range(most):
            if self.scheduler.idle:
                return
            self.turn()
        raise AssertionError("it never came to rest")

    def run(self) -> None:
        """Until all requests have finished. Then the cache is emptied, to check that it can be."""
        self.run_out()
        audit_rest(self.scheduler)

    def poison(self, sequence: Sequence) -> None:
        """Its row fails in the next result. At depth 0 alone: no later step may be in flight."""
        self.recorder.poisoned = Row(0) if sequence.row is None else sequence.row

    # Inspection.

    @property
    def plans(self) -> list[StepPlan]:
        return self.recorder.plans

    @property
    def plan(self) -> StepPlan:
        return self.plans[-1]

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.counters.preemptions

    def chunks_of(self, sequence: Sequence) -> list[Chunk]:
        """All its chunks, by following the row starts."""
        assigned: dict[Row, SequenceId] = {}
        chunks = []
        for plan in self.plans:
            assigned.update({row_start.row: row_start.sequence for row_start in plan.starts})
            chunks += [chunk for chunk in plan.chunks if assigned[chunk.row] == sequence.id]
        return chunks

    def table(self, sequence: Sequence) -> list[int]:
        assert sequence.row is not None, sequence
        blocks: list[int] = self.scheduler.kv.tables.of(sequence.row).tolist()
        return blocks

    def readers(self, block: int) -> int:
        """Tables that hold a block, as the pool counts them."""
        pool = self.scheduler.kv.pool
        blocks = np.array([block], np.int32)
        return next(count for count in range(99) if pool.count_readers(blocks, np.array([count])))

    def references(self, block: int) -> int:
        return self.scheduler.kv.pool.references(BlockId(block))


def events_of(sequence: Sequence, what: EventKind) -> list[RequestEvent]:
    return [event for event in sequence.group.events if event.what is what]


def toy_output(prompt: Many[int], count: int) -> list[int]:
    """By hand: each token is the sum of all before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


def oracle_output(prompt: Many[int], count: int, index: int = 0) -> list[int]:
    """The closed form."""
    return list(islice(continuation(np.array(prompt, np.int32), VOCAB, index), count))


def counting(first: int, count: int) -> list[int]:
    """A prompt in which no two tokens are the same."""
    return list(range(first, first + count))
