"""`quire check`: random workloads through the shipped scheduler against the exact oracle, audited at every step."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from quire.core.ids import RequestId, SequenceId
from quire.core.oracle import continuation
from quire.core.request import Request, Sequence
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason, Runner, StepPlan, StepResult
from quire.kv.manager import KVManager, count_blocks
from quire.sched.audit import audit, audit_plan, audit_rest
from quire.sched.loop import Loop
from quire.sched.scheduler import Absorbed, Scheduler
from quire.sim.flight import FlightWatch
from quire.sim.oracle import OracleRunner

VOCAB_SIZE = 97


@dataclass(frozen=True, slots=True)
class World:
    """One random setting: a machine and a workload."""

    block_size: int
    num_blocks: int
    max_rows: int
    max_step_tokens: int
    depth: int
    num_requests: int
    max_prompt: int
    max_output: int
    arrival_chance: float
    abort_chance: float
    end_ids: tuple[int, ...]
    min_tokens: bool  # some requests may not end early; a sampler would then choose another token than the oracle


Body = Callable[[World], Runner]  # what runs behind the bridge


def numpy_oracle(world: World) -> OracleRunner:
    return OracleRunner(world.num_blocks, world.block_size, VOCAB_SIZE)


def draw_world(dice: random.Random) -> World:
    """Tiny pools, odd block sizes and all depths are as likely as comfortable ones."""
    block_size = dice.choice((1, 2, 3, 4, 5, 8, 16, 32))
    max_prompt = dice.choice((1, 5, 20, 80))
    max_output = dice.choice((1, 4, 16, 48))
    max_rows = dice.choice((1, 2, 3, 5, 8, 16))
    largest = count_blocks(max_prompt + max_output, block_size)
    return World(
        block_size=block_size,
        num_blocks=largest + dice.choice((0, 0, 1, 2, largest, 4 * largest, max_rows * largest)),
        max_rows=max_rows,
        max_step_tokens=max_rows + dice.choice((0, 1, 3, 7, 31, 255)),
        depth=dice.choice((0, 1, 2)),
        num_requests=dice.randint(1, 30),
        max_prompt=max_prompt,
        max_output=max_output,
        arrival_chance=dice.choice((0.05, 0.3, 1.0)),
        abort_chance=dice.choice((0.0, 0.0, 0.02, 0.2)),
        end_ids=dice.choice(((), (), (3,), tuple(range(0, VOCAB_SIZE, 7)))),
        min_tokens=True,
    )


@dataclass(slots=True)
class _Expected:
    """What a sequence must emit, and what it has emitted."""

    tokens: list[int]
    reason: FinishReason
    heard: list[int] = field(default_factory=list)
    num_terminal: int = 0


class _WatchedRunner:
    """A runner whose plans are audited as they pass."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self.num_preemptions = 0  # before this turn
        self.flight = FlightWatch()

    def launch(self, plan: StepPlan) -> "_WatchedPending":
        audit(self._scheduler)
        audit_plan(self._scheduler, plan)
        pressed = bool(plan.pauses) or self._scheduler.num_preemptions > self.num_preemptions
        assert not (pressed and plan.seats), "a step under pressure admitted somebody"  # law (c)
        self.flight.launch(plan)
        return _WatchedPending(self._runner.launch(plan).wait(), self.flight)


@dataclass(frozen=True, slots=True)
class _WatchedPending:
    result: StepResult
    flight: FlightWatch

    def wait(self) -> StepResult:
        self.flight.absorb()
        return self.result


