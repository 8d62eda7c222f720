"""Engines in turns on one machine: each in a process of its own, loaded once, one computing at a time. Needs no torch.

For each workload the rounds are interleaved: every engine has its turn in round 1, then every engine in round 2. A
ratio is of two turns of one round. An engine that fails is left out from there on, with its reason.
"""

import functools
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quire.bench.workload import BenchJob, RaceWorkload
from quire.core.errors import ConfigError, EngineFailed
from quire.core.process import die_with_parent

Fields = dict[str, object]
Say = Callable[[str], None]

_ANSWER_TIMEOUT_S = 1800.0  # of a load or a turn
_WARM_OUTPUT = 4  # tokens of each request of the warm-up
_BURNER = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"
# The instruction sets that decide how fast a CPU multiplies, as /proc/cpuinfo names them.
_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


@dataclass(frozen=True, slots=True)
class RaceEntry:
    """One engine with its settings, and the command that starts it (`race_worker`)."""

    name: str
    command: tuple[str, ...]  # the settings as JSON follow
    settings: Mapping[str, object]
    ours: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)  # beside our own
    rebuild: str = ""  # what to type where its build has instructions that this CPU has not


class RaceRun(NamedTuple):
    """One engine, one workload, one round."""

    entry: str
    workload: str
    round_number: int
    seconds: float
    cpu_s: float
    rss_bytes: int
    peak_bytes: int
    first_ids: list[int]  # output of the first request


class RaceStart(NamedTuple):
    """An engine that is ready: what it is, and its start."""

    entry: str
    ours: bool
    version: str
    precision: str
    how: str
    vocab_size: int
    seconds: float  # from the start of the process to its first token
    rss_bytes: int


@dataclass(slots=True)
class RaceResult:
    """All that was measured."""

    starts: list[RaceStart] = field(default_factory=list)
    turns: list[RaceRun] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # entry: reason

    def of(self, entry: str, workload: str) -> list[RaceRun]:
        return [turn for turn in self.turns if (turn.entry, turn.workload) == (entry, workload)]

    def ratios(self, ours: str, peer: str, workload: str) -> list[float]:
        """How many times faster ours is than the other, in each round that both ended."""
        theirs = {turn.round_number: turn.seconds for turn in self.of(peer, workload)}
        mine = self.of(ours, workload)
        return [theirs[turn.round_number] / turn.seconds for turn in mine if turn.round_number in theirs]

    def equal_tokens(self, ours: str, peer: str, workload: str) -> int | None:
        """Output tokens of the first request up to the first difference, at least over the rounds."""
        theirs = {turn.round_number: turn.first_ids for turn in self.of(peer, workload)}
        pairs = [(turn.first_ids, theirs.get(turn.round_number)) for turn in self.of(ours, workload)]
        return min((_common(mine, other) for mine, other in pairs if other is not None), default=None)


class RaceRange(NamedTuple):
    """Values of several rounds."""

    median: float
    low: float
    high: float


def spread(values: Many[float]) -> RaceRange:
    return RaceRange(statistics.median(values), min(values), max(values))


