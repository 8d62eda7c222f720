"""Carries plans out with a model: move blocks, build the batch, run it, sample, advance the rows. One verb, `launch`.

Nothing between `launch` and `wait` waits for the device, so that steps can be in flight on one that runs behind.

One small step before the first request, so that compiling and packing are paid for before anybody waits.
"""

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.fault_injection import FaultSite, trip_any
from quire.core.ids import NULL_BLOCK, IntArray, Row
from quire.core.step import (
    Chunk,
    ChunkOutput,
    FinishedRow,
    FinishReason,
    Masks,
    PromptLogprobs,
    StepLost,
    StepPlan,
    StepResult,
)
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import PADDING, RowKernels, Sampled, SamplingStage
from quire.kernels.transfers import HostCopy, upload, upload_integers
from quire.models.interface import Model
from quire.runner.batch import (
    LogitsNeeded,
    PooledRows,
    Pools,
    PromptScoring,
    build_batch,
    chunk_arrays,
    decode_batch,
    mixed_batch,
)
from quire.runner.cuda_graphs import ChunkInputs, GraphedSteps, StepTimes, shape_of
from quire.runner.graph_shapes import StepSize, shapes_to_record
from quire.runner.kv_store import KvStores
from quire.runner.row_table import RowTable
from quire.sampling.logprobs import RowCandidates, RowScores, Scores
from quire.sampling.row_params import SamplingBatch
from quire.sampling.sampler import Sampler

_log = logging.getLogger(__name__)

# Prompt positions whose logits exist at the same time: 256 x a vocabulary of 150,000 are 154 MB.
_SCORED_AT_ONCE = 256