class Trial:
    """One world, run to rest."""

    def __init__(self, world: World, dice: random.Random, body: Body = numpy_oracle) -> None:
        self.world = world
        self._dice = dice
        self._scheduler = Scheduler(
            KVManager(world.num_blocks, world.block_size),
            max_rows=world.max_rows,
            max_step_tokens=world.max_step_tokens,
        )
        self._watched = _WatchedRunner(body(world), self._scheduler)
        self._loop = Loop(self._scheduler, self._watched, world.depth)
        self._expected: dict[SequenceId, _Expected] = {}
        self._live: dict[RequestId, tuple[Sequence, ...]] = {}
        self._num_arrived = 0
        self._quiet_turns = 0
        self.steps = 0

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def run(self) -> None:
        """Raise AssertionError at the first violation."""
        while self._num_arrived < self.world.num_requests or not self._scheduler.idle:
            if self._num_arrived < self.world.num_requests and self._dice.random() < self.world.arrival_chance:
                self._arrive()
            if self._live and self._dice.random() < self.world.abort_chance:
                self._abort(self._dice.choice(list(self._live)))
            busy = bool(self._live)
            self._watched.num_preemptions = self._scheduler.num_preemptions
            absorbed = self._loop.turn()
            audit(self._scheduler)
            if absorbed is not None:
                self.steps += 1
                self._hear(absorbed)
            self._quiet_turns = 0 if absorbed is not None or not busy else self._quiet_turns + 1
            assert self._quiet_turns <= self.world.depth + 2, "something waits and nothing advances"  # I13
        audit_rest(self._scheduler)
        for sequence, expected in self._expected.items():
            assert expected.num_terminal == 1, f"sequence {sequence} ended {expected.num_terminal} times"  # I12

    def _arrive(self) -> None:
        world, dice = self.world, self._dice
        prompt = np.array([dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, world.max_prompt))], np.int32)
        max_tokens = dice.randint(1, world.max_output)
        end_ids = world.end_ids if dice.random() < 0.7 else ()
        min_tokens = dice.choice((0, 0, max_tokens)) if world.min_tokens else 0
        request = Request(
            id=RequestId(self._num_arrived),
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=RowSampling(end_ids=end_ids, min_tokens=min_tokens),
            num_sequences=dice.choice((1, 1, 1, 2, 3)),
        )
        self._num_arrived += 1
        family = self._scheduler.add(request)
        self._live[request.id] = family
        for sequence in family:
            self._expected[sequence.id] = _expect(request)

    def _abort(self, request_id: RequestId) -> None:
        for sequence in self._scheduler.abort(request_id):
            expected = self._expected[sequence.id]
            expected.reason = FinishReason.ABORT
            self._terminate(sequence)
        assert self._scheduler.abort(request_id) == (), "an abort is not idempotent"
        del self._live[request_id]

    def _hear(self, absorbed: Absorbed) -> None:
        for sequence, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
            expected = self._expected[SequenceId(sequence)]
            assert expected.num_terminal == 0, f"sequence {sequence} spoke after its end"  # I11
            expected.heard.append(token)
            right = expected.tokens[: len(expected.heard)]
            assert expected.heard == right, f"sequence {sequence}: {expected.heard} is not {right}"
        for sequence in absorbed.finished:
            self._terminate(sequence)
            family = self._live.get(sequence.request.id, ())
            if family and all(member.finished for member in family):
                del self._live[sequence.request.id]

    def _terminate(self, sequence: Sequence) -> None:
        expected = self._expected[sequence.id]
        expected.num_terminal += 1
        assert sequence.finish_reason is expected.reason, f"{sequence} ended by {sequence.finish_reason}"
        told = sequence.tokens[len(sequence.request.prompt) :].tolist()
        assert told == expected.heard, f"{sequence} kept {told}, but {expected.heard} was heard"
        if expected.reason is not FinishReason.ABORT:
            assert expected.heard == expected.tokens, f"{sequence} ended early"


def _expect(request: Request) -> _Expected:
    tokens: list[int] = []
    for token in continuation(request.prompt, VOCAB_SIZE):
        tokens.append(token)
        if token in request.sampling.end_ids and len(tokens) >= request.sampling.min_tokens:
            return _Expected(tokens, FinishReason.STOP)
        if len(tokens) == request.max_tokens:
            break
    return _Expected(tokens, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Violation:
    """A world in which a law broke. The trial's seed alone brings it back."""

    trial_seed: int
    world: World
    message: str


@dataclass(slots=True)
class Report:
    """What a check saw."""

    seed: int
    steps: int = 0
    trials: int = 0
    preemptions: int = 0
    violations: list[Violation] = field(default_factory=list)


def check(
    num_steps: int,
    seed: int,
    *,
    body: Body = numpy_oracle,
    min_tokens: bool = True,
    progress: Callable[[int], None] = lambda steps: None,
) -> Report:
    """Run random worlds until so many steps have been audited."""
    report = Report(seed)
    while report.steps < num_steps:
        run_trial(seed * 1_000_003 + report.trials, report, body, min_tokens=min_tokens)
        progress(report.steps)
    return report


def run_trial(trial_seed: int, report: Report, body: Body = numpy_oracle, *, min_tokens: bool = True) -> None:
    """Run one world by its seed and add what it showed to the report."""
    dice = random.Random(trial_seed)
    world = replace(draw_world(dice), min_tokens=min_tokens)
    trial = Trial(world, dice, body)
    try:
        trial.run()
    except Exception as broken:  # whatever escapes from a legal workload is a violation
        report.violations.append(Violation(trial_seed, world, f"{type(broken).__name__}: {broken}"))
    report.trials += 1
    report.steps += max(trial.steps, 1)
    report.preemptions += trial.num_preemptions
