"""Logit processors: penalties, logit bias, grammar masks, bad words, min_tokens; and which rows end with a token.

Vocabulary-wide state has slots only for the rows that need it (`SlotPool`). Penalties read token counts, which are
updated token by token and always equal a recount. Bias is one vector per row, added in every step; -inf forbids a
token. A bad word of several tokens forbids its last token where the tokens before it have just been generated; the
prompt counts as generated there. Rows end on the device, by end token or length.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.sampling import RowSampling
from quire.core.step import Masks, RowStart
from quire.kernels.row_interface import CountTokens
from quire.kernels.transfers import upload
from quire.sampling.row_params import BatchSubset, SamplingBatch, SamplingParamsTable, SlotPool, grown


class Penalties:
    """Repetition, presence and frequency penalties. Per row: the tokens of its prompt, and counts of generated ones."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, count_tokens: CountTokens) -> None:
        self._vocab_size = vocab_size
        self._count_tokens = count_tokens
        self.slots = SlotPool(max_rows, device)
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.generated = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def assign(self, row_start: RowStart) -> None:
        slot = self.slots.take(row_start.row)
        sizes = (self.slots.capacity, self._vocab_size)
        self.in_prompt = grown(self.in_prompt, sizes)
        self.generated = grown(self.generated, sizes)
        tokens = upload(row_start.tokens, self.generated.device).long()
        self.in_prompt[slot].zero_().index_fill_(0, tokens[: row_start.num_prompt], True)
        generated = tokens[row_start.num_prompt :]
        self.generated[slot].zero_().index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def release(self, row: Row) -> None:
        self.slots.release(row)

    def apply(self, logits: Tensor, subset: BatchSubset, rows: SamplingParamsTable) -> None:
        """Change the logits of the batch, in place."""
        slots = self.slots.of(subset.batch.host_rows)
        generated = self.generated.index_select(0, slots)
        is_generated = generated > 0
        seen = self.in_prompt.index_select(0, slots) | is_generated
        selected = subset.of(logits)
        repetition = _column(rows.repetition, subset)
        selected = torch.where(seen, torch.where(selected > 0, selected / repetition, selected * repetition), selected)
        selected -= generated * _column(rows.frequency, subset)
        selected -= is_generated * _column(rows.presence, subset)
        logits.index_copy_(0, subset.at, selected)

    def commit(self, batch: SamplingBatch, tokens: Tensor) -> None:
        """Count the sampled tokens of the rows that have penalties."""
        self.count(tokens, upload(self.slots.places(batch.host_rows), tokens.device))

    def count(self, tokens: Tensor, places: Tensor) -> None:
        """Count these tokens in these slots; -1: not."""
        self._count_tokens(tokens, places, self.generated)


def count_tokens_reference(tokens: Tensor, places: Tensor, generated: Tensor) -> None:
    """See `CountTokens`."""
    at = places.clamp(min=0) * generated.shape[1] + tokens
    generated.view(-1).index_add_(0, at, (places >= 0).to(torch.int32))


def _column(values: Tensor, subset: BatchSubset) -> Tensor:  # [m, 1] float32
    return values.index_select(0, subset.batch.rows).float()[:, None]


class LogitBias:
    """Logit bias, allowed ids and bad words of a single token."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.slots = SlotPool(max_rows, device)
        self.table = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)  # [slots, vocab]

    def assign(self, row_start: RowStart) -> None:
        slot = self.slots.take(row_start.row)
        self.table = grown(self.table, (self.slots.capacity, self._vocab_size))
        self.table[slot].copy_(upload(self._vector(row_start.sampling).numpy(), self.table.device))

    def release(self, row: Row) -> None:
        self.slots.release(row)

    def apply(self, logits: Tensor, subset: BatchSubset) -> None:
        """Add to the logits of the batch, in place."""
        slots = self.slots.of(subset.batch.host_rows)
        logits.index_add_(0, subset.at, self.table.index_select(0, slots))

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


MASK_BITS = 32  # tokens per integer of a mask


def mask_places(batch: SamplingBatch, masks: Masks | None) -> NDArray[np.int64]:  # [n]; -1 for rows without
    """The index of each row's mask. Every masked row of the step is in the batch."""
    places = np.full(len(batch.host_rows), -1)
    if masks is not None:
        places[_in_batch(batch, masks)] = np.arange(len(masks.rows))
    return places


def apply_masks(
    logits: Tensor,  # [n, vocab] float32; changed in place
    batch: SamplingBatch,
    masks: Masks,
) -> None:
    """Forbid what the grammar masks of these rows do not allow."""
    at = upload(_in_batch(batch, masks), logits.device)
    words = upload(masks.bits, logits.device)
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(~allowed, -math.inf))


def _in_batch(batch: SamplingBatch, masks: Masks) -> NDArray[np.int64]:
    """The indices of the masked rows in the batch."""
    place_of = {row: place for place, row in enumerate(batch.host_rows.tolist())}
    return np.array([place_of[row] for row in masks.rows.tolist()], dtype=np.int64)


def forbid(
    logits: Tensor,  # [n, vocab] float32
    subset: BatchSubset,
    ids: Tensor,  # [m, width] int64
    when: Tensor,  # [m, width] bool; ids where it is False may be anything inside the vocabulary
) -> None:
    """Set tokens of some rows to -inf, in place. An id may occur twice: a minimum does not depend on the order."""
    limits = torch.where(when, -math.inf, math.inf).to(logits.dtype)
    logits.index_copy_(0, subset.at, subset.of(logits).scatter_reduce(1, ids, limits, "amin"))


