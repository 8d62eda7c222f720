"""Drafts on the GPU, a launch each: where a row's last tokens occurred before, the lines of a verifying step, and which
drafts are right. See `draft_interface`, whose references define them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.core.ids import NULL_BLOCK
from quire.kernels.draft_interface import LENGTH_SHIFT, MIN_NGRAM, PLANTED_UNIT, DraftKernels, VerifyInputs
from quire.kernels.gpu.launch import cdiv, launch, new_index_tensor
from quire.kernels.row_interface import PADDING, EndColumns, RowColumns, RowState, Sampled

_TEXT_TILE = 1024  # places of a text, per program
_COLUMNS = 1024  # of a block table, per program
_BLOCK = 32  # rows per program
_LANES = 32  # lines at a time; no row has more


def match_suffix(texts: Tensor, rows: Tensor, begins: Tensor, ends: Tensor, tails: Tensor) -> Tensor:
    """See `draft_interface.MatchSuffix`."""
    found = torch.zeros(len(rows), dtype=torch.int64, device=texts.device)
    width = texts.shape[1]
    launch(
        _match_suffix, (len(rows), cdiv(width, _TEXT_TILE)), texts, rows, begins, ends, tails, found, width,
        NGRAM=tails.shape[1], MIN=MIN_NGRAM, SHIFT=LENGTH_SHIFT, TILE=_TEXT_TILE,
    )  # fmt: skip
    return found


@triton.jit
def _match_suffix(
    texts, rows, begins, ends, tails, found, width,
    NGRAM: tl.constexpr, MIN: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: some places of one text, at each of which a match may end. Most have another last token."""
    at = tl.program_id(0)
    row, begin, end = tl.load(rows + at), tl.load(begins + at), tl.load(ends + at)
    places = begin + 1 + tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (places <= end) & (places <= begin + width)
    text = texts + row * width
    alike = inside & (tl.load(text + (places - 1) % width, mask=inside, other=0) == tl.load(tails + at * NGRAM))
    if tl.max(alike.to(tl.int32), 0) == 1:
        lengths = alike.to(tl.int64)
        for number in range(1, NGRAM):
            before = places - 1 - number
            alike = alike & (before >= begin)
            tail = tl.load(tails + at * NGRAM + number)
            alike = alike & (tl.load(text + before % width, mask=alike, other=0) == tail)
            lengths += alike.to(tl.int64)
        best = tl.max(tl.where(lengths >= MIN, (lengths << SHIFT) | places, 0), 0)
        if best > 0:
            tl.atomic_max(found + at, best, sem="relaxed")


def verify_inputs(
    rows: Tensor, starts: Tensor, drafts: Tensor, columns: RowColumns, block_size: int, num_lines: int
) -> VerifyInputs:
    """See `draft_interface.BuildVerifyInputs`."""
    num_rows, width = len(rows), columns.tables.shape[1]
    numbers = new_index_tensor((5, num_lines), torch.int64, rows.device)
    query_starts = new_index_tensor((num_rows + 1,), torch.int32, rows.device)
    context_lengths = new_index_tensor((num_rows,), torch.int32, rows.device)
    tables = new_index_tensor((num_rows, width), torch.int32, rows.device)
    launch(
        _verify_inputs, (num_rows + 1, cdiv(width, _COLUMNS)),
        rows, starts, drafts, *columns, numbers, query_starts, context_lengths, tables, num_rows, num_lines, width,
        drafts.shape[1],
        BLOCK_SIZE=block_size, NULL_BLOCK=int(NULL_BLOCK), PADDING=PADDING, COLUMNS=_COLUMNS, LANES=_LANES,
    )  # fmt: skip
    tokens, positions, slots, max_lengths, sampled_rows = numbers
    return VerifyInputs(tokens, positions, slots, max_lengths, sampled_rows, query_starts, context_lengths, tables)


