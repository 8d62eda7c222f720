"""Carries plans out with a model: move blocks, build the batch, run it, sample, advance the rows. One verb, `launch`.

Nothing between `launch` and `wait` waits for the device, so that steps can be in flight on one that runs behind.
"""

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.faults import Site, trip_any
from quire.core.ids import IntArray, Row
from quire.core.step import Chunk, Ended, FinishReason, Masks, Output, PromptLogprobs, StepLost, StepPlan, StepResult
from quire.kernels.choosing import PADDING, Choosing, Chosen, Stages
from quire.kernels.host_copies import Landing, upload, upload_integers
from quire.models.model import Model
from quire.runner.batch import Asking, PromptScoring, build_batch, chunk_arrays, cruising_batch, mixed_batch
from quire.runner.kv_store import KvStores
from quire.runner.pooling import PooledRows, Pools
from quire.runner.recorded import ChunkInputs, Pace, RecordedSteps, shape_of
from quire.runner.rows import RowTable
from quire.runner.shapes import Shape, shapes_to_record
from quire.sampling.candidates import RowCandidates
from quire.sampling.logprobs import RowScores, Scores
from quire.sampling.rows import RowBatch
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
        choosing: Choosing | None = None,  # with it, steps are recorded and replayed if they can be
        max_step_tokens: int = 0,  # that recorded steps may have beside those of rows that cruise
        on_demand: bool = False,  # record before a step what steps like it were without for too long
        recording: bool = True,  # False: the model's kernels wait for the device, which no recorded step may
    ) -> None:
        device = stores.device.device
        self.device = device
        self._model = model
        self._stores = stores
        self._rows = RowTable(max_rows, max_length, stores.block_size, device)
        self._sampler = Sampler(max_rows + 1, model.vocab_size, device, choosing)
        self._pools = Pools()
        self._finish = None if choosing is None else choosing.finish
        self._cruise = None if choosing is None else choosing.cruise
        self._on_demand = on_demand
        self.num_first = self.num_soon = 0  # shapes of steps that `prepare` records first, and soon after
        self._recorded: RecordedSteps | None = None
        self._telling: list[Shape] = []
        self._said: Said | None = None
        if choosing is not None and recording:
            wanted = shapes_to_record(max_rows, max_step_tokens)
            shapes = [*wanted.first, *wanted.soon, *wanted.later]
            self.num_first, self.num_soon = len(wanted.first), len(wanted.soon)
            self._telling = wanted.telling
            self._said = Said.by(max(shape.rows + shape.chunks for shape in shapes), model.vocab_size, device)
            self._recorded = RecordedSteps(self._forward, self._choose, shapes, self._rows.nobody, device)
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
    def rehearse(self) -> None:
        """Go through steps that between them launch what most others do. Nobody takes part. Between steps."""
        if self._recorded is None or self._said is None:
            return
        whole, self._model = self._model, self._model.abridged()
        try:
            self._recorded.rehearse(self._telling)
            self._sampler.rehearse(self._said.logits[:1])
        finally:
            self._model = whole

    def _record(self, shape: Shape | None) -> None:
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
    def pace(self) -> Pace | None:
        """How fast recorded steps are; None if too few are recorded. Between steps."""
        return None if self._recorded is None else self._recorded.pace()

    def launch(self, plan: StepPlan, masks: Masks | None = None) -> "RunningStep":
        try:
            return self._launch(plan, masks)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # what lies in pieces becomes whole again
            raise StepLost(f"no memory for a step of {plan.num_tokens} tokens: {error}", too_large=True) from error

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, masks: Masks | None) -> "RunningStep":
        self._stores.carry(plan.moves)
        self._follow(plan)
        cruising = self._rows.apply(plan)
        self._trip(Site.BUILD_BATCH)
        if not plan.num_padding:
            emission = self._replay(cruising, plan.chunks, masks)
            if emission is not None:
                return RunningStep(plan.step, emission)
        batch = build_batch(self._rows, plan, cruising)
        if len(batch.tokens) == 0:
            return RunningStep(plan.step)
        self._trip(Site.FORWARD)
        hidden = self._model.forward(batch.tokens, batch.ragged, self._stores.device, batch.wanted)
        if self._recorded is not None:
            self._recorded.built(Shape(len(cruising), len(plan.chunks), len(batch.tokens) - len(cruising)))
        return RunningStep(
            plan.step,
            self._sample(batch.sampling, hidden, masks) if len(batch.sampling.at) else None,
            self._find_candidates(batch.tethered, hidden) if batch.tethered is not None else None,
            tuple((part, self._score(part, hidden)) for part in batch.scoring),
            self._pools.add(batch.pooling, hidden),
        )

    def _replay(self, cruising: IntArray, chunks: tuple[Chunk, ...], masks: Masks | None) -> "Emission | None":
        """The step as it was recorded; None if it was not, or if a chunk must give back more than a token."""
        if self._recorded is None:
            return None
        arrays = chunk_arrays(self._rows, chunks) if chunks else None
        if chunks and arrays is None:
            return None
        if self._on_demand:
            wanted = self._recorded.worth_recording(shape_of(cruising, arrays))
            if wanted is not None or self._recorded.forgot:
                self._record(wanted)
        self._trip(Site.FORWARD)
        shape = self._recorded.forward(cruising, arrays)
        if shape is None:
            return None
        self.num_replayed += 1
        rows = np.concatenate([cruising, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
        if masks is None and not self._sampler.asks_for_more(rows):
            outcome = self._choose_as_recorded(shape, rows, len(cruising))
            if outcome is not None:
                return Emission(rows, Landing(outcome), None)
        return self._choose_at_length(shape, rows, len(cruising), chunks, masks)

    def _choose_as_recorded(self, shape: Shape, rows: IntArray, num_cruising: int) -> Tensor | None:
        """[5, rows] int64; None if it is not recorded."""
        assert self._recorded is not None
        if self._ends is not self._sampler.end_columns.end_ids:  # the table became wider: records read the old
            self._ends = self._sampler.end_columns.end_ids
            self._recorded.forget_choices()
        for site in (Site.LOGITS_PROCESSORS, Site.PENALTIES, Site.SAMPLE, Site.LOGPROBS):
            self._trip(site)
        num_chunks = len(rows) - num_cruising
        return self._recorded.choose(shape, num_cruising, num_chunks, self._sampler.stages(rows))

    def _choose_at_length(
        self, shape: Shape, rows: IntArray, num_cruising: int, chunks: tuple[Chunk, ...], masks: Masks | None
    ) -> "Emission":
        """Of what a replayed model said, for those of the rows that get a token."""
        assert self._said is not None
        speak = np.ones(len(rows), dtype=np.bool_)
        speak[num_cruising:] = [Output.SAMPLE in chunk.output for chunk in chunks]
        places = np.arange(len(rows))
        places[num_cruising:] += shape.rows - num_cruising
        at, device_rows = upload_integers(self.device, places[speak], rows[speak])
        batch = RowBatch(device_rows, rows[speak], self._said.positions[at])
        return self._choose_from(self._said.logits[at], batch, masks)

    def _forward(self, rows: Tensor, chunks: ChunkInputs | None) -> Tensor:
        """What is recorded of the model: what it says after these rows and chunks, whoever they are."""
        assert self._said is not None and self._cruise is not None
        if chunks is None:
            batch, wanted = cruising_batch(self._rows, rows, self._cruise), None
        else:
            batch = mixed_batch(self._rows, rows, chunks, self._cruise)
            wanted = batch.last_tokens
        hidden = self._model.forward(batch.tokens, batch.ragged, self._stores.device, wanted)
        said = self._said.first(len(batch.speaking))
        said.speaking.copy_(batch.speaking)
        said.positions.copy_(batch.ragged.context_lengths)  # where the next one will be, of all who speak
        return self._model.logits(hidden, out=said.logits)

    def _choose(self, count: int, stages: Stages) -> Tensor:
        """What is recorded of choosing, for so many. [5, count] int64."""
        assert self._finish is not None and self._said is not None
        logits, speaking, positions = self._said.first(count)
        chosen = self._sampler.choose(logits, speaking, positions, stages)
        return self._finish(chosen, speaking, positions, self._sampler.end_columns, self._rows.state)

    def _trip(self, site: Site) -> None:
        trip_any(site, (seat.sequence for seat in self._rows.seats.values()))

    def _follow(self, plan: StepPlan) -> None:
        """What is sampled and summed by row follows the same differences as the row table."""
        if plan.reset:
            self._sampler.clear()
            self._pools.clear()
        for row in plan.leaves:
            self._sampler.leave(row)
            self._pools.leave(row)
        self._sampler.seat(plan.seats)
        for tell in plan.tells:
            self._sampler.tell(tell.row, tell.tokens)

    def _sample(
        self,
        asking: Asking,
        hidden: Tensor,  # [tokens, hidden]
        masks: Masks | None,
    ) -> "Emission":
        return self._choose_from(self._model.logits(hidden[asking.at]), asking.batch, masks)

    def _choose_from(
        self,
        logits: Tensor,  # [n, vocab] float32
        batch: RowBatch,
        masks: Masks | None,
    ) -> "Emission":
        for site in (Site.LOGITS_PROCESSORS, Site.PENALTIES, Site.SAMPLE):  # one call does all three
            self._trip(site)
        chosen = self._sampler.sample(logits, batch, masks)
        self._trip(Site.LOGPROBS)
        scores = self._sampler.score(logits, batch, chosen.tokens)
        self._sampler.commit(batch, chosen.tokens)
        return Emission(batch.host_rows, Landing(self._advance(batch, chosen)), scores)

    def _advance(self, batch: RowBatch, chosen: Chosen) -> Tensor:
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
        asking: Asking,
        hidden: Tensor,  # [tokens, hidden]
    ) -> RowCandidates:
        found = self._sampler.candidates(self._model.logits(hidden[asking.at]), asking.batch)
        self._rows.end(asking.batch.rows, ~found.finite)
        return found

    def _score(self, part: PromptScoring, hidden: Tensor) -> list[Scores]:
        """Scores of prompt tokens, a few positions at a time: logits of a whole prompt would be vast."""
        num_top = self._rows.seats[part.chunk.row].sampling.num_prompt_logprobs or 0
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


class Said(NamedTuple):
    """Where a recorded model leaves what it says, for whoever chooses tokens from it. It stays in place."""

    logits: Tensor  # [most, vocab] float32
    speaking: Tensor  # [most] int64: the row that gets a token, or PADDING
    positions: Tensor  # [most] int64: where in its sequence the token will be

    @staticmethod
    def by(most: int, vocab_size: int, device: torch.device) -> "Said":
        return Said(
            logits=torch.zeros(most, vocab_size, dtype=torch.float32, device=device),
            speaking=torch.full((most,), PADDING, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
        )

    def first(self, count: int) -> "Said":
        return Said(*(each[:count] for each in self))


@dataclass(frozen=True, slots=True)
class Emission:
    """The tokens that rows were given, on their way to the host."""

    rows: IntArray
    outcome: Landing  # [5, n] int64: token, alive, finite, stop, length
    scores: RowScores | None

    def wait(self, step: int) -> StepResult:
        tokens, alive, finite, stop, length = self.outcome.wait()
        emitted = (alive & finite).astype(np.bool_)
        over = np.flatnonzero(alive & (stop | length | (1 - finite)))
        ended = tuple(Ended(Row(int(self.rows[i])), _reason(finite[i], stop[i])) for i in over)
        logprobs = {} if self.scores is None else self.scores.wait()
        if not emitted.all():
            spoke = set(self.rows[emitted].tolist())
            logprobs = {row: top for row, top in logprobs.items() if row in spoke}
        return StepResult(step, self.rows[emitted], tokens[emitted].astype(np.int32), ended, logprobs)


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A launched step; its outcome is on the device until somebody waits for it."""

    step: int
    emission: Emission | None = None
    candidates: RowCandidates | None = None
    prompt_scores: tuple[tuple[PromptScoring, list[Scores]], ...] = ()
    pooled: PooledRows | None = None

    def wait(self) -> StepResult:
        result = StepResult(self.step) if self.emission is None else self.emission.wait(self.step)
        if self.candidates is not None:
            found = self.candidates.wait()
            failed = tuple(Ended(row, FinishReason.ERROR) for row, best in found.items() if best is None)
            likeliest = {row: best for row, best in found.items() if best is not None}
            result = replace(result, ended=result.ended + failed, candidates=likeliest)
        if self.prompt_scores:
            scores = tuple(_collect(part, pieces) for part, pieces in self.prompt_scores)
            result = replace(result, prompt_logprobs=scores)
        if self.pooled is not None:
            sums = self.pooled.wait()
            over = tuple(Ended(row, _reason(total is not None, stop=True)) for row, total in sums.items())
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
