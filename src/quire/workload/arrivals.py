"""When requests come, and what their prompts are, from a seed. The same seed gives the same work to everybody."""

from collections.abc import Iterable

import numpy as np

from quire.core.ids import IntArray
from quire.workload.traces import TraceRow

PIECE = 512  # tokens of a prompt that one id stands for


def poisson(rows: Iterable[TraceRow], per_s: float, seed: int) -> list[TraceRow]:
    """The same requests in the same order, so many a second on average."""
    assert per_s > 0, per_s
    dice = np.random.default_rng(seed)
    now_s, arrived = 0.0, []
    for row in rows:
        now_s += float(dice.exponential(1 / per_s))
        arrived.append(row._replace(arrived_s=now_s))
    return arrived


def prompt_of(row: TraceRow, number: int, vocab_size: int, seed: int = 0) -> IntArray:
    """The prompt of a request: each piece from its id; all from the request's number where nothing is shared."""
    if not row.prefix_ids:
        return _draw((seed, 0, number), row.num_prompt, vocab_size)
    pieces = [_draw((seed, 1, piece), PIECE, vocab_size) for piece in row.prefix_ids]
    missing = row.num_prompt - PIECE * len(pieces)
    if missing > 0:  # what no id stands for is its own
        pieces.append(_draw((seed, 0, number), missing, vocab_size))
    return np.concatenate(pieces)[: row.num_prompt]


def _draw(seed: tuple[int, ...], count: int, vocab_size: int) -> IntArray:
    return np.random.default_rng(seed).integers(1, vocab_size, count, dtype=np.int32)
