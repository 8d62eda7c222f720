"""Builds the ragged batch of one step: decoding rows first, one token each and its drafts, then the chunks. No padding.

A plan may ask for padding tokens (static regimes do); they come last. Pooled sums of hidden states (embeddings) are
kept by row on the device, chunk by chunk, in float32; the oracle's integers stay integers, so its sums are exact.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import NULL_BLOCK, FloatArray, IntArray, Row
from quire.core.step import Chunk, ChunkOutput, StepPlan
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import PADDING, DecodeInputs, slots_of
from quire.kernels.transfers import HostCopy, upload_integers
from quire.runner.cuda_graphs import ChunkArrays, ChunkInputs
from quire.runner.drafters import Drafted
from quire.runner.row_table import RowTable
from quire.sampling.row_params import SamplingBatch


class Pooling(NamedTuple):
    """A chunk whose hidden states are summed, from `first` on in the flat batch; the last chunk returns the sum."""

    chunk: Chunk
    first: int
    last: bool


class PooledRows(NamedTuple):
    """Pooled sums that a step completed, being copied to the host."""

    rows: tuple[Row, ...]
    sums: HostCopy  # [rows, hidden] float32

    def wait(self) -> dict[Row, FloatArray | None]:
        """The sum of each row; None where it is not finite."""
        sums = self.sums.wait()
        finite = np.isfinite(sums).all(axis=1)
        return {row: sums[i] if finite[i] else None for i, row in enumerate(self.rows)}


class Pools:
    """Partial sums of prompts that are still being computed."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[Row, Tensor] = {}  # [hidden]

    def add(
        self,
        parts: tuple[Pooling, ...],
        hidden: Tensor,  # [tokens, hidden]
    ) -> PooledRows | None:
        """Add a step's chunks. Returns the sums that are complete, if any."""
        precision = torch.float32 if hidden.is_floating_point() else hidden.dtype
        complete: dict[Row, Tensor] = {}
        for chunk, first, last in parts:
            total = hidden[first : first + chunk.length].sum(dim=0, dtype=precision)
            if chunk.start > 0:
                total += self._sums.pop(chunk.row)
            (complete if last else self._sums)[chunk.row] = total
        if not complete:
            return None
        return PooledRows(tuple(complete), HostCopy(torch.stack(tuple(complete.values())).float()))

    def release(self, row: Row) -> None:
        """Drop a row's sum, if it has one."""
        self._sums.pop(row, None)

    def clear(self) -> None:
        self._sums.clear()


NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)
NO_PLACES: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Tokens of a chunk that need logprobs: hidden states [first, first + len(targets)) predict them."""

    chunk: Chunk
    first: int
    targets: IntArray


class LogitsNeeded(NamedTuple):
    """Rows of the step that need logits."""

    at: Tensor  # [n] int64: indices into the hidden states that the model returns
    batch: SamplingBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step, and what each row needs afterwards."""

    tokens: Tensor  # [tokens] int64
    layout: StepLayout
    needed: Tensor | None  # [n] int64: the tokens whose hidden states are needed; None: all
    sampling: LogitsNeeded  # the rows that get a token
    further: Tensor | None  # [drafts] int64: indices of the drafts in the hidden states that the model returns
    host_driven: LogitsNeeded | None  # the rows that return candidates
    scoring: tuple[PromptScoring, ...]
    pooling: tuple[Pooling, ...]


class _DecodePart(NamedTuple):
    """Decoding rows in a flat batch. The last of them may have drafts behind their last token."""

    query_lengths: NDArray[np.int64]  # [rows]
    num_single: int  # rows without drafts
    token_rows: Tensor  # [tokens] int64
    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    context_lengths: Tensor  # [rows] int64


def _decode_part(table: RowTable, decoding: IntArray, rows: Tensor, drafted: Drafted | None) -> _DecodePart:
    lengths = table.lengths[rows]
    query_lengths = np.ones(len(decoding), dtype=np.int64)
    if drafted is None:
        return _DecodePart(query_lengths, len(decoding), rows, table.last_tokens[rows], lengths - 1, lengths)
    num_single = len(decoding) - len(drafted.rows)
    query_lengths[num_single:] += drafted.counts
    starts = np.cumsum(query_lengths) - query_lengths
    places = np.repeat(np.arange(len(decoding)), query_lengths)
    ahead, at, proposed = upload_integers(
        table.device,
        np.arange(len(places)) - starts[places],
        np.flatnonzero(np.arange(len(places)) != starts[places]),
        drafted.tokens,
    )
    token_rows = rows[upload_integers(table.device, places)[0]]
    tokens = table.last_tokens[token_rows].index_copy(0, at, proposed)
    (counts,) = upload_integers(table.device, query_lengths)
    positions = table.lengths[token_rows] - 1 + ahead
    return _DecodePart(query_lengths, num_single, token_rows, tokens, positions, lengths - 1 + counts)


