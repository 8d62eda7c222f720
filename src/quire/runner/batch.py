"""Builds the flat, ragged inputs of one step: cruising rows first, one token each, then the chunks.

Nothing is padded, but that a plan may ask for so many tokens of padding (static regimes do): they come last.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import NULL_BLOCK, IntArray
from quire.core.step import Chunk, Output, StepPlan
from quire.kernels.contract import Ragged
from quire.runner.pooling import Pooling
from quire.runner.rows import RowTable
from quire.sampling.rows import RowBatch


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Part of a chunk whose tokens are to be scored: hidden states [first, first + len(targets)) predict them."""

    chunk: Chunk
    first: int
    targets: IntArray


class Asking(NamedTuple):
    """Some rows of the step whose logits are needed."""

    at: Tensor  # [n] int64: their places in the flat batch
    batch: RowBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model reads in one step, and who gets what afterwards."""

    tokens: Tensor  # [tokens] int64
    ragged: Ragged
    sampling: Asking  # the rows that get a token
    tethered: Asking | None  # the rows that give back their candidates
    scoring: tuple[PromptScoring, ...]
    pooling: tuple[Pooling, ...]


def build_batch(table: RowTable, plan: StepPlan, cruising: IntArray) -> StepBatch:
    """The batch of a plan that `table` has applied."""
    device = table.device
    chunks = plan.chunks
    rows = np.concatenate([cruising, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
    query_lengths = np.ones(len(rows), dtype=np.int64)
    query_lengths[len(cruising) :] = [chunk.length for chunk in chunks]
    query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lengths, out=query_starts[1:])
    samples = np.ones(len(rows), dtype=np.bool_)
    samples[len(cruising) :] = [Output.SAMPLE in chunk.output for chunk in chunks]

    device_rows = torch.from_numpy(rows).to(device, torch.int64)
    cruising_rows = device_rows[: len(cruising)]
    cruising_lengths = table.lengths[cruising_rows]
    tokens, positions, contexts = table.last_tokens[cruising_rows], cruising_lengths - 1, cruising_lengths
    if chunks:
        known = [table.seats[c.row].tokens[c.start : c.start + c.length] for c in chunks]
        places = [np.arange(c.start, c.start + c.length) for c in chunks]
        ends = torch.tensor([c.start + c.length for c in chunks], device=device)
        tokens = torch.cat([tokens, torch.from_numpy(np.concatenate(known)).to(device, torch.int64)])
        positions = torch.cat([positions, torch.from_numpy(np.concatenate(places)).to(device)])
        contexts = torch.cat([contexts, ends])
    token_rows = torch.from_numpy(np.repeat(rows, query_lengths)).to(device, torch.int64)
    ragged = Ragged(
        positions=positions,
        slots=_slots(table, token_rows, positions),
        tables=table.tables[device_rows, : int(table.num_blocks[rows].max(initial=0))],
        query_starts=torch.from_numpy(query_starts).to(device, torch.int32),
        context_lengths=contexts.to(torch.int32),
        reaches=table.reaches[token_rows],
    )
    if plan.num_padding:
        tokens, ragged = _padded(tokens, ragged, plan.num_padding)
    tethered = np.zeros(len(rows), dtype=np.bool_)
    tethered[len(cruising) :] = [Output.CANDIDATES in chunk.output for chunk in chunks]
    last_tokens = query_starts[1:] - 1
    return StepBatch(
        tokens,
        ragged,
        sampling=_asking(rows, samples, last_tokens, device_rows, positions),
        tethered=_asking(rows, tethered, last_tokens, device_rows, positions) if tethered.any() else None,
        scoring=_scoring(table, chunks, query_starts[len(cruising) :]),
        pooling=_pooling(table, chunks, query_starts[len(cruising) :]),
    )


def _asking(
    rows: IntArray,
    who: NDArray[np.bool_],
    last_tokens: NDArray[np.int64],  # of each row, in the flat batch
    device_rows: Tensor,  # [rows] int64
    positions: Tensor,  # [tokens] int64
) -> Asking:
    asking = rows[who]
    at = torch.from_numpy(last_tokens[who]).to(positions.device)
    batch = RowBatch(
        rows=device_rows if who.all() else torch.from_numpy(asking).to(positions.device, torch.int64),
        host_rows=asking,
        positions=positions[at] + 1,
    )
    return Asking(at, batch)


def _padded(tokens: Tensor, ragged: Ragged, count: int) -> tuple[Tensor, Ragged]:
    """The step with so many sequences more, each of one token in the first slot of the null block."""
    nothing = tokens.new_zeros(count)
    starts = ragged.query_starts[-1] + torch.arange(1, count + 1, dtype=torch.int32, device=tokens.device)
    missing_width = int(ragged.tables.shape[1] == 0)
    padded = Ragged(
        positions=torch.cat([ragged.positions, nothing]),
        slots=torch.cat([ragged.slots, nothing]),
        tables=F.pad(ragged.tables, (0, missing_width, 0, count), value=NULL_BLOCK),
        query_starts=torch.cat([ragged.query_starts, starts]),
        context_lengths=F.pad(ragged.context_lengths, (0, count), value=1),
        reaches=F.pad(ragged.reaches, (0, count), value=1),
    )
    return torch.cat([tokens, nothing]), padded


def _slots(table: RowTable, rows: Tensor, positions: Tensor) -> Tensor:
    """Where each token's keys and values are written; ended rows write to the null block. rows: [tokens] int64."""
    blocks = table.tables[rows, positions // table.block_size].long()
    blocks = torch.where(table.alive[rows], blocks, NULL_BLOCK)
    return blocks * table.block_size + positions % table.block_size


def _scoring(table: RowTable, chunks: tuple[Chunk, ...], starts: np.ndarray) -> tuple[PromptScoring, ...]:
    scoring = []
    for chunk, first in zip(chunks, starts, strict=False):
        if Output.PROMPT_LOGPROBS in chunk.output:
            seat = table.seats[chunk.row]
            stop = min(chunk.start + chunk.length + 1, seat.num_prompt)
            scoring.append(PromptScoring(chunk, int(first), seat.tokens[chunk.start + 1 : stop]))
    return tuple(scoring)


def _pooling(table: RowTable, chunks: tuple[Chunk, ...], starts: np.ndarray) -> tuple[Pooling, ...]:
    return tuple(
        Pooling(chunk, int(first), last=chunk.start + chunk.length == table.seats[chunk.row].num_prompt)
        for chunk, first in zip(chunks, starts, strict=False)
        if Output.POOLED in chunk.output
    )
