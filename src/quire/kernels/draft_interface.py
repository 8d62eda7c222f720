"""Interface of the kernels that draft tokens and verify them on the device, and their definition by tensor operations.

A verifying step has a line for each row's last token and one for each of its drafts. Which rows take part and how many
drafts each has is known on the host (`starts`). What the drafts are, where a row is and how many of them are right is
known on the device only. Nothing here reads a tensor on the host, and no shape depends on values, so all of it can be
captured as a CUDA graph.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.row_interface import PADDING, EndColumns, RowColumns, RowState, Sampled, slots_of

MIN_NGRAM = 3  # tokens alike that are worth a draft (see `runner.drafters`)
MAX_NGRAM = 12
PLANTED_UNIT = 1_000_003  # a prime
LENGTH_SHIFT = 32  # a match is length << 32 | end


class VerifyInputs(NamedTuple):
    """Model inputs of a verifying step."""

    tokens: Tensor  # [lines] int64
    positions: Tensor  # [lines] int64
    slots: Tensor  # [lines] int64: where its key and value are written
    max_lengths: Tensor  # [lines] int64
    sampled_rows: Tensor  # [lines] int64: the row that the line may give a token, or PADDING
    query_starts: Tensor  # [rows + 1] int32
    context_lengths: Tensor  # [rows] int32: keys that the row's last line sees
    tables: Tensor  # [rows, width] int32


class BuildVerifyInputs(Protocol):
    """The lines of rows and their drafts."""

    def __call__(
        self,
        rows: Tensor,  # [rows] int64, none of them padding
        starts: Tensor,  # [rows + 1] int64: the lines of row i are starts[i] to starts[i + 1]
        drafts: Tensor,  # [rows, most] int64: proposed tokens
        columns: RowColumns,
        block_size: int,
        num_lines: int,  # lines from starts[-1] on are padding
    ) -> VerifyInputs: ...


class VerifyRows(Protocol):
    """Accepts each row's sampled tokens for as long as they are the drafts, appends them and marks rows that end."""

    def __call__(
        self,
        sampled: Sampled,  # of each line
        tokens: Tensor,  # [lines] int64: inputs of the lines
        rows: Tensor,  # [rows] int64
        starts: Tensor,  # [rows + 1] int64
        positions: Tensor,  # [lines] int64: the index of the token that the line gives
        ends: EndColumns,
        state: RowState,
        queries: int,  # the most lines of a row
        planted: Tensor | None = None,  # [] int64, for measurements: accept drafts with this share of PLANTED_UNIT
    ) -> Tensor:  # [5, queries, rows] int64: token, whether it is reached, finite, stop, length
        ...


class MatchSuffix(Protocol):
    """Where the last tokens of a row occurred before: the last place of the longest match."""

    def __call__(
        self,
        texts: Tensor,  # [max_rows, width] int32: position p of a text is at p % width
        rows: Tensor,  # [n] int64
        begins: Tensor,  # [n] int64: the first position of each text
        ends: Tensor,  # [n] int64: a match ends at most here
        tails: Tensor,  # [n, MAX_NGRAM] int32: the last token first; -1: none
    ) -> Tensor:  # [n] int64: length << LENGTH_SHIFT | end; 0: no match of MIN_NGRAM tokens
        ...


class DraftKernels(NamedTuple):
    """All kernels that draft and verify."""

    verify_inputs: BuildVerifyInputs
    verify_rows: VerifyRows
    match_suffix: MatchSuffix


