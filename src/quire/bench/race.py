"""Races in one process, side by side: A-B-A-B, so that a noisy machine is noisy for both."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import LlamaForCausalLM

from quire.bench.rival import generate_static
from quire.bench.workload import Job, mixed_jobs
from quire.core.sampling import SamplingParams
from quire.llm import LLM


@dataclass(slots=True)
class Lane:
    """One contestant in one discipline: seconds per repeat."""

    name: str
    tokens: int
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Race:
    """Both contestants, repeat by repeat."""

    discipline: str
    quire: Lane
    rival: Lane

    @property
    def ratios(self) -> list[float]:
        """How many times faster quire was, in each repeat."""
        return [theirs / ours for ours, theirs in zip(self.quire.seconds, self.rival.seconds, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def race(
    llm: LLM,
    rival: LlamaForCausalLM,
    *,
    num_requests: int,
    batch_size: int,
    repeats: int,
    say: Callable[[str], None],
) -> list[Race]:
    """One request alone, then many of mixed lengths, `repeats` times each, interleaved, after a warm-up."""
    vocab_size = llm.built.checkpoint.spec.vocab_size
    single = [Job(mixed_jobs(1, vocab_size, seed=7)[0].prompt[:64], 64)]
    many = mixed_jobs(num_requests, vocab_size, seed=0)
    races = [
        Race("one request", Lane("quire", 64), Lane("transformers", 64)),
        Race(
            f"{num_requests} mixed requests",
            Lane("quire", sum(job.num_output for job in many)),
            Lane(f"transformers, static batches of {batch_size}", sum(job.num_output for job in many)),
        ),
    ]
    say("warm-up")
    warm = [Job(job.prompt[:16], 4) for job in many[:2]]
    _run_quire(llm, warm)
    generate_static(rival, warm, 2)
    for repeat in range(repeats):
        for current, jobs in zip(races, (single, many), strict=True):
            say(f"repeat {repeat + 1} of {repeats}: {current.discipline}")
            current.quire.seconds.append(_timed(lambda jobs=jobs: _run_quire(llm, jobs)))  # type: ignore[misc]
            current.rival.seconds.append(
                _timed(lambda jobs=jobs: generate_static(rival, jobs, batch_size))  # type: ignore[misc]
            )
    return races


def _run_quire(llm: LLM, jobs: list[Job]) -> None:
    params = [SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
    outputs = llm.generate([{"prompt_token_ids": job.prompt} for job in jobs], params, progress=False)
    for job, output in zip(jobs, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == job.num_output, output


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