def build_batch(table: RowTable, plan: StepPlan, decoding: IntArray, drafted: Drafted | None = None) -> StepBatch:
    """The batch of a plan that `table` has applied. Rows with drafts are the last of those that decode."""
    chunks = plan.chunks
    rows = np.concatenate([decoding, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
    (device_rows,) = upload_integers(table.device, rows)
    decodes = _decode_part(table, decoding, device_rows[: len(decoding)], drafted)
    query_lengths = np.concatenate([decodes.query_lengths, np.array([chunk.length for chunk in chunks], np.int64)])
    query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lengths, out=query_starts[1:])
    samples = np.ones(len(rows), dtype=np.bool_)
    samples[len(decoding) :] = [ChunkOutput.SAMPLE in chunk.output for chunk in chunks]
    host_driven = np.zeros(len(rows), dtype=np.bool_)
    host_driven[len(decoding) :] = [ChunkOutput.CANDIDATES in chunk.output for chunk in chunks]
    sampled = query_starts[1:] - 1
    sampled[: len(decoding)] = query_starts[: len(decoding)]  # before the drafts

    chunk_rows, known, places, ends, starts, sampling_at, host_driven_at = upload_integers(
        table.device,
        np.repeat(rows[len(decoding) :], query_lengths[len(decoding) :]),
        *_known(table, chunks),
        query_starts,
        sampled[samples],
        sampled[host_driven],
    )
    token_rows = torch.cat([decodes.token_rows, chunk_rows])
    tokens, positions = torch.cat([decodes.tokens, known]), torch.cat([decodes.positions, places])
    layout = StepLayout(
        positions=positions,
        slots=slots_of(token_rows, positions, table.columns, table.block_size),
        tables=table.tables[device_rows, : int(table.num_blocks[rows].max(initial=0))],
        query_starts=starts.int(),
        context_lengths=torch.cat([decodes.context_lengths, ends]).int(),
        max_lengths=table.max_lengths[token_rows],
        num_decodes=decodes.num_single,
    )
    if plan.num_padding:
        tokens, layout = _padded(tokens, layout, plan.num_padding)
    sampling = LogitsNeeded(
        sampling_at, SamplingBatch(token_rows[sampling_at], rows[samples], positions[sampling_at] + 1)
    )
    host_logits = LogitsNeeded(
        host_driven_at, SamplingBatch(token_rows[host_driven_at], rows[host_driven], positions[host_driven_at] + 1)
    )
    further = None if drafted is None else _draft_places(table, decodes.query_lengths, query_starts)
    scoring = _scoring(table, chunks, query_starts[len(decoding) :])
    pooling = _pooling(table, chunks, query_starts[len(decoding) :])
    needed = None
    if chunks and not scoring and not pooling:
        needed, sampling, host_logits, further = _select_states(sampling, host_logits, further)
    host_part = host_logits if len(host_driven_at) else None
    return StepBatch(tokens, layout, needed, sampling, further, host_part, scoring, pooling)


def _draft_places(table: RowTable, query_lengths: NDArray[np.int64], query_starts: NDArray[np.int64]) -> Tensor:
    """Where the drafts are in the flat batch."""
    decoded = np.arange(int(query_lengths.sum()))
    return upload_integers(table.device, np.setdiff1d(decoded, query_starts[: len(query_lengths)]))[0]


def _select_states(
    sampling: LogitsNeeded, host_driven: LogitsNeeded, further: Tensor | None
) -> tuple[Tensor, LogitsNeeded, LogitsNeeded, Tensor | None]:
    """The hidden states that all need, and their new indices. At least one: no model runs without any."""
    needed = torch.cat([sampling.at, host_driven.at] if further is None else [sampling.at, host_driven.at, further])
    places = torch.arange(len(needed), device=needed.device)
    split, stop = len(sampling.at), len(sampling.at) + len(host_driven.at)
    sampling, host_driven = (
        LogitsNeeded(places[:split], sampling.batch),
        LogitsNeeded(places[split:stop], host_driven.batch),
    )
    return (
        needed if len(needed) else needed.new_zeros(1),
        sampling,
        host_driven,
        None if further is None else places[stop:],
    )


class DeviceBatch(NamedTuple):
    """The inputs of a step as the device computes them (CUDA graphs), and the rows that get a token."""

    tokens: Tensor  # [tokens] int64
    layout: StepLayout
    last_tokens: Tensor  # [rows + chunks] int64: in the flat batch
    emitting: Tensor  # [rows + chunks] int64: the rows that get a token, or PADDING


def decode_batch(table: RowTable, rows: Tensor, decode_inputs: DecodeInputs) -> DeviceBatch:
    """A step in which these rows decode, without chunks. rows: [rows] int64."""
    found = decode_inputs(rows, table.columns, table.block_size)
    places = table.places[: len(rows) + 1]
    layout = StepLayout(
        positions=found.positions,
        slots=found.slots,
        tables=found.tables,
        query_starts=places.int(),
        context_lengths=found.context_lengths,
        max_lengths=found.max_lengths,
        num_decodes=len(rows),
    )
    return DeviceBatch(found.tokens, layout, places[:-1], found.sampled_rows)


def mixed_batch(table: RowTable, rows: Tensor, chunks: ChunkInputs, decode_inputs: DecodeInputs) -> DeviceBatch:
    """A step with prompt chunks behind the decoding rows."""
    decoding = decode_batch(table, rows, decode_inputs)
    before = decoding.layout
    chunk_slots = slots_of(chunks.token_rows, chunks.positions, table.columns, table.block_size)
    layout = StepLayout(
        positions=torch.cat([before.positions, chunks.positions]),
        slots=torch.cat([before.slots, chunk_slots]),
        tables=torch.cat([before.tables, table.tables[chunks.rows]]),
        query_starts=torch.cat([before.query_starts[:-1], (chunks.starts + len(rows)).int()]),
        context_lengths=torch.cat([before.context_lengths, chunks.ends.int()]),
        max_lengths=torch.cat([before.max_lengths, table.max_lengths[chunks.token_rows]]),
        num_decodes=len(rows),
    )
    return DeviceBatch(
        torch.cat([decoding.tokens, chunks.tokens]),
        layout,
        torch.cat([decoding.last_tokens, (chunks.starts[1:] + len(rows) - 1).clamp(min=0)]),
        torch.cat([decoding.emitting, chunks.emitting]),
    )


def chunk_arrays(table: RowTable, chunks: tuple[Chunk, ...]) -> ChunkArrays | None:
    """What the host knows of a step's chunks; None if a chunk returns more than a token."""
    if any(chunk.output not in (ChunkOutput.NONE, ChunkOutput.SAMPLE) for chunk in chunks):
        return None
    tokens, places, ends = _known(table, chunks)
    rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    samples = np.array([chunk.output is ChunkOutput.SAMPLE for chunk in chunks], dtype=np.bool_)
    return ChunkArrays(
        tokens=tokens,
        positions=places,
        token_rows=np.repeat(rows, lengths),
        starts=np.concatenate([[0], lengths.cumsum()]),
        ends=ends,
        rows=rows,
        emitting=np.where(samples, rows, PADDING),
    )


def _known(table: RowTable, chunks: tuple[Chunk, ...]) -> tuple[IntArray, NDArray[np.int64], NDArray[np.int64]]:
    """The tokens of all chunks, their positions, and where each chunk ends."""
    if not chunks:
        return NO_TOKENS, NO_PLACES, NO_PLACES
    tokens = np.concatenate(
        [table.starts[chunk.row].tokens[chunk.start : chunk.start + chunk.length] for chunk in chunks]
    )
    places = np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks])
    return tokens, places, np.array([chunk.start + chunk.length for chunk in chunks])