_ANY = -1  # in a beginning: matches every token; pads short words
_NEVER = -2  # in a beginning: matches no token; pads rows with few words
_MISSING = -3  # in a tail: the sequence is shorter


class BadWords:
    """Bad words of several tokens. Per row: its words, split into beginning and last token, and its latest tokens."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._slots = SlotPool(max_rows, device)
        self._beginnings = torch.empty(0, 0, 0, dtype=torch.int32, device=device)  # [slots, words, length]
        self._lasts = torch.empty(0, 0, dtype=torch.int64, device=device)  # [slots, words]
        self._tails = torch.empty(0, 0, dtype=torch.int32, device=device)  # [slots, length], latest first

    def assign(self, row_start: RowStart) -> None:
        words = [word for word in row_start.sampling.bad_words if len(word) > 1]
        slot = self._slots.take(row_start.row)
        self._grow(len(words), max(len(word) for word in words) - 1)
        num_words, length = self._beginnings.shape[1:]
        beginnings = torch.full((num_words, length), _NEVER, dtype=torch.int32)
        lasts = torch.zeros(num_words, dtype=torch.int64)
        for place, word in enumerate(words):
            beginning = word[-2::-1]  # latest first, as the tail
            beginnings[place] = torch.tensor(beginning + (_ANY,) * (length - len(beginning)))
            lasts[place] = word[-1]
        latest = row_start.tokens[::-1][:length].tolist()
        tail = torch.tensor(latest + [_MISSING] * (length - len(latest)), dtype=torch.int32)
        self._beginnings[slot].copy_(upload(beginnings.numpy(), self._beginnings.device))
        self._lasts[slot].copy_(upload(lasts.numpy(), self._lasts.device))
        self._tails[slot].copy_(upload(tail.numpy(), self._tails.device))

    def release(self, row: Row) -> None:
        self._slots.release(row)

    def apply(self, logits: Tensor, subset: BatchSubset, drafts: Tensor | None = None) -> None:
        """Forbid in place what would complete a bad word. drafts: [m, most] int64, before each line, the latest first,
        padded with -1: they count as generated."""
        slots = self._slots.of(subset.batch.host_rows)
        beginnings = self._beginnings.index_select(0, slots)
        tails = self._tails.index_select(0, slots)
        if drafts is not None:
            most, numbers = drafts.shape[1], torch.arange(tails.shape[1], device=tails.device)
            num_drafts = (drafts >= 0).sum(1, keepdim=True)
            latest = torch.where(numbers < num_drafts, numbers, most + numbers - num_drafts)
            tails = torch.cat([drafts.int(), tails], dim=1).gather(1, latest)
        has_come = ((beginnings == tails[:, None, :]) | (beginnings == _ANY)).all(-1)
        forbid(logits, subset, self._lasts.index_select(0, slots), has_come)

    def commit(self, subset: BatchSubset, tokens: Tensor) -> None:
        """Append the sampled tokens to the tails."""
        slots = self._slots.of(subset.batch.host_rows)
        newest = subset.of(tokens).to(torch.int32)[:, None]
        older = self._tails.index_select(0, slots)[:, :-1]
        self._tails.index_copy_(0, slots, torch.cat([newest, older], dim=1))

    def commit_several(
        self,
        rows: IntArray,  # [m], which have bad words
        tokens: Tensor,  # [m, most] int64: sampled one after the other
        counts: Tensor,  # [m] int64: of those, how many count
    ) -> None:
        slots = self._slots.of(rows)
        older = self._tails.index_select(0, slots).flip(1)
        length = older.shape[1]
        latest = length - 1 + counts[:, None] - torch.arange(length, device=tokens.device)
        self._tails.index_copy_(0, slots, torch.cat([older, tokens.int()], dim=1).gather(1, latest))

    def _grow(self, num_words: int, length: int) -> None:
        """Grow the tables for one more row, with `num_words` words of up to `length` tokens."""
        capacity = self._slots.capacity
        old_length = self._tails.shape[1]
        self._beginnings = grown(self._beginnings, (capacity, num_words, length), fill=_NEVER)
        self._lasts = grown(self._lasts, (capacity, num_words))
        self._tails = grown(self._tails, (capacity, length), fill=_MISSING)
        if 0 < old_length < self._beginnings.shape[2]:  # pad the words of older rows
            self._beginnings[:, :, old_length:] = _ANY


class EndTokens(NamedTuple):
    """How rows end. A row whose last allowed token is an end token has stopped: never both."""

    stop: Tensor  # [n] bool: the token is one of the row's end tokens
    length: Tensor  # [n] bool: the row has reached its maximum length


def find_ends(rows: SamplingParamsTable, batch: SamplingBatch, tokens: Tensor) -> EndTokens:
    """Which rows end with these tokens. Before min_tokens no end token can have been sampled."""
    stop = (rows.end_ids.index_select(0, batch.rows) == tokens[:, None]).any(-1)
    full = batch.positions + 1 >= rows.max_length.index_select(0, batch.rows)
    return EndTokens(stop, full & ~stop)


def forbid_early_ends(logits: Tensor, subset: BatchSubset, rows: SamplingParamsTable) -> None:
    """While a row has generated fewer than min_tokens, its end tokens are forbidden, in place."""
    batch = subset.batch
    end_ids = rows.end_ids.index_select(0, batch.rows)
    generated = batch.positions - rows.num_prompt.index_select(0, batch.rows)
    too_early = generated < rows.min_tokens.index_select(0, batch.rows)
    forbid(logits, subset, end_ids.clamp(min=0), too_early[:, None] & (end_ids >= 0))
