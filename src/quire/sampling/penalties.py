"""Repetition, presence and frequency penalties, and the token counts they read.

Counts follow the tokens one by one after a row is seated with all it knows; they always equal a recount.
"""

import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.step import Seat
from quire.kernels.choosing import TallyTokens
from quire.kernels.host_copies import upload
from quire.sampling.rows import Part, RowBatch, SamplingRows
from quire.sampling.slots import SlotPool, grown


class Penalties:
    """For each row that asks: which tokens its prompt holds, and how often each was generated."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, tally: TallyTokens) -> None:
        self._vocab_size = vocab_size
        self._tally = tally
        self.slots = SlotPool(max_rows, device)
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.generated = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return self.in_prompt.nbytes + self.generated.nbytes

    def seat(self, seat: Seat) -> None:
        slot = self.slots.take(seat.row)
        sizes = (self.slots.capacity, self._vocab_size)
        self.in_prompt = grown(self.in_prompt, sizes)
        self.generated = grown(self.generated, sizes)
        tokens = upload(seat.tokens, self.generated.device).long()
        self.in_prompt[slot].zero_().index_fill_(0, tokens[: seat.num_prompt], True)
        generated = tokens[seat.num_prompt :]
        self.generated[slot].zero_().index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def leave(self, row: Row) -> None:
        self.slots.give_back(row)

    def apply(self, logits: Tensor, part: Part, rows: SamplingRows) -> None:
        """Change the logits of the batch, in place."""
        slots = self.slots.of(part.batch.host_rows)
        generated = self.generated.index_select(0, slots)
        is_generated = generated > 0
        seen = self.in_prompt.index_select(0, slots) | is_generated
        chosen = part.of(logits)
        repetition = _column(rows.repetition, part)
        chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
        chosen -= generated * _column(rows.frequency, part)
        chosen -= is_generated * _column(rows.presence, part)
        logits.index_copy_(0, part.at, chosen)

    def commit(self, batch: RowBatch, tokens: Tensor) -> None:
        """Count the tokens the batch was given, of the rows that asked."""
        places = upload(self.slots.places(batch.host_rows), tokens.device)
        self._tally(tokens, places, self.generated)


def tally_plainly(tokens: Tensor, places: Tensor, generated: Tensor) -> None:
    """See `TallyTokens`."""
    at = places.clamp(min=0) * generated.shape[1] + tokens
    generated.view(-1).index_add_(0, at, (places >= 0).to(torch.int32))


def _column(values: Tensor, part: Part) -> Tensor:  # [m, 1] float32
    return values.index_select(0, part.batch.rows).float()[:, None]
