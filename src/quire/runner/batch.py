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
from quire.kernels.choosing import PADDING, CruiseRows
from quire.kernels.contract import Ragged
from quire.kernels.cruising import slots_of
from quire.kernels.host_copies import upload_integers
from quire.runner.pooling import Pooling
from quire.runner.recorded import ChunkArrays, ChunkInputs
from quire.runner.rows import RowTable
from quire.sampling.rows import RowBatch

NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)
NO_PLACES: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Part of a chunk whose tokens are to be scored: hidden states [first, first + len(targets)) predict them."""

    chunk: Chunk
    first: int
    targets: IntArray


class Asking(NamedTuple):
    """Some rows of the step whose logits are needed."""

    at: Tensor  # [n] int64: their places among the states that are wanted
    batch: RowBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model reads in one step, and who gets what afterwards."""

    tokens: Tensor  # [tokens] int64
    ragged: Ragged
    wanted: Tensor | None  # [n] int64: the tokens whose states are needed; None: all
    sampling: Asking  # the rows that get a token
    tethered: Asking | None  # the rows that give back their candidates
    scoring: tuple[PromptScoring, ...]
    pooling: tuple[Pooling, ...]


def build_batch(table: RowTable, plan: StepPlan, cruising: IntArray) -> StepBatch:
    """The batch of a plan that `table` has applied."""
    chunks = plan.chunks
    rows = np.concatenate([cruising, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
    query_lengths = np.ones(len(rows), dtype=np.int64)
    query_lengths[len(cruising) :] = [chunk.length for chunk in chunks]
    query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lengths, out=query_starts[1:])
    samples = np.ones(len(rows), dtype=np.bool_)
    samples[len(cruising) :] = [Output.SAMPLE in chunk.output for chunk in chunks]
    tethered = np.zeros(len(rows), dtype=np.bool_)
    tethered[len(cruising) :] = [Output.CANDIDATES in chunk.output for chunk in chunks]
    last_tokens = query_starts[1:] - 1

    device_rows, chunk_rows, known, places, ends, starts, sampling_at, tethered_at = upload_integers(
        table.device,
        rows,
        np.repeat(rows[len(cruising) :], query_lengths[len(cruising) :]),
        *_known(table, chunks),
        query_starts,
        last_tokens[samples],
        last_tokens[tethered],
    )
    cruising_rows = device_rows[: len(cruising)]
    lengths = table.lengths[cruising_rows]
    token_rows = torch.cat([cruising_rows, chunk_rows])
    tokens, positions = torch.cat([table.last_tokens[cruising_rows], known]), torch.cat([lengths - 1, places])
    ragged = Ragged(
        positions=positions,
        slots=slots_of(token_rows, positions, table.columns, table.block_size),
        tables=table.tables[device_rows, : int(table.num_blocks[rows].max(initial=0))],
        query_starts=starts.int(),
        context_lengths=torch.cat([lengths, ends]).int(),
        reaches=table.reaches[token_rows],
        num_decodes=len(cruising),
    )
    if plan.num_padding:
        tokens, ragged = _padded(tokens, ragged, plan.num_padding)
    sampling = Asking(sampling_at, RowBatch(token_rows[sampling_at], rows[samples], positions[sampling_at] + 1))
    tethers = Asking(tethered_at, RowBatch(token_rows[tethered_at], rows[tethered], positions[tethered_at] + 1))
    scoring = _scoring(table, chunks, query_starts[len(cruising) :])
    pooling = _pooling(table, chunks, query_starts[len(cruising) :])
    wanted = None
    if chunks and not scoring and not pooling:
        wanted, sampling, tethers = _few(sampling, tethers)
    return StepBatch(tokens, ragged, wanted, sampling, tethers if len(tethered_at) else None, scoring, pooling)


def _few(sampling: Asking, tethered: Asking) -> tuple[Tensor, Asking, Asking]:
    """The states that the two need, and where they will lie. At least one: a model computes no step without any."""
    wanted = torch.cat([sampling.at, tethered.at])
    places = torch.arange(len(wanted), device=wanted.device)
    split = len(sampling.at)
    sampling, tethered = Asking(places[:split], sampling.batch), Asking(places[split:], tethered.batch)
    return wanted if len(wanted) else wanted.new_zeros(1), sampling, tethered


class DeviceBatch(NamedTuple):
    """A step that the device finds out for itself: what the model reads, and whose tokens are wanted."""

    tokens: Tensor  # [tokens] int64
    ragged: Ragged
    last_tokens: Tensor  # [rows + chunks] int64: in the flat batch
    speaking: Tensor  # [rows + chunks] int64: the rows that get a token, or PADDING


def cruising_batch(table: RowTable, rows: Tensor, cruise: CruiseRows) -> DeviceBatch:
    """A step in which these rows cruise and nothing else happens. rows: [rows] int64."""
    found = cruise(rows, table.columns, table.block_size)
    places = table.places[: len(rows) + 1]
    ragged = Ragged(
        positions=found.positions,
        slots=found.slots,
        tables=found.tables,
        query_starts=places.int(),
        context_lengths=found.context_lengths,
        reaches=found.reaches,
        num_decodes=len(rows),
    )
    return DeviceBatch(found.tokens, ragged, places[:-1], found.speaking)


def mixed_batch(table: RowTable, rows: Tensor, chunks: ChunkInputs, cruise: CruiseRows) -> DeviceBatch:
    """A step with chunks of prompts behind the rows that cruise."""
    cruising = cruising_batch(table, rows, cruise)
    before = cruising.ragged
    chunk_slots = slots_of(chunks.token_rows, chunks.positions, table.columns, table.block_size)
    ragged = Ragged(
        positions=torch.cat([before.positions, chunks.positions]),
        slots=torch.cat([before.slots, chunk_slots]),
        tables=torch.cat([before.tables, table.tables[chunks.rows]]),
        query_starts=torch.cat([before.query_starts[:-1], (chunks.starts + len(rows)).int()]),
        context_lengths=torch.cat([before.context_lengths, chunks.ends.int()]),
        reaches=torch.cat([before.reaches, table.reaches[chunks.token_rows]]),
        num_decodes=len(rows),
    )
    return DeviceBatch(
        torch.cat([cruising.tokens, chunks.tokens]),
        ragged,
        torch.cat([cruising.last_tokens, (chunks.starts[1:] + len(rows) - 1).clamp(min=0)]),
        torch.cat([cruising.speaking, chunks.speaking]),
    )


def chunk_arrays(table: RowTable, chunks: tuple[Chunk, ...]) -> ChunkArrays | None:
    """What the host knows of a step's chunks; None if one of them must give back more than a token."""
    if any(chunk.output not in (Output.NONE, Output.SAMPLE) for chunk in chunks):
        return None
    tokens, places, ends = _known(table, chunks)
    rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    samples = np.array([chunk.output is Output.SAMPLE for chunk in chunks], dtype=np.bool_)
    return ChunkArrays(
        tokens=tokens,
        positions=places,
        token_rows=np.repeat(rows, lengths),
        starts=np.concatenate([[0], lengths.cumsum()]),
        ends=ends,
        rows=rows,
        speaking=np.where(samples, rows, PADDING),
    )


def _known(table: RowTable, chunks: tuple[Chunk, ...]) -> tuple[IntArray, NDArray[np.int64], NDArray[np.int64]]:
    """The tokens of all chunks, their places in their sequences, and where each chunk ends."""
    if not chunks:
        return NO_TOKENS, NO_PLACES, NO_PLACES
    tokens = np.concatenate(
        [table.seats[chunk.row].tokens[chunk.start : chunk.start + chunk.length] for chunk in chunks]
    )
    places = np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks])
    return tokens, places, np.array([chunk.start + chunk.length for chunk in chunks])


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
        num_decodes=ragged.num_decodes,
    )
    return torch.cat([tokens, nothing]), padded


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
