"""Runs a model step by step over a paged store, and gathers the logits of every token."""

import torch
from torch import Tensor

from quire.models.interface import Model
from tests.kernels.layouts import Pages, Part

Schedule = list[dict[int, int]]  # per step: how many tokens of which sequence


def run(
    model: Model,
    prompts: list[list[int]],
    schedule: Schedule,
    block_size: int = 4,
    seed: int = 0,
    device: str = "cpu",
    samples: bool = True,
) -> list[Tensor]:
    """The logits after every token of every prompt, computed as scheduled. Unwritten memory is poison. A pipeline stage
    that does not sample gives its hidden states."""
    pages = Pages.shuffled([len(prompt) for prompt in prompts], block_size, seed)
    geometry = model.kv_geometry
    poison = float("nan") if geometry.dtype.is_floating_point else min(2**20, torch.iinfo(geometry.dtype).max)
    kv = torch.full(geometry.store_shape(pages.num_blocks, block_size), poison, dtype=geometry.dtype, device=device)
    done = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for step in schedule:
        parts = {sequence: Part(done[sequence], count) for sequence, count in step.items()}
        tokens = [prompts[s][part.num_before : part.num_before + part.num_new] for s, part in parts.items()]
        flat = torch.tensor([token for chunk in tokens for token in chunk], device=device)
        hidden = model.forward(flat, pages.layout(parts, device), kv)
        rows = model.logits(hidden) if samples else hidden
        for sequence, chunk in zip(parts, rows.split([len(chunk) for chunk in tokens]), strict=True):
            logits[sequence].append(chunk)
            done[sequence] += len(chunk)
    assert done == [len(prompt) for prompt in prompts]
    return [torch.cat(chunks) for chunks in logits]


def in_chunks(lengths: list[int], size: int) -> Schedule:
    """All sequences side by side, `size` tokens of each a step; those that end first leave."""
    steps: Schedule = []
    for start in range(0, max(lengths), size):
        step = {s: min(size, length - start) for s, length in enumerate(lengths) if length > start}
        steps.append(step)
    return steps
