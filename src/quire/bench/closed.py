"""A closed batch: all requests at once, each as long as it was drawn. What one run gave, and figures of it."""

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.bench.observer import Busy, Observer, StepEvent, busy, steady_decode, token_gaps_s
from quire.bench.workload import Job, Part, find, named_jobs
from quire.core.errors import ConfigError
from quire.core.garbage import undisturbed
from quire.core.sampling import SamplingParams
from quire.engine.outputs import RequestMetrics
from quire.llm import LLM

_WARM_OUTPUT = 16  # tokens of each answer while warming up: enough to decode with everybody seated
_OTHER_SEED = 1_000_003  # added to the seed for the warm-up, whose prompts must not be those that are measured


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat: its time from the first request's submission to the last one's end, and what happened in it."""

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
        """Of the whole run, prompts and all, by the longest answer: what other engines' scripts call it too."""
        return 1000 * self.seconds / self.longest_output

    @property
    def first_tokens_s(self) -> list[float]:
        return [first for request in self.requests if (first := request.time_to_first_token_s) is not None]

    @property
    def gaps_s(self) -> list[float]:
        return token_gaps_s(self.steps)

    @property
    def gpu_busy(self) -> Busy | None:
        return busy(self.steps)

    @property
    def gpu_busy_in_decode(self) -> Busy | None:
        return busy(steady_decode(self.steps))


class Measurement(NamedTuple):
    """All repeats of one workload."""

    workload: str
    seed: int
    part: Part
    runs: tuple[Run, ...]

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
    part: Part,
    repeats: int,
    sampling: SamplingParams,
    say: Callable[[str], None],
) -> Measurement:
    """The same requests `repeats` times, after a warm-up with others; the prefix cache is empty before each.

    `sampling`: how their tokens are chosen; not how many.
    """
    vocab_size = llm.built.checkpoint.spec.vocab_size
    seed = find(workload).seed if seed is None else seed
    jobs = named_jobs(workload, vocab_size, seed, part)
    others = named_jobs(workload, vocab_size, seed + _OTHER_SEED, part)
    warming = [Job(job.prompt, min(job.num_output, _WARM_OUTPUT)) for job in others]
    _check_lengths(workload, [*jobs, *warming], llm.built.resolved.max_model_len)
    say(f"{workload}: warm-up")
    run_closed(llm, observer, warming, sampling)
    runs = []
    for number in range(repeats):
        say(f"{workload}: repeat {number + 1} of {repeats}")
        runs.append(run_closed(llm, observer, jobs, sampling))
    return Measurement(workload, seed, part, tuple(runs))


def _check_lengths(workload: str, jobs: Many[Job], max_model_len: int) -> None:
    """Before anything is run: the door would refuse them one by one, and does not know that there is a command line."""
    num_input, num_output = max(((len(job.prompt), job.num_output) for job in jobs), key=sum)
    if num_input + num_output > max_model_len:
        raise ConfigError(
            f"{workload} has a request of {num_input} tokens in and {num_output} out, {num_input + num_output} in all, "
            f"but this engine's context is {max_model_len}. Use --max-model-len {num_input + num_output}, or another "
            f"workload."
        )


def run_closed(llm: LLM, observer: Observer, jobs: Many[Job], sampling: SamplingParams) -> Run:
    params = [replace(sampling, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
    prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
    llm.reset_prefix_cache()
    observer.clear()
    with undisturbed():
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - started_s
    for job, output in zip(jobs, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == job.num_output, output
    return Run(
        seconds,
        sum(len(job.prompt) for job in jobs),
        sum(job.num_output for job in jobs),
        max(job.num_output for job in jobs),
        tuple(output.metrics for output in outputs),
        tuple(observer.steps),
    )
