"""A comparison of two commands on one machine, interleaved: quire, the other, quire.

A result is a line of output that is a JSON object with a workload, its seconds and its output tokens. Other lines are
ignored. Does not depend on the engines.
"""

import json
import statistics
import subprocess
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.errors import ConfigError

# Names of the same field in scripts; the first is that of `quire bench`.
_SECONDS = ("seconds", "wall_s", "elapsed_s")
_OUTPUT = ("output_tokens", "out_tok")


class WorkloadResult(NamedTuple):
    """One workload in one run of a command."""

    workload: str
    seconds: float
    num_output: int


@dataclass(slots=True)
class CommandComparison:
    """One workload: the seconds of each run of both engines. A run of the other engine is between two of quire."""

    workload: str
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    num_output: set[int] = field(default_factory=set)  # one number if both did the same work

    @property
    def ratios(self) -> list[float]:
        """For each run of the other engine: its seconds by the mean of the quire runs before and after it."""
        around = zip(self.ours_s, self.ours_s[1:], strict=False)
        return [theirs / ((before + after) / 2) for theirs, (before, after) in zip(self.theirs_s, around, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def drift(self) -> float:
        """The slowest quire run by the fastest: the noise of the machine."""
        return max(self.ours_s) / min(self.ours_s)

    @property
    def same_work(self) -> bool:
        return len(self.num_output) == 1


def compare_commands(
    ours: Many[str], theirs: Many[str], *, rounds: int, say: Callable[[str], None]
) -> list[CommandComparison]:
    """One run of quire, then `rounds` times the other engine and quire. Compares the workloads of all runs."""
    quire_runs = [_run("quire", ours, say)]
    rival_runs = []
    for _ in range(rounds):
        rival_runs.append(_run("the other engine", theirs, say))
        quire_runs.append(_run("quire", ours, say))
    comparisons = []
    for workload in quire_runs[0]:
        if all(workload in run for run in (*quire_runs, *rival_runs)):
            mine, other = [run[workload] for run in quire_runs], [run[workload] for run in rival_runs]
            num_output = {result.num_output for result in (*mine, *other)}
            seconds = [result.seconds for result in mine], [result.seconds for result in other]
            comparisons.append(CommandComparison(workload, *seconds, num_output))
    if not comparisons:
        named = [", ".join(run) or "none" for run in (quire_runs[0], rival_runs[0])]
        raise ConfigError(f"The two have no workload in common: quire ran {named[0]}; the other engine, {named[1]}.")
    return comparisons


def _run(name: str, command: Many[str], say: Callable[[str], None]) -> dict[str, WorkloadResult]:
    """The results of one run of a command, by workload; of a workload that it ran several times, the median."""
    say(f"{name}'s turn")
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    except OSError as error:
        raise ConfigError(f"The command of {name} cannot be run: {error}.") from None
    if ended.returncode != 0:
        raise ConfigError(f"The command of {name} ended with status {ended.returncode}: {' '.join(command)}")
    found: dict[str, list[WorkloadResult]] = {}
    for line in ended.stdout.splitlines():
        result = read_result(line)
        if result is not None:
            found.setdefault(result.workload, []).append(result)
    return {
        workload: WorkloadResult(workload, statistics.median(r.seconds for r in results), results[0].num_output)
        for workload, results in found.items()
    }


def read_result(line: str) -> WorkloadResult | None:
    """The result in a line of output; None if the line has none."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("workload"), str):
        return None
    seconds = next((fields[name] for name in _SECONDS if name in fields), None)
    num_output = next((fields[name] for name in _OUTPUT if name in fields), None)
    if not isinstance(seconds, int | float) or not isinstance(num_output, int):
        return None
    return WorkloadResult(fields["workload"], float(seconds), num_output)
