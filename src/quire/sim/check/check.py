"""`quire check`: random scenarios through the shipped scheduler against the exact oracle, audited at every step."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import BinaryIO

import numpy as np

from quire.core.oracle import planted_drafts
from quire.core.step import Runner
from quire.sched.journal.recorder import JournaledScheduler
from quire.sim.check.scenario import VOCAB_SIZE, Scenario, ScenarioEvent, draw_scenario, with_stages
from quire.sim.check.trial import CheckRun, RunnerFactory
from quire.sim.runners import OracleRunner, SimRow

Pair = tuple[ScenarioEvent, ScenarioEvent]

_ARRIVALS = frozenset(event for event in ScenarioEvent if event.value.startswith("arrive"))


def possible_pairs() -> frozenset[Pair]:
    """Pairs of events that can follow each other: only an arrival overflows the queue, and draining begins just before
    the last arrival."""
    return frozenset(
        (one, other)
        for one, other in product(ScenarioEvent, ScenarioEvent)
        if (other is not ScenarioEvent.OVERFLOW or one in _ARRIVALS)
        and (one is not ScenarioEvent.DRAIN or other in _ARRIVALS)
    )


def numpy_oracle(scenario: Scenario) -> Runner:
    return OracleRunner(
        scenario.num_blocks, scenario.block_size, VOCAB_SIZE, scenario.num_host_blocks, propose=_planted_drafts
    )


def _planted_drafts(row: SimRow, count: int) -> list[int]:
    return planted_drafts(np.array(row.tokens, dtype=np.int32), VOCAB_SIZE, row.row_start.branch, count)


@dataclass(frozen=True, slots=True)
class Violation:
    """A scenario in which an invariant broke. The trial's seed reproduces it; the scenario's text is for the reader."""

    trial_seed: int
    scenario: str
    message: str


@dataclass(slots=True)
class CheckReport:
    """The result of a check."""

    seed: int
    steps: int = 0
    trials: int = 0
    preemptions: int = 0
    drafted: int = 0  # drafts verified
    accepted: int = 0
    events: Counter[ScenarioEvent] = field(default_factory=Counter)
    pairs: set[Pair] = field(default_factory=set)  # one came right after the other
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: "CheckReport") -> None:
        """Add the result of another part of the same check."""
        self.steps += other.steps
        self.trials += other.trials
        self.preemptions += other.preemptions
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.events += other.events
        self.pairs |= other.pairs
        self.violations += other.violations

    def to_json(self) -> str:
        """The report in one line, for the process that adds up the parts."""
        plain = {
            "seed": self.seed,
            "steps": self.steps,
            "trials": self.trials,
            "preemptions": self.preemptions,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "events": {event.value: count for event, count in self.events.items()},
            "pairs": [(one.value, other.value) for one, other in self.pairs],
            "violations": [(each.trial_seed, each.scenario, each.message) for each in self.violations],
        }
        return json.dumps(plain)


def read_report(line: str) -> CheckReport:
    """The inverse of `to_json`."""
    plain = json.loads(line)
    return CheckReport(
        plain["seed"],
        plain["steps"],
        plain["trials"],
        plain["preemptions"],
        plain["drafted"],
        plain["accepted"],
        Counter({ScenarioEvent(event): count for event, count in plain["events"].items()}),
        {(ScenarioEvent(one), ScenarioEvent(other)) for one, other in plain["pairs"]},
        [Violation(*each) for each in plain["violations"]],
    )


@dataclass(frozen=True, slots=True)
class CheckShard:
    """One of several runs that share the scenarios of a check: it takes every `stride`-th."""

    first: int = 0
    stride: int = 1


def trial_seeds(seed: int, part: CheckShard) -> Iterator[int]:
    """The seeds of a check's scenarios."""
    number = part.first
    while True:
        yield seed * 1_000_003 + number
        number += part.stride


def check(
    num_steps: int,
    seed: int,
    *,
    make_runner: RunnerFactory = numpy_oracle,
    min_tokens: bool = True,
    num_stages: int = 1,
    progress: Callable[[int], None] = lambda steps: None,
    part: CheckShard | None = None,
) -> CheckReport:
    """Run random scenarios until `num_steps` steps have been audited."""
    report = CheckReport(seed)
    seeds = trial_seeds(seed, part or CheckShard())
    while report.steps < num_steps:
        run_trial(next(seeds), report, make_runner, min_tokens=min_tokens, num_stages=num_stages)
        progress(report.steps)
    return report


def run_trial(
    trial_seed: int,
    report: CheckReport,
    make_runner: RunnerFactory = numpy_oracle,
    *,
    min_tokens: bool = True,
    journal: BinaryIO | None = None,
    num_stages: int = 1,
) -> None:
    """Run one scenario by its seed and add its result to the report. The journal is closed at the end."""
    rng = random.Random(trial_seed)
    scenario = draw_scenario(rng, min_tokens=min_tokens)
    if num_stages > 1:
        scenario = with_stages(scenario, num_stages)
    trial = CheckRun(scenario, rng, make_runner, journal)
    try:
        trial.run()
    except Exception as broken:  # whatever escapes from a legal workload is a violation
        report.violations.append(Violation(trial_seed, str(scenario), f"{type(broken).__name__}: {broken}"))
    if isinstance(trial.scheduler, JournaledScheduler):
        trial.scheduler.journal.close()
        if trial.scheduler.journal.error is not None:
            raise trial.scheduler.journal.error
    report.trials += 1
    report.steps += max(trial.steps, 1)
    counters = trial.scheduler.counters
    report.preemptions += counters.preemptions
    report.drafted += counters.drafted_tokens
    report.accepted += counters.accepted_tokens
    report.events += Counter(trial.events)
    report.pairs |= set(pairwise(trial.events))
