"""What the kernels must offer that work by row: what each does next, which token it gets, and whether that ends it.

Those that are recorded (cruise, choose, finish) read what is known of a row from columns on the device, by row number,
so that one graph serves any mixture of rows. Row -1 is padding: nothing is read or written for it, and its results are
zeros. The others, for rows that ask for more, are told by the host where what belongs to each row lies.

What rows that go on by themselves do next, by tensor operations: the truth that the kernel is tested against. Where
each token is written is found by it for steps that are built, too.
"""

from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.core.ids import NULL_BLOCK

PADDING = -1  # in the place of a row number


class SamplingStage(IntEnum):
    """How much may be asked of a batch. Each is compiled for itself: there are no more than matter."""

    GREEDY = 0
    DRAWN = 1  # temperature, min-p, top-k, top-p; greedy rows as well


class SamplingTable(NamedTuple):
    """The sampling parameters of every row. More columns may follow those named here."""

    # [max_rows, 6+] int64: seed, sequence index, top_k (vocab keeps all), 1 if random or 0; min_tokens, prompt tokens
    integers: Tensor
    # [max_rows, 6+] float64: temperature above 0, top_p (1 keeps all), min_p (0 keeps all); penalties of repetition,
    # presence and frequency
    floats: Tensor


class Sampled(NamedTuple):
    """A row that is not finite had a NaN or +inf logit, or nothing to choose; its token is 0."""

    tokens: Tensor  # [n] int64
    finite: Tensor  # [n] bool


class SampleTokens(Protocol):
    """A token for every row of a batch."""

    def __call__(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        rows: Tensor,  # [n] int64; -1 is padding
        positions: Tensor,  # [n] int64: the index that the new token will have in its sequence
        table: SamplingTable,
        stages: SamplingStage,  # what no row of the batch goes beyond
    ) -> Sampled: ...


class LogitShaping(NamedTuple):
    """What changes the logits of a batch before the choice."""

    places: Tensor  # [3, n] int64: a row's lines among masks, offsets and what is counted; -1: it has none
    masks: Tensor  # [masks, words] int32, a bit for each token: 1 where it is allowed
    offsets: Tensor  # [slots, vocab] float32: what is added
    in_prompt: Tensor  # [slots, vocab] bool
    generated: Tensor  # [slots, vocab] int32: how often each token was
    end_ids: Tensor  # [max_rows, width] int64, padded with -1: what a row with fewer than min_tokens may not choose


class ProcessLogits(Protocol):
    """Masks, offsets, early ends and penalties. What was NaN or +inf becomes NaN, also where it is forbidden."""

    def __call__(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        rows: Tensor,  # [n] int64; -1 is padding
        positions: Tensor,  # [n] int64: the index that the new token will have in its sequence
        table: SamplingTable,
        shaping: LogitShaping,
    ) -> Tensor: ...  # [n, vocab] float32, of padding anything


class CountTokens(Protocol):
    """Counts the tokens that were chosen: penalties read how often each was."""

    def __call__(
        self,
        tokens: Tensor,  # [n] int64
        places: Tensor,  # [n] int64: lines of the table, none twice but -1, which is nobody's
        generated: Tensor,  # [slots, vocab] int32; changed in place
    ) -> None: ...


class TokenLogprobs(Protocol):
    """One token in each row of logits, and the likeliest there; of equal logits the lowest ids come first."""

    def __call__(
        self,
        logits: Tensor,  # [m, vocab] float32
        tokens: Tensor,  # [m] int64
        num_top: int,  # at most vocab
    ) -> Tensor:  # [m, 3 + 2 * num_top] int32: token, rank, logprob, top ids, top logprobs; floats by their bits
        ...


class EndColumns(NamedTuple):
    """When every row ends."""

    max_length: Tensor  # [max_rows] int64
    end_ids: Tensor  # [max_rows, width] int64, padded with -1


class RowState(NamedTuple):
    """What the device alone knows of every row; changed in place."""

    last_tokens: Tensor  # [max_rows] int64
    lengths: Tensor  # [max_rows] int64
    alive: Tensor  # [max_rows] bool


class FinishRows(Protocol):
    """Gives every row of a batch its token, and ends those that it ends."""

    def __call__(
        self,
        chosen: Sampled,
        rows: Tensor,  # [n] int64, none twice but -1
        positions: Tensor,  # [n] int64
        ends: EndColumns,
        state: RowState,
    ) -> Tensor:  # [5, n] int64: token, alive before, finite, stop, length
        ...


class RowColumns(NamedTuple):
    """What is known of every row that is going on."""

    tables: Tensor  # [max_rows, width] int32: block tables
    lengths: Tensor  # [max_rows] int64: known tokens, at least one
    max_lengths: Tensor  # [max_rows] int64: tokens it may come to hold
    last_tokens: Tensor  # [max_rows] int64
    alive: Tensor  # [max_rows] bool


class NextTokens(NamedTuple):
    """The next token of some rows: which, where, and what it sees. Whoever is not alive sees nothing, says nothing, and
    writes to the null block."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slots: Tensor  # [n] int64: where its key and value are written
    max_lengths: Tensor  # [n] int64
    sampled_rows: Tensor  # [n] int64: the row, or PADDING
    context_lengths: Tensor  # [n] int32
    tables: Tensor  # [n, width] int32


class DecodeInputs(Protocol):
    """What rows that go on by themselves do next."""

    def __call__(
        self,
        rows: Tensor,  # [n] int64, none of them padding
        columns: RowColumns,
        block_size: int,
    ) -> NextTokens: ...


class RowKernels(NamedTuple):
    """All kernels that work by row."""

    process_logits: ProcessLogits
    sample_tokens: SampleTokens
    count_tokens: CountTokens
    token_logprobs: TokenLogprobs
    finish_rows: FinishRows
    decode_inputs: DecodeInputs


def decode_inputs_reference(rows: Tensor, columns: RowColumns, block_size: int) -> NextTokens:
    """See `DecodeInputs`."""
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
