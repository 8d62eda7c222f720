"""Benchmark workloads: random requests from a seed, the same for every engine. Does not depend on an engine.

Named workloads are those with published GPU figures; any other shape is written as 512x32..256+64. Draws follow a
published order, token by token, so that a script of another engine with the same seed has the same requests.
"""

import math
import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.errors import ConfigError, shown

_NANO_IDS = (0, 10_000)  # as in the public nano-vllm benchmark
_IDS = (10, 100_000)

_LENGTHS = r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?"
_SHAPE = re.compile(rf"([0-9]{{1,18}})x{_LENGTHS}\+{_LENGTHS}")
_MAX_INPUT = 100_000_000  # tokens of all prompts: minutes to draw, gigabytes to hold


@dataclass(frozen=True, slots=True)
class BenchJob:
    """A prompt and its number of output tokens; end tokens are ignored."""

    prompt: list[int]
    num_output: int


def mixed_jobs(count: int, vocab_size: int, seed: int) -> list[BenchJob]:
    """Prompts of 16 to 256 tokens; outputs exponential around 64, from 8 to 256, as in chats."""
    generator = random.Random(seed)
    jobs = []
    for _ in range(count):
        prompt = [generator.randrange(vocab_size) for _ in range(generator.randint(16, 256))]
        jobs.append(BenchJob(prompt, min(256, max(8, round(generator.expovariate(1 / 64))))))
    return jobs


class Workload(NamedTuple):
    """How its requests are drawn, and the seed of its published figures."""

    draw: Callable[[random.Random], list[BenchJob]]
    seed: int


class _Lengths(NamedTuple):
    """Uniform, both ends included. Equal ends draw nothing."""

    low: int
    high: int

    def draw(self, generator: random.Random) -> int:
        return self.low if self.low == self.high else generator.randint(self.low, self.high)


def _uniform(count: int, inputs: _Lengths, outputs: _Lengths, ids: tuple[int, int] = _IDS, seed: int = 1) -> Workload:
    def draw(generator: random.Random) -> list[BenchJob]:
        prompts = [[generator.randint(*ids) for _ in range(inputs.draw(generator))] for _ in range(count)]
        return [BenchJob(prompt, outputs.draw(generator)) for prompt in prompts]

    return Workload(draw, seed)


def _equal(count: int, num_input: int, num_output: int) -> Workload:
    return _uniform(count, _Lengths(num_input, num_input), _Lengths(num_output, num_output))


def _exponential(generator: random.Random) -> list[BenchJob]:
    # A generator: each length is drawn just before its tokens.
    lengths = (max(16, min(1024, int(generator.expovariate(1 / 256)))) for _ in range(512))
    prompts = [[generator.randint(*_IDS) for _ in range(length)] for length in lengths]
    return [BenchJob(prompt, max(4, min(1024, int(generator.expovariate(1 / 128))))) for prompt in prompts]


WORKLOADS = {
    "nano": _uniform(256, _Lengths(100, 1024), _Lengths(100, 1024), ids=_NANO_IDS, seed=0),
    "1k1k": _equal(256, 1024, 1024),
    "exp": Workload(_exponential, seed=2),
    "bs1": _equal(1, 128, 512),
    "bs8": _equal(8, 1024, 128),
    "bs64": _equal(64, 1024, 128),
    "bs256": _equal(256, 1024, 128),
    "prefill2k": _equal(1, 2048, 1),
    "prefill8k": _equal(1, 8192, 1),
}


def find(text: str, known: Collection[str] = WORKLOADS.keys()) -> Workload:
    """A workload by its name, or by its shape as COUNTxIN+OUT."""
    if text in known:
        return WORKLOADS[text]
    written = _SHAPE.fullmatch(text)
    if written is None:
        raise ConfigError(
            f"there is no workload {shown(text)} here; there are {', '.join(known)}, and any other is written as "
            f"COUNTxIN+OUT, such as 64x4096+16 or 512x32..256+64."
        )
    count = int(written[1])
    if count < 1:
        raise ConfigError(f"{text} has 0 requests; use 1 or more.")
    inputs = _lengths(text, "prompts", written[2], written[3])
    outputs = _lengths(text, "answers", written[4], written[5])
    if count * inputs.high > _MAX_INPUT:
        raise ConfigError(
            f"{text} has up to {count * inputs.high:,} tokens of prompts, more than the {_MAX_INPUT:,} that are drawn "
            f"at most; use fewer or shorter ones."
        )
    return _uniform(count, inputs, outputs)


