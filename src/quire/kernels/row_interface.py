"""Interface of the kernels that work by row: logit processors, sampling, logprobs, end of rows, decode inputs.

The kernels inside a CUDA graph (decode_inputs, sample_tokens, finish_rows) read row state from device columns by row
number, so one graph serves any mixture of rows. Row -1 is padding: nothing is read or written for it, and its results
are zeros. The others get from the host the table line of each row.
`decode_inputs_reference` is the definition that the decode_inputs kernel is tested against; steps built without a graph
use its `slots_of` too.
"""

from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import NULL_BLOCK, IntArray

PADDING = -1  # in the place of a row number


class SamplingStage(IntEnum):
    """Which sampling features a batch may use. Each value is its own compilation, so there are only two."""

    GREEDY = 0
    DRAWN = 1  # temperature, min-p, top-k, top-p; greedy rows too


class SamplingTable(NamedTuple):
    """The sampling parameters of every row. More columns may follow those named here."""

    # [max_rows, 6+] int64: seed, sequence index, top_k (vocab keeps all), 1 if random or 0; min_tokens, prompt tokens
    integers: Tensor
    # [max_rows, 6+] float64: temperature above 0, top_p (1 keeps all), min_p (0 keeps all); penalties of repetition,
    # presence and frequency
    floats: Tensor


class Sampled(NamedTuple):
    """One token per row. A row that is not finite had a NaN or +inf logit, or no token left; its token is 0."""

    tokens: Tensor  # [n] int64
    finite: Tensor  # [n] bool


class SampleTokens(Protocol):
    """Samples a token for every row of a batch."""

    def __call__(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        rows: Tensor,  # [n] int64; -1 is padding
        positions: Tensor,  # [n] int64: the index that the new token will have in its sequence
        table: SamplingTable,
        stages: SamplingStage,  # the most that any row of the batch needs
    ) -> Sampled: ...


class DrawTokens(Protocol):
    """Draws a token for every row of a batch: min-p, top-k, top-p and the random number."""

    def __call__(
        self,
        logits: Tensor,  # [n, vocab] float32
        weights: Tensor,  # [n, vocab] float32: unnormalised probabilities, whose fraction is to be cut off
        highest: Tensor,  # [n] float32: the largest logit of each row
        rows: Tensor,  # [n] int64
        positions: Tensor,  # [n] int64: the index that the new token will have in its sequence
        table: SamplingTable,
    ) -> Tensor: ...  # [n] int64


class LogitShaping(NamedTuple):
    """Inputs of the logit processors of a batch."""

    places: Tensor  # [3, n] int64: a row's line in masks, offsets and counts; -1: none
    masks: Tensor  # [masks, words] int32, a bit for each token: 1 where it is allowed
    offsets: Tensor  # [slots, vocab] float32: logit bias
    in_prompt: Tensor  # [slots, vocab] bool
    generated: Tensor  # [slots, vocab] int32: how often each token was generated
    end_ids: Tensor  # [max_rows, width] int64, padded with -1: forbidden while a row has fewer than min_tokens
    drafts: Tensor  # [n, most] int64, padded with -1: the drafts before a line, which count as generated


class ProcessLogits(Protocol):
    """Grammar masks, logit bias, min_tokens and penalties. NaN and +inf become NaN, even where a token is masked."""

    def __call__(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        rows: Tensor,  # [n] int64; -1 is padding
        positions: Tensor,  # [n] int64: the index that the new token will have in its sequence
        table: SamplingTable,
        shaping: LogitShaping,
    ) -> Tensor: ...  # [n, vocab] float32; undefined for padding


class MaskLogits(Protocol):
    """Grammar masks alone, in place and only for the rows that have one. NaN and +inf of such a row become NaN."""

    def __call__(
        self,
        logits: Tensor,  # [n, vocab] float32; changed
        masks: Tensor,  # [m, 1 + words] int32: a line of the logits, and a bit for each token: 1 where it is allowed
    ) -> None: ...


class CountTokens(Protocol):
    """Counts sampled tokens for the penalties."""

    def __call__(
        self,
        tokens: Tensor,  # [n] int64
        places: Tensor,  # [n] int64: lines of the table, which may repeat; -1 is padding
        generated: Tensor,  # [slots, vocab] int32; changed in place
    ) -> None: ...


class TokenLogprobs(Protocol):
    """Log-probabilities of one token per row and of the top tokens; of equal logits the lowest ids come first."""

    def __call__(
        self,
        logits: Tensor,  # [m, vocab] float32
        tokens: Tensor,  # [m] int64
        num_top: int,  # at most vocab
    ) -> Tensor:  # [m, 3 + 2 * num_top] int32: token, rank, logprob, top ids, top logprobs; floats by their bits
        ...


