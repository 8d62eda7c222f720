"""Appends each row's sampled token and ends rows on stop tokens, length or NaN: one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch
from quire.kernels.row_interface import EndColumns, RowState, Sampled

_BLOCK = 64  # rows per program


def finish_rows(
    sampled: Sampled,
    rows: Tensor,  # [n] int64, unique except -1
    positions: Tensor,  # [n] int64
    ends: EndColumns,
    state: RowState,
) -> Tensor:  # [5, n] int64: token, alive before, finite, stop, length
    """See `row_interface.FinishRows`."""
    num_rows = len(rows)
    outcome = torch.empty(5, num_rows, dtype=torch.int64, device=rows.device)
    if num_rows:
        launch(
            _finish, (cdiv(num_rows, _BLOCK),),
            *sampled, rows, positions, num_rows,
            ends.max_length, ends.max_length.stride(0), ends.end_ids, ends.end_ids.shape[1],
            *state, 0 if state.history is None else state.history.shape[1], outcome,
            BLOCK=_BLOCK, KEPT=state.history is not None,
        )  # fmt: skip
    return outcome


@triton.jit(do_not_specialize=["num_rows", "num_end_ids"])  # one compilation serves every batch
def _finish(
    tokens, finite, rows, positions, num_rows,
    max_length, max_length_stride, end_ids, num_end_ids,
    last_tokens, lengths, alive, history, history_width, outcome, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    row = tl.load(rows + at, mask=inside, other=-1)
    real = row >= 0
    token = tl.load(tokens + at, mask=real, other=0)
    is_finite = tl.load(finite + at, mask=real, other=0) != 0
    was_alive = tl.load(alive + row, mask=real, other=0) != 0
    limit = tl.load(max_length + row * max_length_stride, mask=real, other=0)
    full = real & (tl.load(positions + at, mask=real, other=0) + 1 >= limit)
    stop = token < 0  # false for every token
    for place in range(num_end_ids):
        stop = stop | (tl.load(end_ids + row * num_end_ids + place, mask=real, other=-1) == token)
    length = full & (stop == 0)
    emitted = was_alive & is_finite
    ended = stop | length | (is_finite == 0)

    tl.store(last_tokens + row, token, mask=real & emitted)
    known = tl.load(lengths + row, mask=real, other=0)
    tl.store(lengths + row, known + 1, mask=real & emitted)
    if KEPT:
        place = tl.load(positions + at, mask=real, other=0) % history_width
        tl.store(history + row * history_width + place, token.to(tl.int32), mask=real & emitted)
    tl.store(alive + row, was_alive & (ended == 0), mask=real)
    tl.store(outcome + at, token, mask=inside)
    tl.store(outcome + num_rows + at, was_alive.to(tl.int64), mask=inside)
    tl.store(outcome + 2 * num_rows + at, is_finite.to(tl.int64), mask=inside)
    tl.store(outcome + 3 * num_rows + at, stop.to(tl.int64), mask=inside)
    tl.store(outcome + 4 * num_rows + at, length.to(tl.int64), mask=inside)
