"""Offline throughput and latency of a closed batch: all requests at once, outputs of fixed lengths.

A report as plain data, for JSON: the figures, and the raw values behind them.
"""

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from quire.bench.observer import GpuBusy, Observer, StepEvent, busy, steady_decode, token_gaps_s
from quire.bench.workload import BenchJob, WorkloadSlice, find, named_jobs
from quire.core.errors import ConfigError
from quire.core.process import gc_undisturbed
from quire.core.sampling import SamplingParams
from quire.engine.outputs import RequestMetrics
from quire.llm import LLM

_WARM_UP_OUTPUT = 16  # tokens of each output in the warm-up: enough to decode with all rows assigned
_WARM_UP_SEED = 1_000_003  # added to the seed, so that the warm-up has other prompts


@dataclass(frozen=True, slots=True)
class ThroughputRun:
    """One repeat: its time from the submission of the first request to the end of the last, and its events."""

    seconds: float
    num_input: int  # tokens
    num_output: int
    longest_output: int
    requests: tuple[RequestMetrics, ...]
    steps: tuple[StepEvent, ...]

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output / self.seconds

    @property
    def ms_per_token(self) -> float:
        """The time of the whole run, prefill included, by the longest output: as in the scripts of other engines."""
        return 1000 * self.seconds / self.longest_output

    @property
    def first_tokens_s(self) -> list[float]:
        return [first for request in self.requests if (first := request.time_to_first_token_s) is not None]

    @property
    def gaps_s(self) -> list[float]:
        return token_gaps_s(self.steps)

    @property
    def gpu_busy(self) -> GpuBusy | None:
        return busy(self.steps)

    @property
    def gpu_busy_in_decode(self) -> GpuBusy | None:
        return busy(steady_decode(self.steps))


