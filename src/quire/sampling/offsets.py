"""What is added to a row's logits in every step alike: bias, and -inf for what is not allowed or a bad word.

Owns one vector over the vocabulary for each row that asks. Knows nothing of the tokens a row has.
"""

import math

import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.sampling import RowSampling
from quire.core.step import Seat
from quire.kernels.host_copies import upload
from quire.sampling.rows import Part
from quire.sampling.slots import SlotPool, grown


class Offsets:
    """Logit bias, allowed ids and bad words of a single token."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.slots = SlotPool(max_rows, device)
        self.table = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)  # [slots, vocab]

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes

    def seat(self, seat: Seat) -> None:
        slot = self.slots.take(seat.row)
        self.table = grown(self.table, (self.slots.capacity, self._vocab_size))
        self.table[slot].copy_(upload(self._vector(seat.sampling).numpy(), self.table.device))

    def leave(self, row: Row) -> None:
        self.slots.give_back(row)

    def apply(self, logits: Tensor, part: Part) -> None:
        """Add to the logits of the batch, in place."""
        slots = self.slots.of(part.batch.host_rows)
        logits.index_add_(0, part.at, self.table.index_select(0, slots))

    def _vector(self, sampling: RowSampling) -> Tensor:
        vector = torch.zeros(self._vocab_size)
        if sampling.allowed_ids is not None:
            vector.fill_(-math.inf)
            vector[list(sampling.allowed_ids)] = 0.0
        for token, bias in sampling.logit_bias:
            vector[token] += bias
        single = [word[0] for word in sampling.bad_words if len(word) == 1]
        vector[single] = -math.inf
        return vector