class ModelRunner:
    """A model, its KV stores and its rows on one device."""

    def __init__(
        self,
        model: Model,
        stores: KvStores,
        *,
        max_rows: int,
        max_length: int,
        row_kernels: RowKernels | None = None,  # with it, steps are recorded and replayed if they can be
        max_step_tokens: int = 0,  # that recorded steps may have beside those of rows that cruise
        on_demand: bool = False,  # record before a step what steps like it were without for too long
        recording: bool = True,  # False: the model's kernels wait for the device, which no recorded step may
    ) -> None:
        device = stores.device.device
        self.device = device
        self._model = model
        self._stores = stores
        self._rows = RowTable(max_rows, max_length, stores.block_size, device)
        self._sampler = Sampler(max_rows + 1, model.vocab_size, device, row_kernels)
        self._pools = Pools()
        self._finish = None if row_kernels is None else row_kernels.finish_rows
        self._decode_inputs = None if row_kernels is None else row_kernels.decode_inputs
        self._on_demand = on_demand
        self.num_first = self.num_soon = 0  # shapes of steps that `prepare` records first, and soon after
        self._recorded: GraphedSteps | None = None
        self._telling: list[StepSize] = []
        self._said: LogitsBuffer | None = None
        if row_kernels is not None and recording:
            wanted = shapes_to_record(max_rows, max_step_tokens)
            shapes = [*wanted.first, *wanted.soon, *wanted.later]
            self.num_first, self.num_soon = len(wanted.first), len(wanted.soon)
            self._telling = wanted.telling
            self._said = LogitsBuffer.by(max(shape.rows + shape.chunks for shape in shapes), model.vocab_size, device)
            self._recorded = GraphedSteps(self._forward, self._choose, shapes, self._rows.nobody, device)
        self._ends = self._sampler.end_columns.end_ids
        self.num_replayed = 0  # steps that were not built but replayed

    @property
    def prepared(self) -> bool:
        return self._recorded is None or self._recorded.complete

    @torch.inference_mode()
    def prepare(self) -> None:
        """Between steps, if there is time: record one more shape of steps. Without memory for it no more are."""
        if self._recorded is not None:
            self._record(self._recorded.next_missing)

    @torch.inference_mode()
    def dry_run(self) -> None:
        """Go through steps that between them launch what most others do. Nobody takes part. Between steps."""
        if self._recorded is None or self._said is None:
            return
        whole, self._model = self._model, self._model.truncated()
        try:
            self._recorded.dry_run(self._telling)
            self._sampler.dry_run(self._said.logits[:1])
        finally:
            self._model = whole

    def _record(self, shape: StepSize | None) -> None:
        """Between steps: this one, and what became missing of others."""
        assert self._recorded is not None and self._said is not None
        self._said.speaking.fill_(PADDING)  # what is recorded is done as well: nobody's tokens are chosen a second time
        try:
            self._recorded.record(shape)
        except RuntimeError as error:  # torch.OutOfMemoryError, or what an interrupted capture makes of it
            _log.warning("no more steps are recorded: %s", error)
            self._recorded.give_up()
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def pace(self) -> StepTimes | None:
        """How fast recorded steps are; None if too few are recorded. Between steps."""
        return None if self._recorded is None else self._recorded.pace()

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> "PendingStep":
        try:
            return self._launch(plan, masks)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # what lies in pieces becomes whole again
            raise StepLost(f"no memory for a step of {plan.num_tokens} tokens: {error}", too_large=True) from error

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, masks: Masks | None) -> "PendingStep":
        self._stores.carry(plan.moves)
        self._follow(plan)
        decoding = self._rows.apply(plan)
        self._trip(FaultSite.BUILD_BATCH)
        if not plan.num_padding:
            emission = self._replay(decoding, plan.chunks, masks)
            if emission is not None:
                return PendingStep(plan.step, emission)
        batch = build_batch(self._rows, plan, decoding)
        if len(batch.tokens) == 0:
            return PendingStep(plan.step)
        self._trip(FaultSite.FORWARD)
        hidden = self._model.forward(batch.tokens, batch.layout, self._stores.device, batch.wanted)
        if self._recorded is not None:
            self._recorded.built(StepSize(len(decoding), len(plan.chunks), len(batch.tokens) - len(decoding)))
        return PendingStep(
            plan.step,
            self._sample(batch.sampling, hidden, masks) if len(batch.sampling.at) else None,
            self._find_candidates(batch.host_driven, hidden) if batch.host_driven is not None else None,
            tuple((part, self._score(part, hidden)) for part in batch.scoring),
            self._pools.add(batch.pooling, hidden),
        )

    def _replay(self, decoding: IntArray, chunks: tuple[Chunk, ...], masks: Masks | None) -> "SampledTokens | None":
        """The step as it was recorded; None if it was not, or if a chunk must give back more than a token."""
        if self._recorded is None:
            return None
        arrays = chunk_arrays(self._rows, chunks) if chunks else None
        if chunks and arrays is None:
            return None
        if self._on_demand:
            wanted = self._recorded.worth_recording(shape_of(decoding, arrays))
            if wanted is not None or self._recorded.forgot:
                self._record(wanted)
        self._trip(FaultSite.FORWARD)
        shape = self._recorded.forward(decoding, arrays)
        if shape is None:
            return None
        self.num_replayed += 1
        rows = np.concatenate([decoding, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
        if masks is None and not self._sampler.asks_for_more(rows):
            outcome = self._choose_as_recorded(shape, rows, len(decoding))
            if outcome is not None:
                return SampledTokens(rows, HostCopy(outcome), None)
        return self._choose_at_length(shape, rows, len(decoding), chunks, masks)

    def _choose_as_recorded(self, shape: StepSize, rows: IntArray, num_decoding: int) -> Tensor | None:
        """[5, rows] int64; None if it is not recorded."""
        assert self._recorded is not None
        if self._ends is not self._sampler.end_columns.end_ids:  # the table became wider: records read the old
            self._ends = self._sampler.end_columns.end_ids
            self._recorded.forget_choices()
        for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE, FaultSite.LOGPROBS):
            self._trip(site)
        num_chunks = len(rows) - num_decoding
        return self._recorded.choose(shape, num_decoding, num_chunks, self._sampler.stages(rows))

    def _choose_at_length(
        self, shape: StepSize, rows: IntArray, num_decoding: int, chunks: tuple[Chunk, ...], masks: Masks | None
    ) -> "SampledTokens":
        """Of what a replayed model said, for those of the rows that get a token."""
        assert self._said is not None
        speak = np.ones(len(rows), dtype=np.bool_)
        speak[num_decoding:] = [ChunkOutput.SAMPLE in chunk.output for chunk in chunks]
        places = np.arange(len(rows))
        places[num_decoding:] += shape.rows - num_decoding
        at, device_rows = upload_integers(self.device, places[speak], rows[speak])
        batch = SamplingBatch(device_rows, rows[speak], self._said.positions[at])
        return self._choose_from(self._said.logits[at], batch, masks)

    def _forward(self, rows: Tensor, chunks: ChunkInputs | None) -> Tensor:
        """What is recorded of the model: what it says after these rows and chunks, whoever they are."""
        assert self._said is not None and self._decode_inputs is not None
        if chunks is None:
            batch, wanted = decode_batch(self._rows, rows, self._decode_inputs), None
        else:
            batch = mixed_batch(self._rows, rows, chunks, self._decode_inputs)
            wanted = batch.last_tokens
        hidden = self._model.forward(batch.tokens, batch.layout, self._stores.device, wanted)
        said = self._said.first(len(batch.speaking))
        said.speaking.copy_(batch.speaking)
        said.positions.copy_(batch.layout.context_lengths)  # where the next one will be, of all who speak
        return self._model.logits(hidden, out=said.logits)

    def _choose(self, count: int, stages: SamplingStage) -> Tensor:
        """What is recorded of choosing, for so many. [5, count] int64."""
        assert self._finish is not None and self._said is not None
        logits, speaking, positions = self._said.first(count)
        chosen = self._sampler.choose(logits, speaking, positions, stages)
        return self._finish(chosen, speaking, positions, self._sampler.end_columns, self._rows.state)

    def _trip(self, site: FaultSite) -> None:
        trip_any(site, (row_start.sequence for row_start in self._rows.starts.values()))

    def _follow(self, plan: StepPlan) -> None:
        """What is sampled and summed by row follows the same differences as the row table."""
        if plan.reset:
            self._sampler.clear()
            self._pools.clear()
        for row in plan.leaves:
            self._sampler.leave(row)
            self._pools.leave(row)
        self._sampler.assign(plan.starts)
        for tell in plan.tells:
            self._sampler.tell(tell.row, tell.tokens)

    def _sample(
        self,
        asking: LogitsNeeded,
        hidden: Tensor,  # [tokens, hidden]
        masks: Masks | None,
    ) -> "SampledTokens":
        return self._choose_from(self._model.logits(hidden[asking.at]), asking.batch, masks)

    def _choose_from(
        self,
        logits: Tensor,  # [n, vocab] float32
        batch: SamplingBatch,
        masks: Masks | None,
    ) -> "SampledTokens":
        for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE):  # one call does all three
            self._trip(site)
        chosen = self._sampler.sample(logits, batch, masks)
        self._trip(FaultSite.LOGPROBS)
        scores = self._sampler.score(logits, batch, chosen.tokens)
        self._sampler.commit(batch, chosen.tokens)
        return SampledTokens(batch.host_rows, HostCopy(self._advance(batch, chosen)), scores)

    def _advance(self, batch: SamplingBatch, chosen: Sampled) -> Tensor:
        """The rows take their tokens; what became of each, [5, n] int64: token, alive, finite, stop, length."""
        if self._finish is not None:
            return self._finish(chosen, batch.rows, batch.positions, self._sampler.end_columns, self._rows.state)
        ends = self._sampler.ends(batch, chosen.tokens)
        alive = self._rows.alive[batch.rows]
        over = ends.stop | ends.length | ~chosen.finite
        self._rows.advance(batch.rows, chosen.tokens, alive & chosen.finite, over)
        found = (chosen.tokens, alive, chosen.finite, ends.stop, ends.length)
        return torch.stack([each.long() for each in found])

    def _find_candidates(
        self,
        asking: LogitsNeeded,
        hidden: Tensor,  # [tokens, hidden]
    ) -> RowCandidates:
        found = self._sampler.candidates(self._model.logits(hidden[asking.at]), asking.batch)
        self._rows.end(asking.batch.rows, ~found.finite)
        return found

    def _score(self, part: PromptScoring, hidden: Tensor) -> list[Scores]:
        """Scores of prompt tokens, a few positions at a time: logits of a whole prompt would be vast."""
        num_top = self._rows.starts[part.chunk.row].sampling.num_prompt_logprobs or 0
        targets = upload(part.targets, hidden.device).long()
        states = hidden[part.first : part.first + len(targets)]
        return [
            self._sampler.score_given(
                self._model.logits(states[start : start + _SCORED_AT_ONCE]),
                targets[start : start + _SCORED_AT_ONCE],
                num_top,
            )
            for start in range(0, len(targets), _SCORED_AT_ONCE)
        ]