class Measurement(NamedTuple):
    """All repeats of one workload."""

    workload: str
    seed: int
    part: WorkloadSlice
    runs: tuple[ThroughputRun, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def num_output(self) -> int:
        return self.runs[0].num_output

    @property
    def num_input(self) -> int:
        return self.runs[0].num_input

    @property
    def num_requests(self) -> int:
        return len(self.runs[0].requests)


def measure(
    llm: LLM,
    observer: Observer,
    workload: str,
    *,
    seed: int | None,
    part: WorkloadSlice,
    repeats: int,
    sampling: SamplingParams,
    say: Callable[[str], None],
) -> Measurement:
    """The same requests `repeats` times, after a warm-up with others; the prefix cache is empty before each repeat.

    The lengths of the workload replace those of `sampling`.
    """
    vocab_size = llm.built.checkpoint.spec.vocab_size
    seed = find(workload).seed if seed is None else seed
    jobs = named_jobs(workload, vocab_size, seed, part)
    others = named_jobs(workload, vocab_size, seed + _WARM_UP_SEED, part)
    warm_up = [BenchJob(job.prompt, min(job.num_output, _WARM_UP_OUTPUT)) for job in others]
    _check_lengths(workload, [*jobs, *warm_up], llm.built.resolved.max_model_len)
    say(f"{workload}: warm-up")
    run_closed(llm, observer, warm_up, sampling)
    runs = []
    for number in range(repeats):
        say(f"{workload}: repeat {number + 1} of {repeats}")
        runs.append(run_closed(llm, observer, jobs, sampling))
    return Measurement(workload, seed, part, tuple(runs))


def _check_lengths(workload: str, jobs: Many[BenchJob], max_model_len: int) -> None:
    """Refuse before a run: the engine would refuse each request, without naming the option of the command line."""
    num_input, num_output = max(((len(job.prompt), job.num_output) for job in jobs), key=sum)
    if num_input + num_output > max_model_len:
        raise ConfigError(
            f"{workload} has a request of {num_input} tokens in and {num_output} out, {num_input + num_output} in all, "
            f"but this engine's context is {max_model_len}. Use --max-model-len {num_input + num_output}, or another "
            f"workload."
        )


def run_closed(llm: LLM, observer: Observer, jobs: Many[BenchJob], sampling: SamplingParams) -> ThroughputRun:
    params = [replace(sampling, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
    prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
    llm.reset_prefix_cache()
    observer.clear()
    with gc_undisturbed():
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - started_s
    for job, output in zip(jobs, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == job.num_output, output
    return ThroughputRun(
        seconds,
        sum(len(job.prompt) for job in jobs),
        sum(job.num_output for job in jobs),
        max(job.num_output for job in jobs),
        tuple(output.metrics for output in outputs),
        tuple(observer.steps),
    )


class Percentiles(NamedTuple):
    """Percentiles in milliseconds, by nearest rank: each is a measured value."""

    p50: float
    p90: float
    p99: float
    max: float


def percentiles_ms(seconds: Many[float]) -> Percentiles | None:
    if not seconds:
        return None
    found = np.quantile(np.asarray(seconds) * 1000, (0.5, 0.9, 0.99, 1.0), method="inverted_cdf")
    return Percentiles(*(round(float(value), 4) for value in found))


Report = dict[str, object]

NO_GPU = "not measured: the device is the CPU, which computes each step in the time of the engine loop"


def throughput(measured: Measurement) -> Report:
    return {
        "bench": "throughput",
        **_work(measured),
        "output_tokens_per_s": measured.num_output / measured.seconds,
        "requests_per_s": measured.num_requests / measured.seconds,
        "repeats": [_repeat(run) for run in measured.runs],
    }


def latency(measured: Measurement) -> Report:
    """Percentiles over the tokens, and over the first tokens, of all repeats."""
    gaps_s = [gap for run in measured.runs for gap in run.gaps_s]
    first_s = [first for run in measured.runs for first in run.first_tokens_s]
    gaps, first = percentiles_ms(gaps_s), percentiles_ms(first_s)
    return {
        "bench": "latency",
        **_work(measured),
        "ms_per_token": 1000 * measured.seconds / measured.runs[0].longest_output,
        "first_token_ms": None if first is None else first._asdict(),
        "gap_ms": None if gaps is None else gaps._asdict(),
        "repeats": [
            {**_repeat(run), "steps": [_step(step, run.steps[0]) for step in run.steps]} for run in measured.runs
        ],
    }


def _work(measured: Measurement) -> Report:
    return {
        "workload": measured.workload,
        "whole": measured.part.whole,  # a part is not a figure of the workload
        "scale": measured.part.scale,
        "seed": measured.seed,
        "requests": measured.num_requests,
        "input_tokens": measured.num_input,
        "output_tokens": measured.num_output,
        "seconds": measured.seconds,
    }


def _repeat(run: ThroughputRun) -> Report:
    return {
        "seconds": run.seconds,
        "output_tokens_per_s": run.output_tokens_per_s,
        "ms_per_token": run.ms_per_token,
        "first_token_s": run.first_tokens_s,
        "num_steps": len(run.steps),
        "preemptions": sum(request.num_preemptions for request in run.requests),
        "cached_tokens": sum(request.num_cached_tokens for request in run.requests),
        "gpu_busy": run.gpu_busy and run.gpu_busy._asdict(),
        "gpu_busy_in_decode": run.gpu_busy_in_decode and run.gpu_busy_in_decode._asdict(),
        "gpu_busy_note": NO_GPU if run.gpu_busy is None else None,
    }


def _step(step: StepEvent, first: StepEvent) -> Report:
    """Times in seconds since the launch of the first step."""
    span = step.span
    return {
        "launched_s": step.launched_s - first.launched_s,
        "done_s": step.done_s - first.launched_s,
        "prompt_tokens": step.num_prompt,
        "output_tokens": len(step.rows),
        "device_s": None if span is None else span.last.seconds_since(span.first),
    }
