"""`quire check`: drives the scheduler against the exact oracle and ends with one line of JSON."""

import json
import time

from rich.progress import Progress

from quire.cli.console import err
from quire.sim.check import Body, numpy_oracle
from quire.sim.check import check as check_worlds


def check(steps: int, seed: int, runner: str) -> int:
    """The exit status: 1 if any law was broken."""
    started_s = time.monotonic()
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("checking", total=steps)
        report = check_worlds(
            steps,
            seed,
            body=_body(runner),
            min_tokens=runner == "numpy",  # the sampler would then choose another token than the oracle
            progress=lambda done: progress.update(task, completed=done),
        )
    seconds = time.monotonic() - started_s
    for violation in report.violations[:10]:
        err.print(f"trial seed {violation.trial_seed}: {violation.message}\n  {violation.world}", style="red")
    summary = {
        "steps": report.steps,
        "violations": len(report.violations),
        "seed": report.seed,
        "trials": report.trials,
        "preemptions": report.preemptions,
        "runner": runner,
        "steps_per_s": round(report.steps / seconds),
    }
    print(json.dumps(summary))
    return 1 if report.violations else 0


def _body(runner: str) -> Body:
    if runner == "numpy":
        return numpy_oracle
    from quire.engine.oracle import torch_oracle

    return torch_oracle