class LogitsBuffer(NamedTuple):
    """Where a recorded model leaves what it says, for whoever chooses tokens from it. It stays in place."""

    logits: Tensor  # [most, vocab] float32
    speaking: Tensor  # [most] int64: the row that gets a token, or PADDING
    positions: Tensor  # [most] int64: where in its sequence the token will be

    @staticmethod
    def by(most: int, vocab_size: int, device: torch.device) -> "LogitsBuffer":
        return LogitsBuffer(
            logits=torch.zeros(most, vocab_size, dtype=torch.float32, device=device),
            speaking=torch.full((most,), PADDING, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
        )

    def first(self, count: int) -> "LogitsBuffer":
        return LogitsBuffer(*(each[:count] for each in self))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that rows were given, on their way to the host."""

    rows: IntArray
    outcome: HostCopy  # [5, n] int64: token, alive, finite, stop, length
    scores: RowScores | None

    def wait(self, step: int) -> StepResult:
        tokens, alive, finite, stop, length = self.outcome.wait()
        emitted = (alive & finite).astype(np.bool_)
        over = np.flatnonzero(alive & (stop | length | (1 - finite)))
        ended = tuple(FinishedRow(Row(int(self.rows[i])), _reason(finite[i], stop[i])) for i in over)
        logprobs = {} if self.scores is None else self.scores.wait()
        if not emitted.all():
            has_first_token = set(self.rows[emitted].tolist())
            logprobs = {row: top for row, top in logprobs.items() if row in has_first_token}
        return StepResult(step, self.rows[emitted], tokens[emitted].astype(np.int32), ended, logprobs)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step; its outcome is on the device until somebody waits for it."""

    step: int
    emission: SampledTokens | None = None
    candidates: RowCandidates | None = None
    prompt_scores: tuple[tuple[PromptScoring, list[Scores]], ...] = ()
    pooled: PooledRows | None = None

    def wait(self) -> StepResult:
        result = StepResult(self.step) if self.emission is None else self.emission.wait(self.step)
        if self.candidates is not None:
            found = self.candidates.wait()
            failed = tuple(FinishedRow(row, FinishReason.ERROR) for row, best in found.items() if best is None)
            likeliest = {row: best for row, best in found.items() if best is not None}
            result = replace(result, ended=result.ended + failed, candidates=likeliest)
        if self.prompt_scores:
            scores = tuple(_collect(part, pieces) for part, pieces in self.prompt_scores)
            result = replace(result, prompt_logprobs=scores)
        if self.pooled is not None:
            sums = self.pooled.wait()
            over = tuple(FinishedRow(row, _reason(total is not None, stop=True)) for row, total in sums.items())
            whole = {row: total for row, total in sums.items() if total is not None}
            result = replace(result, ended=result.ended + over, pooled=whole)
        return result


def _reason(finite: int, stop: int) -> FinishReason:
    if not finite:
        return FinishReason.ERROR
    return FinishReason.STOP if stop else FinishReason.LENGTH


def _collect(part: PromptScoring, pieces: list[Scores]) -> PromptLogprobs:
    scores = [score for piece in pieces for score in piece.wait([piece.num_top] * len(piece.packed))]
    return PromptLogprobs(part.chunk.row, part.chunk.start + 1, tuple(scores))


@torch.inference_mode()
def warm_up(model: Model, stores: KvStores) -> None:
    """A chunk of two tokens and a decode, in the null block, which nobody reads."""
    kv = stores.device
    device = kv.device
    positions = torch.tensor([0, 1, 0], device=device) % stores.block_size
    layout = StepLayout(
        positions=positions,
        slots=positions + NULL_BLOCK * stores.block_size,
        tables=torch.full((2, 2), NULL_BLOCK, dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 2, 3], dtype=torch.int32, device=device),
        context_lengths=torch.tensor([2, 1], dtype=torch.int32, device=device),
        max_lengths=torch.tensor([2, 2, 1], device=device),
    )
    hidden = model.forward(torch.zeros(3, dtype=torch.int64, device=device), layout, kv)
    model.logits(hidden[1:])
