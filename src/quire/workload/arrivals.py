"""Poisson arrival times and random prompts for the requests of a trace, from a seed."""

from collections.abc import Iterable

import numpy as np

from quire.core.ids import IntArray
from quire.workload.traces import TraceRow

CHUNK = 512  # prompt tokens per prefix id


def poisson(rows: Iterable[TraceRow], per_s: float, seed: int) -> list[TraceRow]:
    """The same requests in the same order, at an average rate."""
    assert per_s > 0, per_s
    generator = np.random.default_rng(seed)
    now_s, arrived = 0.0, []
    for row in rows:
        now_s += float(generator.exponential(1 / per_s))
        arrived.append(row._replace(arrived_s=now_s))
    return arrived


def prompt_of(row: TraceRow, number: int, vocab_size: int, seed: int = 0) -> IntArray:
    """The prompt of a request: each chunk from its prefix id; all from the request's number without prefix ids."""
    if not row.prefix_ids:
        return _draw((seed, 0, number), row.num_prompt, vocab_size)
    chunks = [_draw((seed, 1, prefix_id), CHUNK, vocab_size) for prefix_id in row.prefix_ids]
    missing = row.num_prompt - CHUNK * len(chunks)
    if missing > 0:  # tokens without an id are not shared
        chunks.append(_draw((seed, 0, number), missing, vocab_size))
    return np.concatenate(chunks)[: row.num_prompt]


def _draw(seed: tuple[int, ...], count: int, vocab_size: int) -> IntArray:
    return np.random.default_rng(seed).integers(1, vocab_size, count, dtype=np.int32)
