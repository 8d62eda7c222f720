"""The sampler: logits in, tokens out, for all rows of a step at once.

The order of the stages:
    raw logits -> grammar masks -> logit bias (allowed ids, bias, one-token bad words) -> bad words -> min_tokens
    -> repetition, then frequency and presence penalties -> temperature -> min-p -> top-k -> top-p -> draw
Host-driven rows (beam search) return candidates instead. As in transformers' beam search, the stages up to the
penalties apply to log-probabilities, and the result is not normalised again.
A row's token depends on its own logits, parameters and tokens alone, bit for bit, never on its batch or row number.
Nothing here synchronises with the device.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IndexArray, IntArray, Row
from quire.core.step import Masks, RowStart
from quire.kernels.row_interface import (
    PADDING,
    DrawTokens,
    EndColumns,
    LogitShaping,
    RowKernels,
    Sampled,
    SamplingStage,
)
from quire.kernels.transfers import HostCopy, PinnedUpload, upload, upload_integers
from quire.sampling.filters import draw, drop_unlikely, keep_likeliest, token_weights, uniform, unrounded_weights
from quire.sampling.logit_processors import (
    MASK_BITS,
    BadWords,
    EndTokens,
    LogitBias,
    Penalties,
    apply_masks,
    count_tokens_reference,
    find_ends,
    forbid_early_ends,
    mask_places,
)
from quire.sampling.logprobs import LineScores, RowCandidates, RowScores, Scores, likeliest, token_logprobs_reference
from quire.sampling.row_params import (
    LOGIT_PROCESSORS,
    DraftedLines,
    SamplingBatch,
    SamplingFeature,
    SamplingParamsTable,
)

_STATEFUL = SamplingFeature.BAD_WORDS | SamplingFeature.PENALTIES  # features whose state depends on the tokens

# Logits per draw; each takes some 40 bytes of workspace. On the CPU what fits the cache is fastest
# (2**16 to 2**22 tried); elsewhere this bounds the memory to 640 MiB.
_DRAWN_AT_ONCE_CPU = 2**18
_DRAWN_AT_ONCE = 2**24

# Tokens per block of the two-pass argmax on the CPU, where argmax is not vectorized but amax is.
_BLOCK = 64


class Sampler:
    """The sampling state of all rows, and its use in each step."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        row_kernels: RowKernels | None = None,  # None: a chain of tensor operations
        draw_tokens: DrawTokens | None = None,  # for its end; None: tensor operations too
    ) -> None:
        self._max_rows = max_rows
        self._draw_tokens = draw_tokens
        self._row_kernels = row_kernels
        self._no_masks = torch.zeros(0, -(-vocab_size // MASK_BITS), dtype=torch.int32, device=device)
        self._no_drafts = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._masks = self._mask_lines(1)
        self._rows = SamplingParamsTable(max_rows, vocab_size, device)
        self._logit_bias = LogitBias(max_rows, vocab_size, device)
        self._bad_words = BadWords(max_rows, device)
        count_tokens = count_tokens_reference if row_kernels is None else row_kernels.count_tokens
        self._penalties = Penalties(max_rows, vocab_size, device, count_tokens)

    def assign(self, starts: Many[RowStart]) -> None:
        """Assign rows, each with every token its sequence has."""
        self._rows.assign(starts)
        for row_start in starts:
            features = self._rows.features[row_start.row]
            if features & SamplingFeature.LOGIT_BIAS:
                self._logit_bias.assign(row_start)
            if features & SamplingFeature.BAD_WORDS:
                self._bad_words.assign(row_start)
            if features & SamplingFeature.PENALTIES:
                self._penalties.assign(row_start)

    def release(self, row: Row) -> None:
        self._rows.release(row)
        self._logit_bias.release(row)
        self._bad_words.release(row)
        self._penalties.release(row)

    def clear(self) -> None:
        """Release every row, whatever state a lost step left."""
        for row in range(self._max_rows):
            self.release(Row(row))

    def append_tokens(self, row: Row, tokens: tuple[int, ...]) -> None:
        """Append tokens that the host chose to a host-driven row."""
        if not self._rows.features[row] & _STATEFUL:
            return
        place = upload(np.array([row], dtype=np.int64), self._rows.device)
        batch = SamplingBatch(place, np.array([row], dtype=np.int32), positions=place)  # positions are not read
        for token in tokens:
            self.commit(batch, upload(np.array([token], dtype=np.int64), self._rows.device))

    def sample(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        batch: SamplingBatch,
        masks: Masks | None = None,
    ) -> Sampled:
        """Sample a token for every row of the batch. `commit` adds the tokens to the rows' state."""
        if self._row_kernels is not None:
            if masks is not None or self._rows.union(batch.host_rows) & LOGIT_PROCESSORS:
                logits = self._process_logits_fused(logits, batch, masks)
            return self.sample_with_kernels(logits, batch.rows, batch.positions, self.stages(batch.host_rows))
        random = self._rows.subset(batch, SamplingFeature.RANDOM)
        if random is not None and random.whole and self._draw_tokens is not None:
            return self._draw_all(logits, batch, masks)
        processed, tokens, highest, finite = self._best(logits, batch, masks)
        if random is not None:
            drawn = self._draw(random.of(processed), random.of(highest), random.batch)
            tokens = random.put(tokens, drawn)
        return Sampled(torch.where(finite, tokens, 0), finite)

    def _draw_all(self, logits: Tensor, batch: SamplingBatch, masks: Masks | None) -> Sampled:
        """`sample` where every row is random: no row's likeliest token is needed, only its logit."""
        highest = logits.amax(-1)
        finite = torch.isfinite(highest)
        processed = self._process_logits(logits, batch, masks)
        if processed is not logits:
            highest = processed.amax(-1)
            finite &= torch.isfinite(highest)
        return Sampled(torch.where(finite, self._draw(processed, highest, batch), 0), finite)

    def features(self, rows: IntArray) -> SamplingFeature:
        """What these rows need beside the likeliest token."""
        return self._rows.union(rows)

    def needs_more(self, rows: IntArray) -> bool:
        """Whether any of these rows needs logit processors or logprobs, which captured sampling does not do."""
        return bool(self._rows.union(rows) & (LOGIT_PROCESSORS | SamplingFeature.LOGPROBS))

    def stages(self, rows: IntArray) -> SamplingStage:
        """The sampling stages that these rows need."""
        return SamplingStage.DRAWN if self._rows.union(rows) & SamplingFeature.RANDOM else SamplingStage.GREEDY

    def sample_with_kernels(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        rows: Tensor,  # [n] int64; -1 is padding
        positions: Tensor,  # [n] int64
        stages: SamplingStage,
    ) -> Sampled:
        """`sample` by one kernel, for rows without logit processors. Reads everything on the device (CUDA graphs)."""
        assert self._row_kernels is not None, "no kernel was given"
        return self._row_kernels.sample_tokens(logits, rows, positions, self._rows.table, stages)

    def process_drafted(
        self,
        logits: Tensor,  # [lines, vocab] float32; changed
        drafted: DraftedLines,
        tokens: Tensor,  # [lines] int64: inputs of the lines, each a draft but for the first of a row
        rows: Tensor,  # [lines] int64; -1 for rows that are not alive
        positions: Tensor,  # [lines] int64: the index that the token of each line will have
    ) -> None:
        """Apply bias, bad words, min_tokens and penalties to the lines of rows that need them, in place: to each as if
        the drafts before it had been sampled, since otherwise nothing reads what it gives."""
        needing = np.flatnonzero(self._rows.features[drafted.line_rows] & int(LOGIT_PROCESSORS))
        size = max(1, _DRAWN_AT_ONCE // logits.shape[1])
        for start in range(0, len(needing), size):
            at = needing[start : start + size]
            lines, numbers = upload_integers(logits.device, drafted.lines[at], drafted.numbers[at])
            back = torch.arange(int(drafted.numbers[at].max()), device=logits.device)
            drafts = tokens[(lines[:, None] - back).clamp(min=0)]
            drafts = torch.where(back < numbers[:, None], drafts, PADDING)
            batch = SamplingBatch(rows[lines], drafted.line_rows[at], positions[lines])
            logits.index_copy_(0, lines, self._process_logits_fused(logits[lines], batch, None, drafts))

    def commit_drafted(
        self,
        rows: IntArray,
        outcome: Tensor,  # [5, queries, rows] int64, as `VerifyRows`
    ) -> None:
        """`commit` for rows of which each has as many tokens as were accepted, which only the device knows."""
        emitted = (outcome[1] & outcome[2]).bool()
        if self._rows.union(rows) & SamplingFeature.PENALTIES:
            places = upload(self._penalties.slots.places(rows), outcome.device)
            self._penalties.count(outcome[0].reshape(-1), torch.where(emitted, places, PADDING).reshape(-1))
        at = np.flatnonzero(self._rows.features[rows] & int(SamplingFeature.BAD_WORDS))
        if len(at):
            places = upload(at, outcome.device)
            counts = emitted.sum(0).index_select(0, places)
            self._bad_words.commit_several(rows[at], outcome[0].index_select(1, places).T, counts)

    def scored_logits(self, logits: Tensor, drafted: DraftedLines) -> Tensor | None:
        """A copy of the raw logits of the rows that request logprobs; None if none does."""
        at = self._scored_lines(drafted)
        return logits[upload(drafted.lines[at], logits.device)] if len(at) else None

    def drafted_logprobs(self, logits: Tensor, drafted: DraftedLines, outcome: Tensor) -> LineScores:
        """Logprobs of the tokens of all lines of `scored_logits`."""
        at = self._scored_lines(drafted)
        numbers, places = upload_integers(outcome.device, drafted.numbers[at], drafted.places[at])
        counts = self._rows.host_num_logprobs[drafted.line_rows[at]]
        scores = self.logprobs_of(logits, outcome[0][numbers, places], int(counts.max()))
        return LineScores(drafted.line_rows[at], drafted.numbers[at], counts, scores)

    def _scored_lines(self, drafted: DraftedLines) -> IndexArray:
        return np.flatnonzero(self._rows.features[drafted.line_rows] & int(SamplingFeature.LOGPROBS))

    def mask(
        self,
        logits: Tensor,  # [lines, vocab] float32; changed
        rows: IntArray,
        lines: NDArray[np.int64],  # of each row in the logits
        masks: Masks,
    ) -> None:
        """Forbid in the logits of these rows what their masks do not allow: what `sample` does for rows that need no
        other logit processor. Masks of later passes are for the lines behind."""
        assert self._row_kernels is not None, "no kernel was given"
        count = len(masks.rows)
        if not count:
            return
        if count > len(self._masks):
            self._masks = self._mask_lines(max(count, min(2 * count, self._max_rows)))
        line_of = np.zeros(self._max_rows, dtype=np.int32)
        line_of[rows] = lines
        written = self._masks.lines[:count]
        written[:, 0] = line_of[masks.rows] + masks.numbers
        written[:, 1:] = masks.bits
        with self._masks.uploaded(count) as uploaded:
            self._row_kernels.mask_logits(logits, uploaded)

    def _mask_lines(self, count: int) -> PinnedUpload:
        return PinnedUpload((count, 1 + self._no_masks.shape[1]), torch.int32, self._no_masks.device)

    def dry_run(self, logits: Tensor) -> None:  # [1, vocab] float32
        """Launch the kernels that captured sampling does not use, on padding."""
        assert self._row_kernels is not None, "no kernel was given"
        self._row_kernels.token_logprobs(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), 1)
        padding = torch.full((3, 1), PADDING, device=logits.device)
        self._row_kernels.process_logits(logits, padding[0], padding[0], self._rows.table, self._shaping(padding, None))
        self._row_kernels.count_tokens(padding[0], padding[0], self._penalties.generated)
        self._row_kernels.mask_logits(logits, self._no_masks.new_zeros(1, 1 + self._no_masks.shape[1]))

    def candidates(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        batch: SamplingBatch,
    ) -> RowCandidates:
        """The most probable tokens of every row of the batch, as many as each row needs."""
        processed, _, _, finite = self._best(torch.log_softmax(logits, dim=-1), batch)
        return likeliest(processed, finite, batch.host_rows, self._rows.host_num_candidates[batch.host_rows])

    def weights(self, logits: Tensor, batch: SamplingBatch) -> Tensor:  # [n, vocab] int64
        """The unnormalised probabilities that `sample` draws from. For rows with a temperature."""
        processed = self._process_logits(logits, batch)
        return self._weigh(processed, _likeliest(processed).logits, batch)

    def commit(self, batch: SamplingBatch, tokens: Tensor) -> None:
        """Add sampled tokens to the penalties' counts and the bad words' tails."""
        if self._rows.union(batch.host_rows) & SamplingFeature.PENALTIES:
            self._penalties.commit(batch, tokens)
        with_bad_words = self._rows.subset(batch, SamplingFeature.BAD_WORDS)
        if with_bad_words is not None:
            self._bad_words.commit(with_bad_words, tokens)

    @property
    def end_columns(self) -> EndColumns:
        """For kernels that end rows. A new tensor once a row has more end tokens than the table is wide."""
        return self._rows.ends

    def ends(self, batch: SamplingBatch, tokens: Tensor) -> EndTokens:
        """Which rows end with these tokens."""
        return find_ends(self._rows, batch, tokens)

    def logprobs(self, logits: Tensor, batch: SamplingBatch, tokens: Tensor) -> RowScores | None:
        """Logprobs, from the raw logits, for the rows that request them; None if none does."""
        with_logprobs = self._rows.subset(batch, SamplingFeature.LOGPROBS)
        if with_logprobs is None:
            return None
        counts = self._rows.host_num_logprobs[with_logprobs.batch.host_rows]
        scores = self.logprobs_of(with_logprobs.of(logits), with_logprobs.of(tokens), int(counts.max()))
        return RowScores(with_logprobs.batch.host_rows, counts, scores)

    def logprobs_of(
        self,
        logits: Tensor,  # [m, vocab] float32
        tokens: Tensor,  # [m] int64
        num_top: int,
    ) -> Scores:
        """Logprobs of one token per row of logits, e.g. of prompt tokens under the logits of the position before."""
        compute = token_logprobs_reference if self._row_kernels is None else self._row_kernels.token_logprobs
        return Scores(HostCopy(compute(logits, tokens, num_top)), num_top)

    def _process_logits_fused(
        self, logits: Tensor, batch: SamplingBatch, masks: Masks | None, drafts: Tensor | None = None
    ) -> Tensor:
        """`_process_logits` in one kernel launch, plus one for bad words. Bad words come last: bias and penalties
        do not change what is forbidden, and min(NaN, x) is NaN, so masking bad words cannot hide a NaN."""
        assert self._row_kernels is not None, "no kernel was given"
        places = (
            mask_places(batch, masks),
            self._logit_bias.slots.places(batch.host_rows),
            self._penalties.slots.places(batch.host_rows),
        )
        shaping = self._shaping(upload(np.stack(places), logits.device), masks, drafts)
        processed = self._row_kernels.process_logits(logits, batch.rows, batch.positions, self._rows.table, shaping)
        with_bad_words = self._rows.subset(batch, SamplingFeature.BAD_WORDS)
        if with_bad_words is not None:
            self._bad_words.apply(processed, with_bad_words, None if drafts is None else with_bad_words.of(drafts))
        return processed

    def _shaping(self, places: Tensor, masks: Masks | None, drafts: Tensor | None = None) -> LogitShaping:
        drafts = self._no_drafts if drafts is None else drafts
        bits = self._no_masks if masks is None else upload(masks.bits, self._rows.device)
        counted = self._penalties.in_prompt, self._penalties.generated
        return LogitShaping(places, bits, self._logit_bias.table, *counted, self._rows.end_ids, drafts)

    def _best(self, logits: Tensor, batch: SamplingBatch, masks: Masks | None = None) -> "_Best":
        tokens, highest = _likeliest(logits)
        finite = torch.isfinite(highest)
        processed = self._process_logits(logits, batch, masks)
        if processed is not logits:
            tokens, highest = _likeliest(processed)
            finite &= torch.isfinite(highest)
        return _Best(processed, tokens, highest, finite)

    def _process_logits(self, logits: Tensor, batch: SamplingBatch, masks: Masks | None = None) -> Tensor:
        """Apply masks, bias, bad words, min_tokens and penalties; a copy if any applies."""
        if masks is None and not self._rows.union(batch.host_rows) & LOGIT_PROCESSORS:
            return logits
        processed = logits.clone()
        if masks is not None:
            apply_masks(processed, batch, masks)
        with_bias = self._rows.subset(batch, SamplingFeature.LOGIT_BIAS)
        if with_bias is not None:
            self._logit_bias.apply(processed, with_bias)
        with_bad_words = self._rows.subset(batch, SamplingFeature.BAD_WORDS)
        if with_bad_words is not None:
            self._bad_words.apply(processed, with_bad_words)
        with_min_tokens = self._rows.subset(batch, SamplingFeature.MIN_TOKENS)
        if with_min_tokens is not None:
            forbid_early_ends(processed, with_min_tokens, self._rows)
        with_penalties = self._rows.subset(batch, SamplingFeature.PENALTIES)
        if with_penalties is not None:
            self._penalties.apply(processed, with_penalties, self._rows)
        return processed

    def _draw(self, logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
        """Draw in slices of rows, to bound the workspace. Rows are independent, so slicing changes nothing."""
        at_once = _DRAWN_AT_ONCE_CPU if logits.device.type == "cpu" else _DRAWN_AT_ONCE
        size = max(1, at_once // logits.shape[1])
        drawn = [
            self._draw_slice(
                logits[start : start + size], highest[start : start + size], batch.slice(start, start + size)
            )
            for start in range(0, len(logits), size)
        ]
        return torch.cat(drawn)

    def _draw_slice(self, logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
        rows = self._rows
        if self._draw_tokens is not None:
            weights = unrounded_weights(logits, highest, rows.temperature.index_select(0, batch.rows))
            return self._draw_tokens(logits, weights, highest, batch.rows, batch.positions, rows.table)
        chance = uniform(rows.seed.index_select(0, batch.rows), rows.index.index_select(0, batch.rows), batch.positions)
        return draw(self._weigh(logits, highest, batch), chance)

    def _weigh(self, logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
        """Temperature, min-p, top-k, top-p."""
        rows = self._rows
        weights = token_weights(logits, highest, rows.temperature.index_select(0, batch.rows))
        if rows.union(batch.host_rows) & SamplingFeature.MIN_P:
            weights = drop_unlikely(weights, rows.min_p.index_select(0, batch.rows))
        with_cutoff = rows.subset(batch, SamplingFeature.TOP_K | SamplingFeature.TOP_P)
        if with_cutoff is not None:
            kept = keep_likeliest(
                with_cutoff.of(logits),
                with_cutoff.of(weights),
                rows.top_k.index_select(0, with_cutoff.batch.rows),
                rows.top_p.index_select(0, with_cutoff.batch.rows),
                int(rows.host_top_k[with_cutoff.batch.host_rows].max()),
            )
            weights = with_cutoff.put(weights, kept)
        return weights


class _Best(NamedTuple):
    """Processed logits, and the most probable token of each row."""

    processed: Tensor  # [n, vocab] float32
    tokens: Tensor  # [n] int64
    highest: Tensor  # [n] float32
    finite: Tensor  # [n] bool: no NaN, no +inf, and at least one allowed token


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
