"""The kernels that work by row, written with tensor operations: what recorded steps are tested with."""

import torch
from torch import Tensor

from quire.kernels.row_interface import (
    EndColumns,
    LogitShaping,
    RowKernels,
    RowState,
    Sampled,
    SamplingStage,
    SamplingTable,
    decode_inputs_reference,
)
from quire.sampling.filters import draw, drop_unlikely, keep_likeliest, token_weights, uniform
from quire.sampling.logit_processors import count_tokens_reference
from quire.sampling.logprobs import token_logprobs_reference


def sample_plainly(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable, stages: SamplingStage
) -> Sampled:
    at = rows.clamp(min=0)
    seed, index, top_k, random = table.integers[at, :4].unbind(1)
    highest, tokens = logits.max(dim=-1)
    finite = torch.isfinite(highest) & (rows >= 0)
    random *= rows >= 0
    if random.any():
        assert stages is SamplingStage.DRAWN, "a row wants a random token, and the others decided for it"
        temperature, top_p, min_p = table.floats[at, :3].unbind(1)
        safe = torch.where(finite[:, None], logits, 0.0)
        weights = drop_unlikely(token_weights(safe, safe.amax(-1), temperature), min_p)
        weights = keep_likeliest(safe, weights, top_k, top_p, logits.shape[1])
        tokens = torch.where(random == 1, draw(weights, uniform(seed, index, positions)), tokens)
    return Sampled(torch.where(finite, tokens, 0), finite)


def finish_plainly(chosen: Sampled, rows: Tensor, positions: Tensor, ends: EndColumns, state: RowState) -> Tensor:
    real, at = rows >= 0, rows.clamp(min=0)
    alive = state.alive[at] & real
    stop = (ends.end_ids[at] == chosen.tokens[:, None]).any(-1) & real
    length = (positions + 1 >= ends.max_length[at]) & ~stop & real
    emitted = alive & chosen.finite
    speaking = at[emitted]
    state.last_tokens[speaking] = chosen.tokens[emitted]
    state.lengths[speaking] += 1
    if state.history is not None:
        state.history[speaking, positions[emitted] % state.history.shape[1]] = chosen.tokens[emitted].int()
    state.alive[at[real & (stop | length | ~chosen.finite)]] = False
    return torch.stack([each.long() for each in (chosen.tokens, alive, chosen.finite & real, stop, length)])


def shape_plainly(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable, shaping: LogitShaping
) -> Tensor:
    """Row by row."""
    shaped = logits.clone()
    ids = torch.arange(logits.shape[1], device=logits.device)
    for at, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        values = shaped[at]
        min_tokens, num_prompt = table.integers[row, 4:6]
        repetition, presence, frequency = table.floats[row, 3:6].float()
        mask, offset, count = shaping.places[:, at].tolist()
        if mask >= 0:
            values[(shaping.masks[mask, ids // 32] >> ids % 32) & 1 == 0] = -torch.inf
        if offset >= 0:
            values += shaping.offsets[offset]
        if positions[at] - num_prompt < min_tokens:
            values[torch.isin(ids, shaping.end_ids[row])] = -torch.inf
        if count >= 0:
            generated = shaping.generated[count].clone()
            for draft in shaping.drafts[at].tolist() if len(shaping.drafts) else ():
                generated[draft] += draft >= 0
            seen = shaping.in_prompt[count] | (generated > 0)
            values[seen] = torch.where(values > 0, values / repetition, values * repetition)[seen]
            values -= generated * frequency
            values -= (generated > 0) * presence
        values[logits[at].isnan() | (logits[at] == torch.inf)] = torch.nan
    return shaped


def mask_plainly(logits: Tensor, masks: Tensor) -> None:
    ids = torch.arange(logits.shape[1], device=logits.device)
    for at, *words in masks.tolist():
        values = logits[at].clone()
        values[(torch.tensor(words)[ids // 32] >> ids % 32) & 1 == 0] = -torch.inf
        values[logits[at].isnan() | (logits[at] == torch.inf)] = torch.nan
        logits[at] = values


REFERENCE_ROW_KERNELS = RowKernels(
    shape_plainly,
    mask_plainly,
    sample_plainly,
    count_tokens_reference,
    token_logprobs_reference,
    finish_plainly,
    decode_inputs_reference,
)
