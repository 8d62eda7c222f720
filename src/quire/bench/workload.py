"""Requests of mixed lengths, drawn from a seed: the same for everybody who races."""

import random
from dataclasses import dataclass


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