def verify_inputs_reference(
    rows: Tensor, starts: Tensor, drafts: Tensor, columns: RowColumns, block_size: int, num_lines: int
) -> VerifyInputs:
    """`BuildVerifyInputs` by tensor operations."""
    lines = torch.arange(num_lines, device=rows.device)
    real = lines < starts[-1]
    places = torch.searchsorted(starts[1:-1].contiguous(), lines, right=True)
    line_rows, ahead = rows[places], lines - starts[places]
    drafted = drafts[places, (ahead - 1).clamp(0, drafts.shape[1] - 1)]
    tokens = torch.where(ahead > 0, drafted, columns.last_tokens[line_rows])
    max_lengths = columns.max_lengths[line_rows]
    positions = torch.minimum(columns.lengths[line_rows] - 1 + ahead, max_lengths - 1)  # an ended row may be full
    slots = slots_of(line_rows, positions, columns, block_size)
    counts = starts[1:] - starts[:-1]
    lengths = torch.minimum(columns.lengths[rows] - 1 + counts, columns.max_lengths[rows])
    return VerifyInputs(
        tokens=torch.where(real, tokens, 0),
        positions=torch.where(real, positions, 0),
        slots=torch.where(real, slots, 0),
        max_lengths=torch.where(real, max_lengths, 1),
        sampled_rows=torch.where(columns.alive[line_rows] & real, line_rows, PADDING),
        query_starts=starts.int(),
        context_lengths=(lengths * (columns.alive[rows] & (counts > 0))).int(),
        tables=columns.tables[rows],
    )


def verify_rows_reference(
    sampled: Sampled,
    tokens: Tensor,
    rows: Tensor,
    starts: Tensor,
    positions: Tensor,
    ends: EndColumns,
    state: RowState,
    queries: int,
    planted: Tensor | None = None,
) -> Tensor:
    """`VerifyRows` by tensor operations."""
    counts = starts[1:] - starts[:-1]
    numbers = torch.arange(queries, device=rows.device)[:, None]  # [queries, 1]
    present = numbers < counts
    last = len(tokens) - 1
    lines = torch.where(present, starts[:-1] + numbers, last)
    found = sampled.tokens[lines]
    finite = sampled.finite[lines] & present
    at = positions[lines]
    stop = (ends.end_ids[rows][None] == found[:, :, None]).any(-1) & present
    length = (at + 1 >= ends.max_length[rows]) & ~stop & present
    over = stop | length | ~finite
    if planted is None:
        right = tokens[(lines + 1).clamp(max=last)] == found
    else:
        right = _is_planted(at, rows, planted)
    goes_on = right & ~over & (numbers + 1 < counts)
    before = torch.cat([torch.ones_like(goes_on[:1]), goes_on[:-1]]).long().cumprod(0).bool()
    reached = before & state.alive[rows] & present
    emitted = reached & finite
    num_emitted = emitted.sum(0)
    latest = found.gather(0, (num_emitted - 1).clamp(min=0)[None])[0]
    state.last_tokens[rows] = torch.where(num_emitted > 0, latest, state.last_tokens[rows])
    if state.history is not None:  # the line of the padding row takes what is not emitted
        kept_rows = torch.where(emitted, rows, state.history.shape[0] - 1)
        state.history[kept_rows, at % state.history.shape[1]] = found.int()
    state.lengths[rows] += num_emitted
    state.alive[rows] &= ~(reached & over).any(0)
    return torch.stack([each.long() for each in (found, reached, finite, stop, length)])


def _is_planted(positions: Tensor, rows: Tensor, planted: Tensor) -> Tensor:
    """A hash of row and position below a limit."""
    mixed = (positions * 2_654_435_761 + rows * 40_503 + 12_345) % PLANTED_UNIT
    return mixed * (mixed + 7919) % PLANTED_UNIT < planted


def match_suffix_reference(texts: Tensor, rows: Tensor, begins: Tensor, ends: Tensor, tails: Tensor) -> Tensor:
    """`MatchSuffix` by tensor operations."""
    width = texts.shape[1]
    places = begins[:, None] + 1 + torch.arange(width, device=texts.device)  # [n, width]: where a match may end
    alike = (places <= ends[:, None]).expand(-1, width)
    lengths = torch.zeros_like(places)
    for number in range(tails.shape[1]):
        at = places - 1 - number
        alike = alike & (at >= begins[:, None])
        alike = alike & (texts[rows[:, None], at % width] == tails[:, number : number + 1])
        lengths += alike
    return torch.where(lengths >= MIN_NGRAM, (lengths << LENGTH_SHIFT) | places, 0).amax(1)


REFERENCE_DRAFT_KERNELS = DraftKernels(verify_inputs_reference, verify_rows_reference, match_suffix_reference)
