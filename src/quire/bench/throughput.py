"""Offline throughput and latency of a closed batch: all requests at once, outputs of fixed lengths.

A report as plain data, for JSON: the figures, and the raw values behind them.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from quire.bench.observer import GpuBusy, Observer, StepEvent, busy, steady_decode, token_gaps_s
from quire.bench.service_levels import percentiles_ms
from quire.bench.workload import BenchJob, WorkloadSlice, find, named_jobs
from quire.core.errors import ConfigError
from quire.core.process import gc_undisturbed
from quire.core.sampling import Grammar, GrammarKind, SamplingParams
from quire.engine.outputs import RequestMetrics
from quire.kernels.cpu.native_kernels import NativeKernels
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.text.hf_tokenizer import TokenizerFiles
from quire.text.tokenizer import Tokenizer, byte_alphabet

_WARM_UP_OUTPUT = 16  # tokens of each output in the warm-up: enough to decode with all rows assigned
_WARM_UP_SEED = 1_000_003  # added to the seed, so that the warm-up has other prompts


Report = dict[str, object]

_PERSON: Report = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "active"],
    "additionalProperties": False,
}


class BenchGrammar(NamedTuple):
    """A JSON schema for the outputs of some requests, spread evenly.

    An output is a list with one element more than it has tokens: so no output is complete before its forced length.
    """

    name: str
    schema: Report
    share: float

    @staticmethod
    def read(text: str, share: float) -> "BenchGrammar":
        """`json`: a small object; otherwise the name of a file with a schema."""
        if text == "json":
            return BenchGrammar(text, _PERSON, share)
        try:
            schema = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{text} cannot be read as a JSON schema: {error}", param="grammar") from error
        if not isinstance(schema, dict):
            raise ConfigError(f"{text} is not a JSON schema: it holds no object.", param="grammar")
        return BenchGrammar(Path(text).name, schema, share)

    def of(self, jobs: Many[BenchJob]) -> list[Grammar | None]:
        """The grammar of each request."""
        longest = max(job.num_output for job in jobs)
        named = {key: value for key, value in self.schema.items() if key in ("$defs", "definitions", "$schema")}
        element = {key: value for key, value in self.schema.items() if key not in named}
        text = json.dumps({**named, "type": "array", "items": element, "minItems": longest + 1})
        grammar = Grammar(GrammarKind.JSON_SCHEMA, text)
        counts = [math.floor((place + 1) * self.share) - math.floor(place * self.share) for place in range(len(jobs))]
        return [grammar if count else None for count in counts]


_END = "<end>"
_MARKS = ('"', ":", ",", "{", "}", "[", "]", " ", "\n", ".", "-")
_SYLLABLES = [first + second for first in "bcdfghjklmnprstvwz" for second in "aeiouy"]
_FEWEST_TOKENS = 512


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level vocabulary of this size, for the grammars of a model without a tokenizer: all bytes, numbers,
    runs of JSON's marks, and words of a few syllables, with and without a space and a capital. It cannot encode text
    well: it has no merges."""
    if vocab_size < _FEWEST_TOKENS:
        raise ConfigError(f"--grammar needs a vocabulary of {_FEWEST_TOKENS} tokens; this shape has {vocab_size}.")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    texts = chain((str(number) for number in range(1000)), map("".join, product(_MARKS, repeat=2)), _words())
    pieces = ("".join(letters[byte] for byte in text.encode()) for text in texts)
    vocabulary: dict[str, int] = {}
    for piece in chain(letters.values(), pieces):
        vocabulary.setdefault(piece, len(vocabulary))
        if len(vocabulary) == vocab_size - 1:
            break
    backend = Backend(BPE(vocab=vocabulary | {_END: vocab_size - 1}, merges=[]))
    backend.decoder = ByteLevel()
    backend.add_special_tokens([_END])
    return Tokenizer(TokenizerFiles(backend, None, vocab_size - 1, (vocab_size - 1,), None))


def _words() -> Iterator[str]:
    """From short to long."""
    for count in (1, 2, 3):
        for word in map("".join, product(_SYLLABLES, repeat=count)):
            yield from (word, f" {word}", word.capitalize(), f" {word.capitalize()}")


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
    grammar: BenchGrammar | None = None

    @property
    def title(self) -> str:
        if self.grammar is None:
            return self.workload
        share = "" if self.grammar.share == 1 else f"{self.grammar.share:.0%} "
        return f"{self.workload}, {share}under {self.grammar.name}"

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
    grammar: BenchGrammar | None = None,
) -> list[Measurement]:
    """The same requests `repeats` times, after a warm-up with others; the prefix cache is empty before each repeat.

    The lengths of the workload replace those of `sampling`. With a grammar, each repeat runs without it and with it:
    two measurements, in turns of changing order.
    """
    vocab_size = llm.built.checkpoint.spec.vocab_size
    seed = find(workload).seed if seed is None else seed
    jobs = named_jobs(workload, vocab_size, seed, part)
    others = named_jobs(workload, vocab_size, seed + _WARM_UP_SEED, part)
    warm_up = [BenchJob(job.prompt, min(job.num_output, _WARM_UP_OUTPUT)) for job in others]
    _check_lengths(workload, [*jobs, *warm_up], llm.built.resolved.max_model_len)
    say(f"{workload}: warm-up")
    sides = [None] if grammar is None else [None, grammar]
    runs: list[list[ThroughputRun]] = [[] for _ in sides]
    for side in sides:
        run_closed(llm, observer, warm_up, sampling, side)
    for number in range(repeats):
        say(f"{workload}: repeat {number + 1} of {repeats}")
        for place in range(len(sides))[:: -1 if number % 2 else 1]:
            runs[place].append(run_closed(llm, observer, jobs, sampling, sides[place]))
    return [Measurement(workload, seed, part, tuple(of), side) for of, side in zip(runs, sides, strict=True)]


def _check_lengths(workload: str, jobs: Many[BenchJob], max_model_len: int) -> None:
    """Refuse before a run: the engine would refuse each request, without naming the option of the command line."""
    num_input, num_output = max(((len(job.prompt), job.num_output) for job in jobs), key=sum)
    if num_input + num_output > max_model_len:
        raise ConfigError(
            f"{workload} has a request of {num_input} tokens in and {num_output} out, {num_input + num_output} in all, "
            f"but this engine's context is {max_model_len}. Use --max-model-len {num_input + num_output}, or another "
            f"workload."
        )


def run_closed(
    llm: LLM,
    observer: Observer,
    jobs: Many[BenchJob],
    sampling: SamplingParams,
    grammar: BenchGrammar | None = None,
) -> ThroughputRun:
    grammars = [None] * len(jobs) if grammar is None else grammar.of(jobs)
    params = [
        replace(sampling, max_tokens=job.num_output, ignore_eos=True, grammar=each)
        for job, each in zip(jobs, grammars, strict=True)
    ]
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
        "grammar": measured.grammar and measured.grammar._asdict(),
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