class EndColumns(NamedTuple):
    """Stop conditions of every row."""

    max_length: Tensor  # [max_rows] int64
    end_ids: Tensor  # [max_rows, width] int64, padded with -1


class RowState(NamedTuple):
    """Row state that is on the device only; changed in place."""

    last_tokens: Tensor  # [max_rows] int64
    lengths: Tensor  # [max_rows] int64
    alive: Tensor  # [max_rows] bool
    history: Tensor | None = None  # [max_rows, width] int32: a row's latest tokens, that of position p at p % width


class FinishRows(Protocol):
    """Appends each row's token and marks the rows that it ends."""

    def __call__(
        self,
        sampled: Sampled,
        rows: Tensor,  # [n] int64, unique except -1
        positions: Tensor,  # [n] int64
        ends: EndColumns,
        state: RowState,
    ) -> Tensor:  # [5, n] int64: token, alive before, finite, stop, length
        ...


class RowColumns(NamedTuple):
    """Per-row columns that decode inputs are read from."""

    tables: Tensor  # [max_rows, width] int32: block tables
    lengths: Tensor  # [max_rows] int64: known tokens, at least one
    max_lengths: Tensor  # [max_rows] int64: tokens it may hold
    last_tokens: Tensor  # [max_rows] int64
    alive: Tensor  # [max_rows] bool


class DraftOutcome(NamedTuple):
    """What greedy rows with drafts got."""

    outcome: NDArray[np.int64]  # [5, rows + drafts], as `FinishRows`: of each row itself, and then of its drafts
    advances: IntArray  # [rows]: how many of these each row has, the first ones; 0: it was not alive


class GreedyStep(Protocol):
    """A whole step of rows that decode greedily. It may run again for as long as no row starts or is released."""

    def __call__(self) -> IntArray | None:
        """Appends a token to each row. The tokens, [rows], if every row has one and goes on; else `outcome` has all."""

    @property
    def outcome(self) -> NDArray[np.int64]:
        """Of the last call: [5, rows], as `FinishRows`, on the host. A copy."""

    def verify(self, counts: IntArray, tokens: NDArray[np.int64]) -> DraftOutcome:
        """The step with drafts: a row gets tokens as long as they are those drafted. counts: [rows]; tokens: [drafts],
        one row after the other."""


class NextTokens(NamedTuple):
    """Model inputs of the next token of some rows. A row that is not alive has no keys, samples nothing and writes to
    the null block."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slots: Tensor  # [n] int64: where its key and value are written
    max_lengths: Tensor  # [n] int64
    sampled_rows: Tensor  # [n] int64: the row that gets a token, or PADDING
    context_lengths: Tensor  # [n] int32
    tables: Tensor  # [n, width] int32


class DecodeInputs(Protocol):
    """Builds the inputs of decoding rows on the device: token, position, slot, block table."""

    def __call__(
        self,
        rows: Tensor,  # [n] int64, none of them padding
        columns: RowColumns,
        block_size: int,
    ) -> NextTokens: ...


class RowKernels(NamedTuple):
    """All kernels that work by row."""

    process_logits: ProcessLogits
    mask_logits: MaskLogits
    sample_tokens: SampleTokens
    count_tokens: CountTokens
    token_logprobs: TokenLogprobs
    finish_rows: FinishRows
    decode_inputs: DecodeInputs


def decode_inputs_reference(rows: Tensor, columns: RowColumns, block_size: int) -> NextTokens:
    """`DecodeInputs` by tensor operations."""
    lengths, alive = columns.lengths[rows], columns.alive[rows]
    positions = lengths - 1
    return NextTokens(
        tokens=columns.last_tokens[rows],
        positions=positions,
        slots=slots_of(rows, positions, columns, block_size),
        max_lengths=columns.max_lengths[rows],
        sampled_rows=torch.where(alive, rows, PADDING),
        context_lengths=(lengths * alive).int(),
        tables=columns.tables[rows],
    )


def slots_of(rows: Tensor, positions: Tensor, columns: RowColumns, block_size: int) -> Tensor:
    """Where each token's key and value are written. rows, positions: [tokens] int64."""
    blocks = columns.tables[rows, positions // block_size].long()
    blocks = torch.where(columns.alive[rows], blocks, NULL_BLOCK)
    return blocks * block_size + positions % block_size
