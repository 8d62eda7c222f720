"""Which rows end with the token they were just given, decided on the device, and which may not end yet."""

from typing import NamedTuple

from torch import Tensor

from quire.sampling.forbid import forbid
from quire.sampling.rows import Part, RowBatch, SamplingRows


class Ends(NamedTuple):
    """A row whose last allowed token is an end token has stopped: it is never both."""

    stop: Tensor  # [n] bool: the token is one of the row's end tokens
    length: Tensor  # [n] bool: the row now knows all the tokens it may have


def find_ends(rows: SamplingRows, batch: RowBatch, tokens: Tensor) -> Ends:
    """Before min_tokens no end token can have been chosen, so that none needs to be looked for."""
    stop = (rows.end_ids.index_select(0, batch.rows) == tokens[:, None]).any(-1)
    full = batch.positions + 1 >= rows.max_length.index_select(0, batch.rows)
    return Ends(stop, full & ~stop)


def forbid_early_ends(logits: Tensor, part: Part, rows: SamplingRows) -> None:
    """While a row has generated fewer than min_tokens, its end tokens are forbidden, in place."""
    batch = part.batch
    end_ids = rows.end_ids.index_select(0, batch.rows)
    generated = batch.positions - rows.num_prompt.index_select(0, batch.rows)
    too_early = generated < rows.min_tokens.index_select(0, batch.rows)
    forbid(logits, part, end_ids.clamp(min=0), too_early[:, None] & (end_ids >= 0))
