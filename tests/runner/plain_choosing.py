"""The kernels that work by row, written with tensor operations: what recorded steps are tested with."""

import torch
from torch import Tensor

from quire.kernels.choosing import ChoiceTable, Choosing, Chosen, EndColumns, RowState, Stages
from quire.kernels.cruising import cruise_plainly


def choose_likeliest(logits: Tensor, rows: Tensor, positions: Tensor, table: ChoiceTable, stages: Stages) -> Chosen:
    assert not table.integers[rows.clamp(min=0), 3].any(), "somebody wants a random token"
    highest, tokens = logits.max(dim=-1)
    finite = torch.isfinite(highest) & (rows >= 0)
    return Chosen(torch.where(finite, tokens, 0), finite)


def finish_plainly(chosen: Chosen, rows: Tensor, positions: Tensor, ends: EndColumns, state: RowState) -> Tensor:
    real, at = rows >= 0, rows.clamp(min=0)
    alive = state.alive[at] & real
    stop = (ends.end_ids[at] == chosen.tokens[:, None]).any(-1) & real
    length = (positions + 1 >= ends.max_length[at]) & ~stop & real
    emitted = alive & chosen.finite
    speaking = at[emitted]
    state.last_tokens[speaking] = chosen.tokens[emitted]
    state.lengths[speaking] += 1
    state.alive[at[real & (stop | length | ~chosen.finite)]] = False
    return torch.stack([each.long() for each in (chosen.tokens, alive, chosen.finite & real, stop, length)])


PLAIN_CHOOSING = Choosing(choose_likeliest, finish_plainly, cruise_plainly)
