"""Bad words of several tokens: their last token is forbidden where the tokens before it have just come.

The prompt counts: a word it begins may not be completed. Owns a short tail of tokens for each row that asks.
"""

import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.step import Seat
from quire.kernels.host_copies import upload
from quire.sampling.forbid import forbid
from quire.sampling.rows import Part
from quire.sampling.slots import SlotPool, grown

_ANY = -1  # in a beginning: matches every token, so that short words can be padded
_NEVER = -2  # in a beginning: matches no token, so that rows with few words can be padded
_MISSING = -3  # in a tail: a sequence shorter than it


class BadWords:
    """For each row that asks: its words, split into beginning and last token, and its latest tokens."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._slots = SlotPool(max_rows, device)
        self._beginnings = torch.empty(0, 0, 0, dtype=torch.int32, device=device)  # [slots, words, length]
        self._lasts = torch.empty(0, 0, dtype=torch.int64, device=device)  # [slots, words]
        self._tails = torch.empty(0, 0, dtype=torch.int32, device=device)  # [slots, length], latest first

    @property
    def num_bytes(self) -> int:
        return self._beginnings.nbytes + self._lasts.nbytes + self._tails.nbytes

    def seat(self, seat: Seat) -> None:
        words = [word for word in seat.sampling.bad_words if len(word) > 1]
        slot = self._slots.take(seat.row)
        self._grow(len(words), max(len(word) for word in words) - 1)
        num_words, length = self._beginnings.shape[1:]
        beginnings = torch.full((num_words, length), _NEVER, dtype=torch.int32)
        lasts = torch.zeros(num_words, dtype=torch.int64)
        for place, word in enumerate(words):
            beginning = word[-2::-1]  # latest first, as the tail
            beginnings[place] = torch.tensor(beginning + (_ANY,) * (length - len(beginning)))
            lasts[place] = word[-1]
        latest = seat.tokens[::-1][:length].tolist()
        tail = torch.tensor(latest + [_MISSING] * (length - len(latest)), dtype=torch.int32)
        self._beginnings[slot].copy_(upload(beginnings.numpy(), self._beginnings.device))
        self._lasts[slot].copy_(upload(lasts.numpy(), self._lasts.device))
        self._tails[slot].copy_(upload(tail.numpy(), self._tails.device))

    def leave(self, row: Row) -> None:
        self._slots.give_back(row)

    def apply(self, logits: Tensor, part: Part) -> None:
        """Forbid in the logits of the batch, in place, what would complete a word."""
        slots = self._slots.of(part.batch.host_rows)
        beginnings = self._beginnings.index_select(0, slots)
        tails = self._tails.index_select(0, slots)
        has_come = ((beginnings == tails[:, None, :]) | (beginnings == _ANY)).all(-1)
        forbid(logits, part, self._lasts.index_select(0, slots), has_come)

    def commit(self, part: Part, tokens: Tensor) -> None:
        """Append the tokens the batch was given."""
        slots = self._slots.of(part.batch.host_rows)
        newest = part.of(tokens).to(torch.int32)[:, None]
        older = self._tails.index_select(0, slots)[:, :-1]
        self._tails.index_copy_(0, slots, torch.cat([newest, older], dim=1))

    def _grow(self, num_words: int, length: int) -> None:
        """Room for one row more, for so many words of so many tokens."""
        capacity = self._slots.capacity
        old_length = self._tails.shape[1]
        self._beginnings = grown(self._beginnings, (capacity, num_words, length), fill=_NEVER)
        self._lasts = grown(self._lasts, (capacity, num_words))
        self._tails = grown(self._tails, (capacity, length), fill=_MISSING)
        self._pad_older_words(old_length)

    def _pad_older_words(self, old_length: int) -> None:
        """Where words of older rows got longer, the new places match anything."""
        if 0 < old_length < self._beginnings.shape[2]:
            self._beginnings[:, :, old_length:] = _ANY
