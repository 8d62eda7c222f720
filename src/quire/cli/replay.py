"""`quire replay`: makes the decisions of a journal again and ends with one line of JSON."""

import json
from pathlib import Path

from quire.cli.console import err
from quire.sched.replay import Condition
from quire.sched.replay import replay as replay_journal


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
