"""Repetition, presence and frequency penalties, and the token counts they read.

Counts follow the tokens one by one after a row is seated with all it knows; they always equal a recount.
"""

import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.step import Seat
from quire.kernels.host_copies import upload
from quire.sampling.rows import Part, SamplingRows
from quire.sampling.slots import SlotPool, grown


class Penalties:
    """For each row that asks: which tokens its prompt holds, and how often each was generated."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._slots = SlotPool(max_rows, device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._generated = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return self._in_prompt.nbytes + self._generated.nbytes

    def seat(self, seat: Seat) -> None:
        slot = self._slots.take(seat.row)
        sizes = (self._slots.capacity, self._vocab_size)
        self._in_prompt = grown(self._in_prompt, sizes)
        self._generated = grown(self._generated, sizes)
        tokens = upload(seat.tokens, self._generated.device).long()
        self._in_prompt[slot].zero_().index_fill_(0, tokens[: seat.num_prompt], True)
        generated = tokens[seat.num_prompt :]
        self._generated[slot].zero_().index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def leave(self, row: Row) -> None:
        self._slots.give_back(row)

    def apply(self, logits: Tensor, part: Part, rows: SamplingRows) -> None:
        """Change the logits of the batch, in place."""
        slots = self._slots.of(part.batch.host_rows)
        generated = self._generated.index_select(0, slots)
        is_generated = generated > 0
        seen = self._in_prompt.index_select(0, slots) | is_generated
        chosen = part.of(logits)
        repetition = _column(rows.repetition, part)
        chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
        chosen -= generated * _column(rows.frequency, part)
        chosen -= is_generated * _column(rows.presence, part)
        logits.index_copy_(0, part.at, chosen)

    def commit(self, part: Part, tokens: Tensor) -> None:
        """Count the tokens the batch was given."""
        slots = self._slots.of(part.batch.host_rows)
        places = slots * self._vocab_size + part.of(tokens)
        self._generated.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))


def _column(values: Tensor, part: Part) -> Tensor:  # [m, 1] float32
    return values.index_select(0, part.batch.rows).float()[:, None]