def _common(first: Many[int], second: Many[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class RaceProcessFailed(EngineFailed):
    """A process of the race ended, or answered with an error; the message is its reason, in one line."""


class RaceProcess:
    """A process that speaks the protocol of `race_worker`. What it prints is kept for the reason of a failure."""

    def __init__(self, entry: RaceEntry, more: Mapping[str, object]) -> None:
        self.entry = entry
        self._closed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        started_s = time.monotonic()
        self._process = subprocess.Popen(
            [*entry.command, json.dumps({**entry.settings, **more})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **entry.environment},
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - started_s

    def run(self, jobs: Many[BenchJob]) -> Fields:
        """One turn. All outputs must have their forced length."""
        assert self._process.stdin is not None
        line = json.dumps({"jobs": [[job.prompt, job.num_output] for job in jobs]}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RaceProcessFailed(self._ended()) from None
        answer = self._answer()
        wanted = [job.num_output for job in jobs]
        if answer["counts"] != wanted:
            raise RaceProcessFailed(f"it made {answer['counts']} tokens instead of {wanted}")
        return answer

    def _answer(self) -> Fields:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_TIMEOUT_S)
        if not ready:
            raise RaceProcessFailed(f"it did not answer within {_ANSWER_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RaceProcessFailed(self._ended())
        answer: Fields = json.loads(line)
        if "error" in answer:
            raise RaceProcessFailed(str(answer["error"]))
        return answer

    def _ended(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        remedy = f" ({self.entry.rebuild})" if status == -signal.SIGILL and self.entry.rebuild else ""
        return f"its process ended with {describe_status(status)}{remedy}: {last}"

    def close(self) -> None:
        """Kill the process and what it started. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def run_race(
    entries: Many[RaceEntry], workloads: Many[RaceWorkload], *, rounds: int, seed: int, busy: int, say: Say
) -> RaceResult:
    """Start every engine, warm it up, then the workloads, each in interleaved rounds. Ours come first in a round."""
    result = RaceResult()
    with ExitStack() as stack:
        stack.enter_context(burners(busy))
        workers: list[RaceProcess] = []
        for entry in sorted(entries, key=lambda each: not each.ours):
            say(f"{entry.name}: starting")
            # The first engine, one of ours, says how many ids there are; not every engine can.
            more = {"vocab_size": result.starts[0].vocab_size if result.starts else 0}
            with _noting(entry, result, say):
                workers.append(_started(entry, more))
                stack.callback(workers[-1].close)
                result.starts.append(_start(workers[-1]))
        if not any(start.ours for start in result.starts):
            raise EngineFailed("; ".join(f"{name}: {reason}" for name, reason in result.failures.items()))
        vocab_size = min(start.vocab_size for start in result.starts)
        try:
            for workload in workloads:
                for round_number in range(rounds + 1):  # round 0 warms up
                    say(f"{workload.name}: {f'round {round_number} of {rounds}' if round_number else 'warm-up'}")
                    jobs = workload.draw(vocab_size, seed, round_number)
                    _run_round(workers, workload.name, round_number, jobs, result, say)
        except KeyboardInterrupt:
            say("interrupted: what was measured until now follows")
    return result


def _run_round(
    workers: Many[RaceProcess], workload: str, round_number: int, jobs: list[BenchJob], result: RaceResult, say: Say
) -> None:
    for worker in [each for each in workers if each.entry.name not in result.failures]:
        with _noting(worker.entry, result, say):
            _turn(worker, workload, round_number, jobs, result)
        if worker.entry.name in result.failures:
            worker.close()


def _started(entry: RaceEntry, more: Mapping[str, object]) -> RaceProcess:
    """A process that is ready; started again if it tried what failed, so that its start is that of what it uses."""
    worker = RaceProcess(entry, more)
    restart = worker.about.get("restart")
    if not isinstance(restart, dict):
        return worker
    worker.close()
    return RaceProcess(entry, {**more, **restart})


def _turn(worker: RaceProcess, workload: str, round_number: int, jobs: list[BenchJob], result: RaceResult) -> None:
    if round_number == 0:
        worker.run([BenchJob(job.prompt, min(job.num_output, _WARM_OUTPUT)) for job in jobs])
        return
    got = worker.run(jobs)
    values = [got[name] for name in RaceRun._fields[3:]]
    result.turns.append(RaceRun(worker.entry.name, workload, round_number, *values))  # type: ignore[arg-type]


def _start(worker: RaceProcess) -> RaceStart:
    about = worker.about
    return RaceStart(
        worker.entry.name,
        worker.entry.ours,
        str(about["version"]),
        str(about["precision"]),
        str(about["how"]),
        int(str(about["vocab_size"])),
        worker.start_s,
        int(str(about["rss_bytes"])),
    )


@contextmanager
def _noting(entry: RaceEntry, result: RaceResult, say: Say) -> Iterator[None]:
    """A failure is noted, said in one line, and ends only this engine's race."""
    try:
        yield
    except RaceProcessFailed as error:
        result.failures[entry.name] = error.message
        say(f"{entry.name}: left out: {error.message}")


@contextmanager
def burners(count: int) -> Iterator[None]:
    """Processes that spin meanwhile, as a machine has that does something else."""
    command = [sys.executable, "-I", "-S", "-c", _BURNER, str(os.getpid())]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class CpuInfo(NamedTuple):
    """What decides CPU figures, and how busy the machine was before."""

    name: str
    features: tuple[str, ...]
    cores: int  # that this process may use
    load: float


def cpu_kind() -> CpuInfo:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fields = _cpu_fields()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or _lscpu_name() or platform.processor() or platform.machine()
    return CpuInfo(name, tuple(each for each in _FEATURES if each in flags), cores, os.getloadavg()[0])


def _cpu_fields() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line]
    return {name.strip(): value.strip() for name, value in pairs}


def _lscpu_name() -> str | None:
    """On Arm /proc/cpuinfo has numbers; lscpu knows their names."""
    try:
        shown = subprocess.run(["lscpu"], capture_output=True, text=True, errors="replace", check=False).stdout
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in shown.splitlines() if line.startswith("Model name")), None)


# A rival is a command. A result is a line of its output that is a JSON object with a workload, its seconds and its
# output tokens; other lines are ignored. Names of the same field in scripts; the first is that of `quire bench`.
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


def compare_commands(ours: Many[str], theirs: Many[str], *, rounds: int, say: Say) -> list[CommandComparison]:
    """One run of quire, then `rounds` times the other engine and quire. Compares the workloads of all runs."""
    quire_runs = [_run_command("quire", ours, say)]
    rival_runs = []
    for _ in range(rounds):
        rival_runs.append(_run_command("the other engine", theirs, say))
        quire_runs.append(_run_command("quire", ours, say))
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


def describe_status(status: int) -> str:
    """How a process ended, with the name of the signal that killed it."""
    if status >= 0:
        return f"status {status}"
    if status == -signal.SIGILL:
        return "SIGILL: its build has instructions that this CPU has not"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _run_command(name: str, command: Many[str], say: Say) -> dict[str, WorkloadResult]:
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
