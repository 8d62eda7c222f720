"""`quire check`: random workloads through the scheduler against an exact oracle. `quire replay`: the decisions of a
journal, made again. Both end with one line of JSON; `quire replay --view` shows the decisions in the page /engine."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import Progress

from quire.cli.console import err
from quire.core.errors import BrokenJournal, ConfigError, EngineFailed
from quire.core.process import die_with_parent
from quire.sched.journal.replay import Condition, read_journal
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
from quire.sim.check.check import check as check_scenarios
from quire.sim.check.trial import RunnerFactory

_SHOWN = 10  # violations printed in full


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of `quire check`."""

    steps: int
    seed: int
    runner: str
    jobs: int = 1
    part: str | None = None  # "2/4/17": the second of four jobs of process 17, which receives the whole report
    trial: int | None = None
    record: Path | None = None


def check(options: CheckOptions) -> int:
    """The exit status: 1 if an invariant was violated."""
    started_s = time.monotonic()
    if options.part is not None and not die_with_parent(int(options.part.split("/")[2])):
        return 1
    if options.trial is not None or options.record is not None:
        report = _one_scenario(options)
    elif options.jobs > 1:
        report = _shared(options)
    else:
        report = _alone(options)
    if options.part is not None:
        print(report.to_json())
        return 0
    for violation in report.violations[:_SHOWN]:
        text = f"trial seed {violation.trial_seed}: {violation.message}\n  {violation.scenario}"
        err.print(text, style="red", markup=False)
    if report.violations:
        again = report.violations[0].trial_seed
        err.print(f"quire check --runner {options.runner} --trial {again} brings the first one back.", style="red")
    print(json.dumps(_summary(report, options, time.monotonic() - started_s)))
    return 1 if report.violations else 0


def _summary(report: CheckReport, options: CheckOptions, seconds: float) -> dict[str, object]:
    return {
        "steps": report.steps,
        "violations": len(report.violations),
        "seed": report.seed,
        "trials": report.trials,
        "preemptions": report.preemptions,
        "drafted": report.drafted,
        "accepted": report.accepted,
        "events": {event.value: count for event, count in sorted(report.events.items(), key=lambda e: e[0].value)},
        "event_pairs": len(report.pairs),
        "event_pairs_possible": len(possible_pairs()),
        "steps_per_s": round(report.steps / seconds),
        "runner": options.runner,
        "jobs": options.jobs,
    }


def _alone(options: CheckOptions) -> CheckReport:
    part = CheckShard()
    if options.part is not None:
        number, stride, _ = options.part.split("/")
        part = CheckShard(int(number) - 1, int(stride))
    with Progress(console=err, transient=True, disable=not err.is_terminal or options.part is not None) as progress:
        task = progress.add_task("checking", total=options.steps)
        return check_scenarios(
            options.steps,
            options.seed,
            make_runner=_runner(options.runner),
            min_tokens=_has_min_tokens(options.runner),
            num_stages=_num_stages(options.runner),
            progress=lambda done: progress.update(task, completed=done),
            part=part,
        )


def _shared(options: CheckOptions) -> CheckReport:
    """One process of this command per job; each runs its share of the scenarios and of the steps."""
    steps = str(-(-options.steps // options.jobs))
    command = [sys.executable, "-m", "quire", "check", "--seed", str(options.seed), "--runner", options.runner]
    running: list[subprocess.Popen[str]] = []
    try:
        with err.status(f"checking, {options.jobs} at a time"):
            for number in range(options.jobs):
                part = [*command, "--steps", steps, "--part", f"{number + 1}/{options.jobs}/{os.getpid()}"]
                running.append(subprocess.Popen(part, stdout=subprocess.PIPE, text=True))
            outputs = [process.communicate()[0] for process in running]
    finally:
        for process in running:  # after Ctrl-C or a failure too
            process.kill()
    report = CheckReport(options.seed)
    for process, output in zip(running, outputs, strict=True):
        if process.returncode != 0 or not output:
            raise EngineFailed(f"A part of the check ended with status {process.returncode}; see above.")
        report.add(read_report(output.splitlines()[-1]))
    return report


def _one_scenario(options: CheckOptions) -> CheckReport:
    report = CheckReport(options.seed)
    trial_seed = next(trial_seeds(options.seed, CheckShard())) if options.trial is None else options.trial
    trial = partial(
        run_trial,
        trial_seed,
        report,
        _runner(options.runner),
        min_tokens=_has_min_tokens(options.runner),
        num_stages=_num_stages(options.runner),
    )
    if options.record is None:
        trial()
        return report
    try:
        trial(journal=options.record.open("wb"))
    except OSError as error:
        raise ConfigError(f"{options.record} cannot be written: {error.strerror}.", param="record") from error
    return report


def _has_min_tokens(runner: str) -> bool:
    """Whether requests have min_tokens: with it the real sampler would choose another token than the oracle."""
    return runner == "numpy"


def _num_stages(runner: str) -> int:
    return 2 if runner == "pipeline" else 1


def _runner(runner: str) -> RunnerFactory:
    if runner == "numpy":
        return numpy_oracle
    from quire.engine.oracle_runner import PipelineOracle, cuda_oracle, rank_oracle, torch_oracle

    if runner == "cuda":
        return cuda_oracle()
    if runner == "pipeline":
        return PipelineOracle
    return rank_oracle if runner == "ranks" else torch_oracle


def replay(path: Path) -> int:
    """The exit status: 1 if a decision differs, or the file is damaged."""
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


def view_replay(path: Path, port: int) -> None:
    """Serve the page /engine over a journal, until Ctrl-C."""
    contents = read_journal(path)
    if not contents.num_absorbed:
        raise BrokenJournal(f"{path} holds no step ({contents.condition.value}): there is nothing to show.")
    from quire.cli.serve import listen
    from quire.server.replay_view import HOST, ReplayPlayer, replay_server

    player = ReplayPlayer(contents, time.monotonic)
    with listen(HOST, port) as listening:
        if notice := player.notice():
            err.print(notice, style="yellow", markup=False)
        url = f"http://{HOST}:{listening.getsockname()[1]}/engine"
        err.print(f"{contents.num_absorbed:,} steps  →  {url}   (Ctrl-C ends)", markup=False, soft_wrap=True)
        try:
            replay_server(player).run([listening])
        except KeyboardInterrupt:
            err.print("Stopped.")