def _padded(tokens: Tensor, layout: StepLayout, count: int) -> tuple[Tensor, StepLayout]:
    """Append `count` padding sequences, each of one token in the first slot of the null block."""
    nothing = tokens.new_zeros(count)
    starts = layout.query_starts[-1] + torch.arange(1, count + 1, dtype=torch.int32, device=tokens.device)
    missing_width = int(layout.tables.shape[1] == 0)
    padded = StepLayout(
        positions=torch.cat([layout.positions, nothing]),
        slots=torch.cat([layout.slots, nothing]),
        tables=F.pad(layout.tables, (0, missing_width, 0, count), value=NULL_BLOCK),
        query_starts=torch.cat([layout.query_starts, starts]),
        context_lengths=F.pad(layout.context_lengths, (0, count), value=1),
        max_lengths=F.pad(layout.max_lengths, (0, count), value=1),
        num_decodes=layout.num_decodes,
    )
    return torch.cat([tokens, nothing]), padded


def _scoring(table: RowTable, chunks: tuple[Chunk, ...], starts: np.ndarray) -> tuple[PromptScoring, ...]:
    scoring = []
    for chunk, first in zip(chunks, starts, strict=False):
        if ChunkOutput.PROMPT_LOGPROBS in chunk.output:
            row_start = table.starts[chunk.row]
            stop = min(chunk.start + chunk.length + 1, row_start.num_prompt)
            scoring.append(PromptScoring(chunk, int(first), row_start.tokens[chunk.start + 1 : stop]))
    return tuple(scoring)


def _pooling(table: RowTable, chunks: tuple[Chunk, ...], starts: np.ndarray) -> tuple[Pooling, ...]:
    return tuple(
        Pooling(chunk, int(first), last=chunk.start + chunk.length == table.starts[chunk.row].num_prompt)
        for chunk, first in zip(chunks, starts, strict=False)
        if ChunkOutput.POOLED in chunk.output
    )
