"""Logit processors in one launch: grammar masks, logit bias, min_tokens, penalties; and the penalties' token counts.

Rows with a grammar and nothing else are masked in place instead: the captured sampling then serves them too.

The same formulas as the `sampling` package, bit for bit: no fused multiply-add, as in tensor operations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.launch import cdiv, launch
from quire.kernels.gpu.sampling.probabilities import FREQUENCY, MIN_TOKENS, NUM_PROMPT, PRESENCE, REPETITION
from quire.kernels.row_interface import LogitShaping, SamplingTable

_TILE = 2048  # tokens per program
_BLOCK = 64  # rows per counting program


def process_logits(
    logits: Tensor,  # [n, vocab] float32; not changed
    rows: Tensor,  # [n] int64; -1 is padding
    positions: Tensor,  # [n] int64
    table: SamplingTable,
    shaping: LogitShaping,
) -> Tensor:  # [n, vocab] float32
    """See `row_interface.ProcessLogits`."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert table.integers.stride(1) == table.floats.stride(1) == 1, "columns must be contiguous"
    assert shaping.masks.shape[1] * 32 >= vocab_size, (shaping.masks.shape, vocab_size)
    lines = (shaping.offsets, shaping.in_prompt, shaping.generated)
    assert all(each.shape[1] == vocab_size for each in lines), [each.shape for each in lines]
    shaped = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if num_rows:
        launch(
            _shape, (num_rows, cdiv(vocab_size, _TILE)),
            logits, logits.stride(0), vocab_size, rows, positions, num_rows,
            table.integers, table.integers.stride(0), table.floats, table.floats.stride(0),
            shaping.places, shaping.masks, shaping.masks.shape[1], shaping.offsets, shaping.in_prompt,
            shaping.generated, shaping.end_ids, shaping.end_ids.shape[1], shaping.drafts, shaping.drafts.shape[1],
            shaped,
            TILE=_TILE, enable_fp_fusion=False,
        )  # fmt: skip
    return shaped


def mask_logits(
    logits: Tensor,  # [n, vocab] float32; changed in place
    masks: Tensor,  # [m, 1 + words] int32
) -> None:
    """See `row_interface.MaskLogits`."""
    num_masks, vocab_size = len(masks), logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == masks.stride(1) == 1, (logits.dtype, logits.stride())
    assert (masks.shape[1] - 1) * 32 >= vocab_size, (masks.shape, vocab_size)
    if num_masks:
        grid = (num_masks, cdiv(vocab_size, _TILE))
        launch(_mask, grid, logits, logits.stride(0), vocab_size, masks, masks.stride(0), TILE=_TILE)


def count_tokens(
    tokens: Tensor,  # [n] int64
    places: Tensor,  # [n] int64
    generated: Tensor,  # [slots, vocab] int32; changed in place
) -> None:
    """See `row_interface.CountTokens`."""
    num_rows = len(tokens)
    if num_rows:
        grid = (cdiv(num_rows, _BLOCK),)
        launch(_count, grid, tokens, places, num_rows, generated, generated.shape[1], BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["num_rows", "num_words", "num_end_ids", "num_drafts"])  # one compilation for all
def _shape(
    logits, logits_stride, vocab_size, rows, positions, num_rows,
    integers, integers_stride, floats, floats_stride,
    places, masks, num_words, offsets, in_prompt, generated, end_ids, num_end_ids, drafts, num_drafts, shaped,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of a row."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    if row < 0:
        return
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    values = tl.load(logits + at * logits_stride + ids, mask=inside, other=0.0)
    is_fault = (values != values) | (values == float("inf"))

    mask_place = tl.load(places + at)
    if mask_place >= 0:
        words = tl.load(masks + mask_place * num_words + ids // 32, mask=inside, other=0)
        values = tl.where(((words >> (ids % 32)) & 1) == 0, float("-inf"), values)

    offset_place = tl.load(places + num_rows + at)
    if offset_place >= 0:
        values += tl.load(offsets + offset_place * vocab_size + ids, mask=inside, other=0.0)

    num_generated = tl.load(positions + at) - tl.load(integers + row * integers_stride + NUM_PROMPT)
    if num_generated < tl.load(integers + row * integers_stride + MIN_TOKENS):
        for end in range(num_end_ids):
            is_end = tl.load(end_ids + row * num_end_ids + end) == ids
            values = tl.where(is_end, float("-inf"), values)

    count_place = tl.load(places + 2 * num_rows + at)
    if count_place >= 0:
        was_in_prompt = tl.load(in_prompt + count_place * vocab_size + ids, mask=inside, other=0) != 0
        counts = tl.load(generated + count_place * vocab_size + ids, mask=inside, other=0)
        for number in range(num_drafts):
            counts += (tl.load(drafts + at * num_drafts + number) == ids).to(tl.int32)
        values = _penalized(values, was_in_prompt, counts, floats + row * floats_stride)

    tl.store(shaped + at * vocab_size + ids, tl.where(is_fault, float("nan"), values), mask=inside)


@triton.jit(do_not_specialize=["masks_stride"])
def _mask(logits, logits_stride, vocab_size, masks, masks_stride, TILE: tl.constexpr):
    """One tile of a masked row."""
    line = masks + tl.program_id(0).to(tl.int64) * masks_stride
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    place = logits + tl.load(line).to(tl.int64) * logits_stride + ids
    values = tl.load(place, mask=inside, other=0.0)
    is_fault = (values != values) | (values == float("inf"))
    words = tl.load(line + 1 + ids // 32, mask=inside, other=0)
    values = tl.where(((words >> (ids % 32)) & 1) == 0, float("-inf"), values)
    tl.store(place, tl.where(is_fault, float("nan"), values), mask=inside)


@triton.jit
def _penalized(values, was_in_prompt, counts, floats):
    """Repetition, frequency and presence penalty. `floats` is the row's line in the table."""
    repetition = tl.load(floats + REPETITION).to(tl.float32)
    penalized = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where(was_in_prompt | (counts > 0), penalized, values)
    values -= counts.to(tl.float32) * tl.load(floats + FREQUENCY).to(tl.float32)
    return values - (counts > 0).to(tl.float32) * tl.load(floats + PRESENCE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _count(tokens, places, num_rows, generated, vocab_size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < num_rows, other=-1)
    token = tl.load(tokens + at, mask=place >= 0, other=0)
    count = generated + place * vocab_size + token
    tl.atomic_add(count, 1, mask=place >= 0, sem="relaxed")