def _lengths(text: str, what: str, low: str, high: str | None) -> _Lengths:
    lengths = _Lengths(int(low), int(low if high is None else high))
    if min(lengths) < 1:
        raise ConfigError(f"{text} has {what} of 0 tokens; use 1 or more.")
    if lengths.low > lengths.high:
        raise ConfigError(f"{text} has {what} of {low}..{high} tokens; the smaller number comes first: {high}..{low}.")
    return lengths


class WorkloadSlice(NamedTuple):
    """The part of a workload that is run. Figures of a part are not figures of the workload."""

    requests: int | None = None  # only the first ones
    scale: float = 1.0  # of every length, rounded up

    @property
    def whole(self) -> bool:
        return self.requests is None and self.scale == 1.0


WHOLE = WorkloadSlice()


def named_jobs(text: str, vocab_size: int, seed: int | None = None, part: WorkloadSlice = WHOLE) -> list[BenchJob]:
    """The requests of a workload. Seed None: that of the published figures. Ids are modulo the vocabulary size."""
    workload = find(text)
    jobs = workload.draw(random.Random(workload.seed if seed is None else seed))[: part.requests]
    return [
        BenchJob(
            [token % vocab_size for token in job.prompt[: math.ceil(len(job.prompt) * part.scale)]],
            math.ceil(job.num_output * part.scale),
        )
        for job in jobs
    ]


# Of `quire bench race`. Lengths follow from the seed; ids from the seed and the round, so that no prefix cache has seen
# a prompt of an earlier round. A prefix that the requests of one workload share is shared within a round.
_LOWEST_ID = 10  # lower ids are mostly control tokens
_NUM_MIXED = 32
_SHARED = re.compile(r"([0-9]{1,9})x([0-9]{1,9}):([0-9.]{1,40}\+[0-9.]{1,40})")

RACE_SHAPES = {"one": "1x64+128", "prefill": "1x1024+1", "shared": "8x800:32+32"}
RACE_WORKLOADS = ("one", "batch", "prefill", "shared")  # batch: as mixed_jobs draws them


@dataclass(frozen=True, slots=True)
class RaceWorkload:
    """The lengths of the requests of a workload."""

    name: str
    shared: int  # tokens of a prefix that all requests have
    own: tuple[int, ...]  # prompt tokens of each request after that prefix
    outputs: tuple[int, ...]

    @property
    def num_output(self) -> int:
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.shared + max(own + output for own, output in zip(self.own, self.outputs, strict=True))

    @property
    def first_token_only(self) -> bool:
        """Whether its seconds are a time to first token."""
        return self.outputs == (1,)

    @property
    def title(self) -> str:
        lengths = " and ".join(
            f"{_length_range(values)} tokens {where}" for values, where in ((self.own, "in"), (self.outputs, "out"))
        )
        shared = f" after {self.shared:,} shared" if self.shared else ""
        return f"{self.name}: {len(self.own)} request{'s' * (len(self.own) > 1)}, {lengths}{shared}"

    def draw(self, vocab_size: int, seed: int, round_number: int) -> list[BenchJob]:
        """The requests of one round."""
        generator = random.Random(f"{seed}.{self.name}.{round_number}")
        low = min(_LOWEST_ID, vocab_size - 1)

        def ids(count: int) -> list[int]:
            return [generator.randrange(low, vocab_size) for _ in range(count)]

        shared = ids(self.shared)
        return [BenchJob(shared + ids(own), output) for own, output in zip(self.own, self.outputs, strict=True)]


def find_race_workload(text: str, seed: int) -> RaceWorkload:
    """A workload by its name, as COUNTxIN+OUT, or with a shared prefix as COUNTxSHARED:IN+OUT."""
    if text == "batch":
        return _of_jobs(text, 0, mixed_jobs(_NUM_MIXED, 2, seed))
    shape = RACE_SHAPES.get(text, text)
    shared = _SHARED.fullmatch(shape)
    try:
        if shared is None:
            return _of_jobs(text, 0, find(shape, ()).draw(random.Random(seed)))
        return _of_jobs(text, int(shared[2]), find(f"{shared[1]}x{shared[3]}", ()).draw(random.Random(seed)))
    except ConfigError as error:
        if "there is no workload" not in error.message:
            raise
        raise ConfigError(
            f"there is no workload {shown(text)} here; there are {', '.join(RACE_WORKLOADS)}, and any other is written "
            f"as COUNTxIN+OUT or COUNTxSHARED:IN+OUT, such as 24x16..256+8..64 or 8x800:32+32."
        ) from None


def _of_jobs(name: str, shared: int, jobs: list[BenchJob]) -> RaceWorkload:
    return RaceWorkload(name, shared, tuple(len(job.prompt) for job in jobs), tuple(job.num_output for job in jobs))


def _length_range(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
