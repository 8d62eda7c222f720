"""Two commands in turns on one machine: ours, theirs, ours. Reads what each prints, and knows neither's insides.

A command prints lines; those that are JSON objects with a workload, its seconds and its output tokens are results. All
else it says is passed over.
"""

import json
import statistics
import subprocess
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.errors import ConfigError

# How scripts call the same thing; the first of each is how ours do.
_SECONDS = ("seconds", "wall_s", "elapsed_s")
_OUTPUT = ("output_tokens", "out_tok")


class Result(NamedTuple):
    """A workload as one command ran it once."""

    workload: str
    seconds: float
    num_output: int


@dataclass(slots=True)
class Heat:
    """One workload: the seconds of each of our turns and of each of theirs, which lie between two of ours."""

    workload: str
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    num_output: set[int] = field(default_factory=set)  # one number, if both did the same work

    @property
    def ratios(self) -> list[float]:
        """How many times as long they took as our turns before and after, for each of their turns."""
        around = zip(self.ours_s, self.ours_s[1:], strict=False)
        return [theirs / ((before + after) / 2) for theirs, (before, after) in zip(self.theirs_s, around, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def drift(self) -> float:
        """Our slowest turn by our fastest: what the machine itself did to the figures."""
        return max(self.ours_s) / min(self.ours_s)

    @property
    def same_work(self) -> bool:
        return len(self.num_output) == 1


def duel(ours: Many[str], theirs: Many[str], *, rounds: int, say: Callable[[str], None]) -> list[Heat]:
    """Ours, then `rounds` times theirs and ours; a heat for each workload that both named in every turn."""
    turns = [_run("quire", ours, say)]
    rival_turns = []
    for _ in range(rounds):
        rival_turns.append(_run("the rival", theirs, say))
        turns.append(_run("quire", ours, say))
    heats = []
    for workload in turns[0]:
        if all(workload in turn for turn in (*turns, *rival_turns)):
            mine, other = [turn[workload] for turn in turns], [turn[workload] for turn in rival_turns]
            num_output = {result.num_output for result in (*mine, *other)}
            heats.append(Heat(workload, [r.seconds for r in mine], [r.seconds for r in other], num_output))
    if not heats:
        named = [", ".join(turn) or "none" for turn in (turns[0], rival_turns[0])]
        raise ConfigError(f"The two have no workload in common: quire ran {named[0]}; the rival, {named[1]}.")
    return heats


def _run(who: str, command: Many[str], say: Callable[[str], None]) -> dict[str, Result]:
    """What a command's turn gave, by workload; of a workload that it ran several times, the median."""
    say(f"{who}'s turn")
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    except OSError as error:
        raise ConfigError(f"The command of {who} cannot be run: {error}.") from None
    if ended.returncode != 0:
        raise ConfigError(f"The command of {who} ended with status {ended.returncode}: {' '.join(command)}")
    found: dict[str, list[Result]] = {}
    for line in ended.stdout.splitlines():
        result = read_result(line)
        if result is not None:
            found.setdefault(result.workload, []).append(result)
    return {
        name: Result(name, statistics.median(r.seconds for r in results), results[0].num_output)
        for name, results in found.items()
    }


def read_result(line: str) -> Result | None:
    """None if the line is something else."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("workload"), str):
        return None
    seconds = next((told[name] for name in _SECONDS if name in told), None)
    num_output = next((told[name] for name in _OUTPUT if name in told), None)
    if not isinstance(seconds, int | float) or not isinstance(num_output, int):
        return None
    return Result(told["workload"], float(seconds), num_output)
