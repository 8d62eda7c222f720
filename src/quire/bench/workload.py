"""Requests drawn from a seed: the same for everybody who races. Knows lengths and token ids, no engine.

The named workloads are those that GPU figures are given for. Their draws follow a published order, token by token, so
that another engine's script with the same name and seed has the very same requests.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_NANO_IDS = 10_000  # the public nano-vllm benchmark draws its token ids from 0 to here
_IDS = (10, 100_000)


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and how many tokens must follow it, end tokens or not."""

    prompt: list[int]
    num_output: int


def mixed_jobs(count: int, vocab_size: int, seed: int) -> list[Job]:
    """Prompts of 16 to 256 tokens; outputs exponential around 64, from 8 to 256, as chats have them."""
    dice = random.Random(seed)
    jobs = []
    for _ in range(count):
        prompt = [dice.randrange(vocab_size) for _ in range(dice.randint(16, 256))]
        jobs.append(Job(prompt, min(256, max(8, round(dice.expovariate(1 / 64))))))
    return jobs


class Workload(NamedTuple):
    """How the requests of a name are drawn, and the seed that its published figures have."""

    about: str
    draw: Callable[[random.Random], list[Job]]
    seed: int


def _nano(dice: random.Random) -> list[Job]:
    prompts = [[dice.randint(0, _NANO_IDS) for _ in range(dice.randint(100, 1024))] for _ in range(256)]
    return [Job(prompt, dice.randint(100, 1024)) for prompt in prompts]


def _exponential(dice: random.Random) -> list[Job]:
    # A generator: each length is drawn just before its tokens.
    lengths = (max(16, min(1024, int(dice.expovariate(1 / 256)))) for _ in range(512))
    prompts = [[dice.randint(*_IDS) for _ in range(length)] for length in lengths]
    return [Job(prompt, max(4, min(1024, int(dice.expovariate(1 / 128))))) for prompt in prompts]


def _equal(count: int, num_input: int, num_output: int) -> Workload:
    def draw(dice: random.Random) -> list[Job]:
        return [Job([dice.randint(*_IDS) for _ in range(num_input)], num_output) for _ in range(count)]

    return Workload(f"{count} × {num_input} in, {num_output} out", draw, seed=1)


WORKLOADS = {
    "nano": Workload("256 requests, in and out uniform from 100 to 1024", _nano, seed=0),
    "1k1k": _equal(256, 1024, 1024),
    "exp": Workload("512 requests, exponential around 256 in and 128 out", _exponential, seed=2),
    "bs1": _equal(1, 128, 512),
    "bs8": _equal(8, 1024, 128),
    "bs64": _equal(64, 1024, 128),
    "bs256": _equal(256, 1024, 128),
    "prefill2k": _equal(1, 2048, 1),
    "prefill8k": _equal(1, 8192, 1),
}


class Part(NamedTuple):
    """How much of a workload is run. A figure of less than the whole is no figure of the workload."""

    requests: int | None = None  # the first so many
    scale: float = 1.0  # of every length, rounded up

    @property
    def whole(self) -> bool:
        return self.requests is None and self.scale == 1.0


WHOLE = Part()


def named_jobs(name: str, vocab_size: int, seed: int | None = None, part: Part = WHOLE) -> list[Job]:
    """The requests of a workload. Without a seed it is that of the published figures.

    Token ids that a small vocabulary does not have are taken modulo its size.
    """
    workload = WORKLOADS[name]
    jobs = workload.draw(random.Random(workload.seed if seed is None else seed))[: part.requests]
    return [
        Job(
            [token % vocab_size for token in job.prompt[: math.ceil(len(job.prompt) * part.scale)]],
            math.ceil(job.num_output * part.scale),
        )
        for job in jobs
    ]
