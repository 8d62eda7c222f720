"""`quire check`: drives the scheduler against the exact oracle and ends with one line of JSON.

`quire replay`: makes the decisions of a journal again and ends with one line of JSON.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from quire.cli.console import err
from quire.core.errors import ConfigError, EngineFailed
from quire.core.process import die_with_parent
from quire.sched.journal.replay import Condition
from quire.sched.journal.replay import replay as replay_journal
from quire.sim.check.check import (
    CheckReport,
    CheckShard,
    numpy_oracle,
    possible_pairs,
    read_report,
    run_trial,
    trial_seeds,
)
from quire.sim.check.check import check as check_worlds
from quire.sim.check.trial import Body

_SHOWN = 10  # violations that are told in full


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What was asked for."""

    steps: int
    seed: int
    runner: str
    jobs: int = 1
    part: str | None = None  # "2/4/17": what the second of four jobs of process 17 does, which is told in full
    trial: int | None = None
    record: Path | None = None


def check(wish: CheckOptions) -> int:
    """The exit status: 1 if any law was broken."""
    started_s = time.monotonic()
    if wish.part is not None and not die_with_parent(int(wish.part.split("/")[2])):
        return 1
    if wish.trial is not None or wish.record is not None:
        report = _one_world(wish)
    elif wish.jobs > 1:
        report = _shared(wish)
    else:
        report = _alone(wish)
    if wish.part is not None:
        print(report.to_json())
        return 0
    for violation in report.violations[:_SHOWN]:
        told = f"trial seed {violation.trial_seed}: {violation.message}\n  {violation.world}"
        err.print(told, style="red", markup=False)
    if report.violations:
        again = report.violations[0].trial_seed
        err.print(f"quire check --runner {wish.runner} --trial {again} brings the first one back.", style="red")
    print(json.dumps(_summary(report, wish, time.monotonic() - started_s)))
    return 1 if report.violations else 0


def _summary(report: CheckReport, wish: CheckOptions, seconds: float) -> dict[str, object]:
    return {
        "steps": report.steps,
        "violations": len(report.violations),
        "seed": report.seed,
        "trials": report.trials,
        "preemptions": report.preemptions,
        "events": {event.value: count for event, count in sorted(report.events.items(), key=lambda e: e[0].value)},
        "event_pairs": len(report.pairs),
        "event_pairs_possible": len(possible_pairs()),
        "steps_per_s": round(report.steps / seconds),
        "runner": wish.runner,
        "jobs": wish.jobs,
    }


def _alone(wish: CheckOptions) -> CheckReport:
    part = CheckShard()
    if wish.part is not None:
        number, stride, _ = wish.part.split("/")
        part = CheckShard(int(number) - 1, int(stride))
    with Progress(console=err, transient=True, disable=not err.is_terminal or wish.part is not None) as progress:
        task = progress.add_task("checking", total=wish.steps)
        return check_worlds(
            wish.steps,
            wish.seed,
            body=_body(wish.runner),
            min_tokens=_knows_min_tokens(wish.runner),
            progress=lambda done: progress.update(task, completed=done),
            part=part,
        )


def _shared(wish: CheckOptions) -> CheckReport:
    """As many processes of this same command; each takes its share of the worlds and of the steps."""
    each = str(-(-wish.steps // wish.jobs))
    command = [sys.executable, "-m", "quire", "check", "--seed", str(wish.seed), "--runner", wish.runner]
    running: list[subprocess.Popen[str]] = []
    try:
        with err.status(f"checking, {wish.jobs} at a time"):
            for number in range(wish.jobs):
                part = [*command, "--steps", each, "--part", f"{number + 1}/{wish.jobs}/{os.getpid()}"]
                running.append(subprocess.Popen(part, stdout=subprocess.PIPE, text=True))
            heard = [process.communicate()[0] for process in running]
    finally:
        for process in running:  # whoever breaks this off, with Ctrl-C or otherwise, wants none of them
            process.kill()
    report = CheckReport(wish.seed)
    for process, said in zip(running, heard, strict=True):
        if process.returncode != 0 or not said:
            raise EngineFailed(f"A part of the check ended with status {process.returncode}; see above.")
        report.add(read_report(said.splitlines()[-1]))
    return report


def _one_world(wish: CheckOptions) -> CheckReport:
    report = CheckReport(wish.seed)
    trial_seed = next(trial_seeds(wish.seed, CheckShard())) if wish.trial is None else wish.trial
    body, min_tokens = _body(wish.runner), _knows_min_tokens(wish.runner)
    if wish.record is None:
        run_trial(trial_seed, report, body, min_tokens=min_tokens)
        return report
    try:
        run_trial(trial_seed, report, body, min_tokens=min_tokens, journal=wish.record.open("wb"))
    except OSError as error:
        raise ConfigError(f"{wish.record} cannot be written: {error.strerror}.", param="record") from error
    return report


def _knows_min_tokens(runner: str) -> bool:
    """The sampler behind the real runner would then choose another token than the oracle."""
    return runner == "numpy"


def _body(runner: str) -> Body:
    if runner == "numpy":
        return numpy_oracle
    from quire.engine.oracle_runner import torch_oracle

    return torch_oracle


def replay(path: Path) -> int:
    """The exit status: 1 if a decision came out otherwise, or the file was changed."""
    report = replay_journal(path)
    difference = report.difference
    if difference is not None:
        err.print(f"step {difference.step}", style="red")
        err.print(f"  recorded: {difference.recorded}\n  replayed: {difference.replayed}", markup=False)
    summary: dict[str, object] = {
        "steps": report.steps,
        "differences": 0 if difference is None else 1,
        "journal": report.condition.value,
        "bytes": report.num_bytes,
        "bytes_per_step": round(report.bytes_per_step, 1),
    }
    if difference is not None:
        summary["first_difference"] = difference._asdict()
    print(json.dumps(summary))
    return 1 if difference is not None or report.condition is Condition.DAMAGED else 0
