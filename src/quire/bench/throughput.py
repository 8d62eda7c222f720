"""Offline throughput and latency of a closed batch: all requests at once, outputs of fixed lengths.

A report as plain data, for JSON: the figures, and the raw values behind them.
"""

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from quire.bench.observer import GpuBusy, Observer, StepEvent, busy, steady_decode, token_gaps_s
from quire.bench.service_levels import percentiles_ms
from quire.bench.workload import BenchJob, WorkloadSlice, find, named_jobs
from quire.core.errors import ConfigError
from quire.core.process import gc_undisturbed
from quire.core.sampling import SamplingParams
from quire.engine.outputs import RequestMetrics
from quire.kernels.cpu.native_kernels import NativeKernels
from quire.llm import LLM
from quire.models.decoder import Decoder

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


_PROFILED_INPUT, _PROFILED_OUTPUT = 64, 128
_READ_BYTES = 256 << 20  # more than any cache holds


class StepProfile(NamedTuple):
    """Where the time of a decode step of one row goes, mean over the steps of one request, on native CPU kernels."""

    num_steps: int
    step_ms: float
    linear_ms: float
    attention_ms: float
    other_ms: float  # norms, rope and other native work
    rest_ms: float  # Python, scheduler, and native work that is not timed
    weight_bytes: int  # that a step reads
    read_bytes_per_s: float  # of memory, measured beside it

    @property
    def floor_ms(self) -> float:
        """The time in which memory delivers the weights."""
        return 1000 * self.weight_bytes / self.read_bytes_per_s

    @property
    def times_floor(self) -> float:
        return self.step_ms / self.floor_ms


def profile_steps(llm: LLM, model: Decoder, repeats: int) -> StepProfile:
    """A greedy request alone, `repeats` times after a warm-up: the run of median time."""
    kernels = model.kernels
    if not isinstance(kernels, NativeKernels):
        raise ConfigError(
            f"--profile needs the native CPU kernels, and here is: {llm.built.kernels}. Use --device cpu; quire doctor "
            f"shows what they need.",
            param="profile",
        )
    matrices, spec = model.matrices, llm.built.checkpoint.spec
    looked_up = 0 if spec.tied_embeddings else matrices[0].nbytes  # an embedding that is not the head too
    weight_bytes = sum(matrix.nbytes for matrix in matrices) - looked_up
    kernels.set_threads(None)  # all of them, until other programs want the cores
    read_bytes_per_s = measure_read_bandwidth(kernels.active_threads)
    runs = [_profile_once(llm, kernels, weight_bytes, read_bytes_per_s) for _ in range(1 + repeats)][1:]
    return sorted(runs, key=lambda run: run.step_ms)[len(runs) // 2]


def _profile_once(llm: LLM, kernels: NativeKernels, weight_bytes: int, read_bytes_per_s: float) -> StepProfile:
    params = SamplingParams(temperature=0.0, max_tokens=_PROFILED_OUTPUT, ignore_eos=True)
    ids = [1 + i % (llm.built.checkpoint.spec.vocab_size - 1) for i in range(_PROFILED_INPUT)]
    llm.reset_prefix_cache()
    request = llm.client.submit(ids, params)
    llm.client.step()  # the prompt, and the first token
    num_steps = 0
    with gc_undisturbed():
        kernels.profile()  # from here on
        started_s = time.perf_counter()
        while not request.finished:
            llm.client.step()
            num_steps += 1
        seconds = time.perf_counter() - started_s
    spent = kernels.profile()
    linear, attention, other = (each / 1e6 / num_steps for each in (spent.linear, spent.attention, spent.other))
    step_ms = 1000 * seconds / num_steps
    rest = step_ms - linear - attention - other
    return StepProfile(num_steps, step_ms, linear, attention, other, rest, weight_bytes, read_bytes_per_s)


def measure_read_bandwidth(num_threads: int) -> float:
    """Bytes per second that this number of threads reads from memory: the best of several sums."""
    numbers = torch.ones(_READ_BYTES // 4)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return _READ_BYTES / min(_seconds_of(lambda: numbers.sum()) for _ in range(7))
    finally:
        torch.set_num_threads(before)


def _seconds_of(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