@triton.jit(do_not_specialize=["num_rows", "num_lines", "most"])
def _verify_inputs(
    rows, starts, drafts, tables, lengths, max_lengths, last_tokens, alive,
    numbers,  # [5, lines] int64: token, position, slot, max length, sampled row
    query_starts, context_lengths, taken_tables, num_rows, num_lines, width, most,
    BLOCK_SIZE: tl.constexpr, NULL_BLOCK: tl.constexpr, PADDING: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program: the lines of one row and a part of its block table. The last one: lines of padding."""
    at, part = tl.program_id(0), tl.program_id(1)
    if at == num_rows:
        if part == 0:
            begin = tl.load(starts + num_rows)
            tl.store(query_starts + num_rows, begin.to(tl.int32))
            for number in range(tl.cdiv(num_lines - begin, LANES)):
                line = begin + number * LANES + tl.arange(0, LANES)
                unused, zeros = line < num_lines, tl.zeros([LANES], tl.int64)
                tl.store(numbers + line, zeros, mask=unused)
                tl.store(numbers + num_lines + line, zeros, mask=unused)
                tl.store(numbers + 2 * num_lines + line, zeros, mask=unused)
                tl.store(numbers + 3 * num_lines + line, zeros + 1, mask=unused)
                tl.store(numbers + 4 * num_lines + line, zeros + PADDING, mask=unused)
        return
    row = tl.load(rows + at)
    table = tables + row * width
    if part == 0:
        begin, end = tl.load(starts + at), tl.load(starts + at + 1)
        length, limit = tl.load(lengths + row), tl.load(max_lengths + row)
        is_alive = tl.load(alive + row) != 0
        ahead = tl.arange(0, LANES)
        line = begin + ahead
        present = line < end
        drafted = tl.load(drafts + at * most + ahead - 1, mask=present & (ahead > 0), other=0)
        position = tl.minimum(length - 1 + ahead, limit - 1)  # an ended row may be full
        block = tl.load(table + position // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        block = tl.where(is_alive, block, NULL_BLOCK)
        tl.store(numbers + line, tl.where(ahead > 0, drafted, tl.load(last_tokens + row)), mask=present)
        tl.store(numbers + num_lines + line, position, mask=present)
        tl.store(numbers + 2 * num_lines + line, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=present)
        tl.store(numbers + 3 * num_lines + line, tl.zeros([LANES], tl.int64) + limit, mask=present)
        tl.store(numbers + 4 * num_lines + line, tl.where(is_alive, row, PADDING) + ahead * 0, mask=present)
        context = tl.minimum(length - 1 + end - begin, limit)
        tl.store(query_starts + at, begin.to(tl.int32))
        tl.store(context_lengths + at, tl.where(is_alive & (end > begin), context, 0).to(tl.int32))
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    taken = tl.load(table + column, mask=column < width, other=0)
    tl.store(taken_tables + at.to(tl.int64) * width + column, taken, mask=column < width)


def verify_rows(
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
    """See `draft_interface.VerifyRows`."""
    num_rows = len(rows)
    outcome = torch.empty(5, queries, num_rows, dtype=torch.int64, device=rows.device)
    launch(
        _verify_rows, (cdiv(num_rows, _BLOCK),),
        *sampled, tokens, rows, starts, positions, num_rows,
        ends.max_length, ends.max_length.stride(0), ends.end_ids, ends.end_ids.shape[1],
        *state, 0 if state.history is None else state.history.shape[1], planted, outcome,
        QUERIES=queries, BLOCK=_BLOCK, UNIT=PLANTED_UNIT, KEPT=state.history is not None,
        PLANTED=planted is not None,
    )  # fmt: skip
    return outcome


@triton.jit(do_not_specialize=["num_rows", "num_end_ids"])
def _verify_rows(
    sampled, finite, tokens, rows, starts, positions, num_rows,
    max_length, max_length_stride, end_ids, num_end_ids,
    last_tokens, lengths, alive, history, history_width, planted, outcome,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, KEPT: tl.constexpr, PLANTED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    row = tl.load(rows + at, mask=inside, other=0)
    start = tl.load(starts + at, mask=inside, other=0)
    count = tl.load(starts + at + 1, mask=inside, other=0) - start
    limit = tl.load(max_length + row * max_length_stride, mask=inside, other=0)
    was_alive = inside & (tl.load(alive + row, mask=inside, other=0) != 0)
    latest = tl.load(last_tokens + row, mask=inside, other=0)
    known = tl.load(lengths + row, mask=inside, other=0)
    reached, ended = was_alive, inside & (at < 0)
    for number in tl.static_range(QUERIES):
        present = inside & (number < count)
        reached = reached & present
        line = start + number
        token = tl.load(sampled + line, mask=present, other=0)
        is_finite = tl.load(finite + line, mask=present, other=0) != 0
        position = tl.load(positions + line, mask=present, other=0)
        stop = inside & (at < 0)
        for place in range(num_end_ids):
            stop = stop | (tl.load(end_ids + row * num_end_ids + place, mask=present, other=-1) == token)
        stop = stop & present
        length = present & (position + 1 >= limit) & (stop == 0)
        over = stop | length | (is_finite == 0)
        emitted = reached & is_finite
        latest = tl.where(emitted, token, latest)
        known += emitted.to(tl.int64)
        if KEPT:
            tl.store(history + row * history_width + position % history_width, token.to(tl.int32), mask=emitted)
        out = outcome + number * num_rows + at
        step = QUERIES * num_rows
        tl.store(out, token, mask=inside)
        tl.store(out + step, reached.to(tl.int64), mask=inside)
        tl.store(out + 2 * step, is_finite.to(tl.int64), mask=inside)
        tl.store(out + 3 * step, stop.to(tl.int64), mask=inside)
        tl.store(out + 4 * step, length.to(tl.int64), mask=inside)
        ended = ended | (reached & over)
        going = present & (number + 1 < count)
        if PLANTED:
            mixed = (position * 2654435761 + row * 40503 + 12345) % UNIT
            right = mixed * (mixed + 7919) % UNIT < tl.load(planted)
        else:
            right = tl.load(tokens + line + 1, mask=going, other=-1) == token
        reached = reached & going & right & (over == 0)
    tl.store(last_tokens + row, latest, mask=was_alive)
    tl.store(lengths + row, known, mask=was_alive)
    tl.store(alive + row, was_alive & (ended == 0), mask=was_alive)


GPU_DRAFT_KERNELS = DraftKernels(verify_inputs, verify_rows, match_suffix)
