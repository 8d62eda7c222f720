"""Chooses the next token of every row of a step: logits in, tokens out, all rows at once.

The order of the stages:
    raw logits -> masks of the step -> offsets (allowed ids, bias, one-token bad words) -> bad words -> min_tokens
    -> repetition, then frequency and presence penalties -> temperature -> min-p -> top-k -> top-p -> draw
Tethered rows give back their candidates instead. As in transformers' beam search the logits are made log-probabilities
first, the stages up to the penalties change those, and nothing is made to add up to one again.
A row's token depends on its own logits, parameters and tokens alone, bit for bit, not on its batch or its row
number. Nothing here waits for an accelerator.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.step import Masks, RowStart
from quire.kernels.row_interface import PADDING, EndColumns, LogitShaping, RowKernels, Sampled, SamplingStage
from quire.kernels.transfers import HostCopy, upload
from quire.sampling.filters import draw, drop_unlikely, keep_likeliest, token_weights, uniform
from quire.sampling.logit_processors import (
    MASK_BITS,
    BadWords,
    EndTokens,
    LogitBias,
    Penalties,
    apply_masks,
    find_ends,
    forbid_early_ends,
    mask_places,
    tally_plainly,
)
from quire.sampling.logprobs import RowCandidates, RowScores, Scores, likeliest, score_plainly
from quire.sampling.row_params import SHAPING, SamplingBatch, SamplingFeature, SamplingParamsTable

_REMEMBERING = SamplingFeature.BAD_WORDS | SamplingFeature.PENALTIES  # whose state depends on the tokens

# Logits drawn from at once; each takes some 40 bytes meanwhile. On the CPU what fits the cache is fastest
# (2**16 to 2**22 tried); elsewhere this bounds the memory to 640 MiB.
_DRAWN_AT_ONCE_CPU = 2**18
_DRAWN_AT_ONCE = 2**24

# Tokens compared at once in the first of two rounds on the CPU, where argmax is not vectorized but amax is.
_BLOCK = 64


class Sampler:
    """The sampling state of all rows, and what is done with it in each step."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        row_kernels: RowKernels | None = None,  # None: a chain of tensor operations
    ) -> None:
        self._max_rows = max_rows
        self._row_kernels = row_kernels
        self._no_masks = torch.zeros(0, -(-vocab_size // MASK_BITS), dtype=torch.int32, device=device)
        self._rows = SamplingParamsTable(max_rows, vocab_size, device)
        self._offsets = LogitBias(max_rows, vocab_size, device)
        self._bad_words = BadWords(max_rows, device)
        tally = tally_plainly if row_kernels is None else row_kernels.count_tokens
        self._penalties = Penalties(max_rows, vocab_size, device, tally)

    @property
    def num_bytes(self) -> int:
        """What rows that asked for vocabulary-wide state have made it hold; it never shrinks."""
        return self._offsets.num_bytes + self._bad_words.num_bytes + self._penalties.num_bytes

    def assign(self, starts: Many[RowStart]) -> None:
        """Sequences sit down, each with every token it knows."""
        self._rows.assign(starts)
        for row_start in starts:
            asks = self._rows.asks[row_start.row]
            if asks & SamplingFeature.OFFSETS:
                self._offsets.assign(row_start)
            if asks & SamplingFeature.BAD_WORDS:
                self._bad_words.assign(row_start)
            if asks & SamplingFeature.PENALTIES:
                self._penalties.assign(row_start)

    def release(self, row: Row) -> None:
        self._rows.release(row)
        self._offsets.release(row)
        self._bad_words.release(row)
        self._penalties.release(row)

    def clear(self) -> None:
        """Every row is empty, whatever a lost step had left half done."""
        for row in range(self._max_rows):
            self.release(Row(row))

    def append_tokens(self, row: Row, tokens: tuple[int, ...]) -> None:
        """A tethered row's tokens go on with these."""
        if not self._rows.asks[row] & _REMEMBERING:
            return
        place = upload(np.array([row], dtype=np.int64), self._rows.device)
        batch = SamplingBatch(place, np.array([row], dtype=np.int32), positions=place)  # nobody reads the positions
        for token in tokens:
            self.commit(batch, upload(np.array([token], dtype=np.int64), self._rows.device))

    def sample(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        batch: SamplingBatch,
        masks: Masks | None = None,
    ) -> Sampled:
        """Choose a token for every row of the batch. `commit` tells the rows' state of it."""
        if self._row_kernels is not None:
            if masks is not None or self._rows.union(batch) & SHAPING:
                logits = self._shape_at_once(logits, batch, masks)
            return self.choose(logits, batch.rows, batch.positions, self.stages(batch.host_rows))
        shaped, tokens, highest, finite = self._best(logits, batch, masks)
        random = self._rows.part(batch, SamplingFeature.RANDOM)
        if random is not None:
            drawn = self._draw(random.of(shaped), random.of(highest), random.batch)
            tokens = random.put(tokens, drawn)
        return Sampled(torch.where(finite, tokens, 0), finite)

    def asks_for_more(self, rows: IntArray) -> bool:
        """Whether any of these rows asks for something that `choose` does not do, or for scores."""
        return bool(self._rows.union_of(rows) & (SHAPING | SamplingFeature.LOGPROBS))

    def stages(self, rows: IntArray) -> SamplingStage:
        """What `choose` must do for these rows."""
        return SamplingStage.DRAWN if self._rows.union_of(rows) & SamplingFeature.RANDOM else SamplingStage.GREEDY

    def choose(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        rows: Tensor,  # [n] int64; -1 is padding
        positions: Tensor,  # [n] int64
        stages: SamplingStage,
    ) -> Sampled:
        """As `sample`, for rows that ask for nothing beyond these stages. Everything is read on the device."""
        assert self._row_kernels is not None, "no kernel was given"
        return self._row_kernels.sample_tokens(logits, rows, positions, self._rows.table, stages)

    def dry_run(self, logits: Tensor) -> None:  # [1, vocab] float32
        """Go through what rows may ask for beyond `choose`, for nobody."""
        assert self._row_kernels is not None, "no kernel was given"
        self._row_kernels.token_logprobs(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), 1)
        nobody = torch.full((3, 1), PADDING, device=logits.device)
        self._row_kernels.process_logits(logits, nobody[0], nobody[0], self._rows.table, self._shaping(nobody, None))
        self._row_kernels.count_tokens(nobody[0], nobody[0], self._penalties.generated)

    def candidates(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        batch: SamplingBatch,
    ) -> RowCandidates:
        """The likeliest tokens of every row of the batch, as many as it asks for."""
        shaped, _, _, finite = self._best(torch.log_softmax(logits, dim=-1), batch)
        return likeliest(shaped, finite, batch.host_rows, self._rows.host_num_candidates[batch.host_rows])

    def weights(self, logits: Tensor, batch: SamplingBatch) -> Tensor:  # [n, vocab] int64
        """What `sample` draws from: the chances of all tokens, in proportion. For rows with a temperature."""
        shaped = self._shape(logits, batch)
        return self._weigh(shaped, _likeliest(shaped).logits, batch)

    def commit(self, batch: SamplingBatch, tokens: Tensor) -> None:
        """The rows now know these tokens; those whose state depends on them take note."""
        if self._rows.union(batch) & SamplingFeature.PENALTIES:
            self._penalties.commit(batch, tokens)
        wary = self._rows.part(batch, SamplingFeature.BAD_WORDS)
        if wary is not None:
            self._bad_words.commit(wary, tokens)

    @property
    def end_columns(self) -> EndColumns:
        """For kernels that end rows. Another tensor once a row has more end tokens than any had before."""
        return self._rows.ends

    def ends(self, batch: SamplingBatch, tokens: Tensor) -> EndTokens:
        """Which rows end with these tokens."""
        return find_ends(self._rows, batch, tokens)

    def score(self, logits: Tensor, batch: SamplingBatch, tokens: Tensor) -> RowScores | None:
        """Log-probabilities, from the raw logits, for the rows that asked; None if none did."""
        asking = self._rows.part(batch, SamplingFeature.LOGPROBS)
        if asking is None:
            return None
        counts = self._rows.host_num_logprobs[asking.batch.host_rows]
        scores = self.score_given(asking.of(logits), asking.of(tokens), int(counts.max()))
        return RowScores(asking.batch.host_rows, counts, scores)

    def score_given(
        self,
        logits: Tensor,  # [m, vocab] float32
        tokens: Tensor,  # [m] int64
        num_top: int,
    ) -> Scores:
        """Of one token in each row of logits, e.g. prompt tokens under the logits of the position before."""
        score = score_plainly if self._row_kernels is None else self._row_kernels.token_logprobs
        return Scores(HostCopy(score(logits, tokens, num_top)), num_top)

    def _shape_at_once(self, logits: Tensor, batch: SamplingBatch, masks: Masks | None) -> Tensor:
        """As `_shape`, in one launch but for bad words, which come last: neither a bias nor a penalty changes what is
        forbidden, and they forbid no fault, as of NaN and anything the least is NaN."""
        assert self._row_kernels is not None, "no kernel was given"
        places = (
            mask_places(batch, masks),
            self._offsets.slots.places(batch.host_rows),
            self._penalties.slots.places(batch.host_rows),
        )
        shaping = self._shaping(upload(np.stack(places), logits.device), masks)
        shaped = self._row_kernels.process_logits(logits, batch.rows, batch.positions, self._rows.table, shaping)
        wary = self._rows.part(batch, SamplingFeature.BAD_WORDS)
        if wary is not None:
            self._bad_words.apply(shaped, wary)
        return shaped

    def _shaping(self, places: Tensor, masks: Masks | None) -> LogitShaping:
        bits = self._no_masks if masks is None else upload(masks.bits, self._rows.device)
        penalties = self._penalties
        ends = self._rows.end_ids
        return LogitShaping(places, bits, self._offsets.table, penalties.in_prompt, penalties.generated, ends)

    def _best(self, logits: Tensor, batch: SamplingBatch, masks: Masks | None = None) -> "_Best":
        tokens, highest = _likeliest(logits)
        finite = torch.isfinite(highest)
        shaped = self._shape(logits, batch, masks)
        if shaped is not logits:
            tokens, highest = _likeliest(shaped)
            finite &= torch.isfinite(highest)
        return _Best(shaped, tokens, highest, finite)

    def _shape(self, logits: Tensor, batch: SamplingBatch, masks: Masks | None = None) -> Tensor:
        """The logits after all that forbids, favours or penalizes single tokens; a copy if anything does."""
        if masks is None and not self._rows.union(batch) & SHAPING:
            return logits
        shaped = logits.clone()
        if masks is not None:
            apply_masks(shaped, batch, masks)
        offset = self._rows.part(batch, SamplingFeature.OFFSETS)
        if offset is not None:
            self._offsets.apply(shaped, offset)
        wary = self._rows.part(batch, SamplingFeature.BAD_WORDS)
        if wary is not None:
            self._bad_words.apply(shaped, wary)
        unending = self._rows.part(batch, SamplingFeature.MIN_TOKENS)
        if unending is not None:
            forbid_early_ends(shaped, unending, self._rows)
        penalized = self._rows.part(batch, SamplingFeature.PENALTIES)
        if penalized is not None:
            self._penalties.apply(shaped, penalized, self._rows)
        return shaped

    def _draw(self, logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
        """In pieces that bound the memory; rows do not see each other, so the pieces do not show."""
        at_once = _DRAWN_AT_ONCE_CPU if logits.device.type == "cpu" else _DRAWN_AT_ONCE
        size = max(1, at_once // logits.shape[1])
        drawn = [
            self._draw_piece(
                logits[start : start + size], highest[start : start + size], batch.piece(start, start + size)
            )
            for start in range(0, len(logits), size)
        ]
        return torch.cat(drawn)

    def _draw_piece(self, logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
        rows = self._rows
        chance = uniform(rows.seed.index_select(0, batch.rows), rows.index.index_select(0, batch.rows), batch.positions)
        return draw(self._weigh(logits, highest, batch), chance)

    def _weigh(self, logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
        """Temperature, min-p, top-k, top-p."""
        rows = self._rows
        weights = token_weights(logits, highest, rows.temperature.index_select(0, batch.rows))
        if rows.union(batch) & SamplingFeature.MIN_P:
            weights = drop_unlikely(weights, rows.min_p.index_select(0, batch.rows))
        choosy = rows.part(batch, SamplingFeature.TOP_K | SamplingFeature.TOP_P)
        if choosy is not None:
            kept = keep_likeliest(
                choosy.of(logits),
                choosy.of(weights),
                rows.top_k.index_select(0, choosy.batch.rows),
                rows.top_p.index_select(0, choosy.batch.rows),
                int(rows.host_top_k[choosy.batch.host_rows].max()),
            )
            weights = choosy.put(weights, kept)
        return weights


class _Best(NamedTuple):
    """The logits as a row's parameters shape them, and what is likeliest among them."""

    shaped: Tensor  # [n, vocab] float32
    tokens: Tensor  # [n] int64
    highest: Tensor  # [n] float32
    finite: Tensor  # [n] bool: no NaN, no +inf, and something left to choose


class _Likeliest(NamedTuple):
    tokens: Tensor  # [n] int64, the lowest id where several are likeliest
    logits: Tensor  # [n] float32; NaN if any of the row is


def _likeliest(logits: Tensor) -> _Likeliest:
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu" and vocab_size % _BLOCK == 0:
        blocks = logits.view(-1, vocab_size // _BLOCK, _BLOCK)
        best_block = blocks.amax(-1).argmax(-1, keepdim=True)
        inside = blocks.take_along_dim(best_block[:, :, None], dim=1)[:, 0].argmax(-1, keepdim=True)
        tokens = best_block * _BLOCK + inside
    else:
        tokens = logits.argmax(-1, keepdim=True)
    return _Likeliest(tokens[:, 0], logits.gather(-1, tokens)[:, 0])
