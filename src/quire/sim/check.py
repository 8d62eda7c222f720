"""`quire check`: random worlds through the shipped scheduler against the exact oracle, audited at every step."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from quire.core.step import Runner
from quire.sim.oracle import OracleRunner
from quire.sim.trial import Body, Trial
from quire.sim.world import VOCAB_SIZE, Happening, World, draw_world


def numpy_oracle(world: World) -> Runner:
    return OracleRunner(world.num_blocks, world.block_size, VOCAB_SIZE, world.num_host_blocks)


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
    events: Counter[Happening] = field(default_factory=Counter)
    pairs: set[tuple[Happening, Happening]] = field(default_factory=set)  # one came right after the other
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Take in what another run of the same check saw."""
        self.steps += other.steps
        self.trials += other.trials
        self.preemptions += other.preemptions
        self.events += other.events
        self.pairs |= other.pairs
        self.violations += other.violations


def trial_seeds(seed: int, first: int, stride: int) -> Iterable[int]:
    """The seeds of a check's worlds; of several runs at once, each takes every `stride`-th."""
    number = first
    while True:
        yield seed * 1_000_003 + number
        number += stride


def check(
    num_steps: int,
    seed: int,
    *,
    body: Body = numpy_oracle,
    min_tokens: bool = True,
    progress: Callable[[int], None] = lambda steps: None,
    first: int = 0,
    stride: int = 1,
) -> Report:
    """Run random worlds until so many steps have been audited."""
    report = Report(seed)
    for trial_seed in trial_seeds(seed, first, stride):
        if report.steps >= num_steps:
            break
        run_trial(trial_seed, report, body, min_tokens=min_tokens)
        progress(report.steps)
    return report


def run_trial(trial_seed: int, report: Report, body: Body = numpy_oracle, *, min_tokens: bool = True) -> None:
    """Run one world by its seed and add what it showed to the report."""
    dice = random.Random(trial_seed)
    world = draw_world(dice, min_tokens=min_tokens)
    trial = Trial(world, dice, body)
    try:
        trial.run()
    except Exception as broken:  # whatever escapes from a legal workload is a violation
        report.violations.append(Violation(trial_seed, world, f"{type(broken).__name__}: {broken}"))
    report.trials += 1
    report.steps += max(trial.steps, 1)
    report.preemptions += trial.scheduler.books.tally.preemptions
    report.events += trial.event_counts
    report.pairs |= set(pairwise(trial.events))
