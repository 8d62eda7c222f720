"""Executes step plans with a model: moves KV blocks, builds the batch, runs it, samples, advances the rows.

One method, `launch`. Nothing between `launch` and `wait` synchronises with the device, so steps can be in flight
(run-ahead). A step replays a CUDA graph where one holds it, and is launched eagerly otherwise.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.fault_injection import FaultSite, any_armed, trip_any
from quire.core.ids import IntArray, Row
from quire.core.step import (
    Chunk,
    ChunkOutput,
    Drafts,
    Masks,
    StepPlan,
    StepResult,
)
from quire.kernels.row_interface import PADDING, DrawTokens, GreedyStep, RowKernels, Sampled, SamplingStage
from quire.kernels.transfers import HostCopy, upload, upload_integers
from quire.models.interface import Model
from quire.runner.batch import (
    LogitsNeeded,
    Pools,
    PromptScoring,
    build_batch,
    chunk_arrays,
    decode_batch,
    mixed_batch,
)
from quire.runner.cuda_graphs import ChunkInputs, GraphedSteps, Least, StepTimes, shape_of
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import (
    DeviceDrafting,
    DraftConfig,
    MaskedDrafts,
    VerifiedRows,
    counts_of,
    drafts_with_masks,
)
from quire.runner.draft_features import DraftFeatures
from quire.runner.draft_model import DraftModel, DraftModelConfig
from quire.runner.drafters import Drafted, Drafter, Drafting
from quire.runner.graph_shapes import LaunchCounts, StepSize, shapes_to_capture, verifying_shapes
from quire.runner.kv_store import KvStores
from quire.runner.pending_step import Choose, ComputedStep, PendingStep, PendingTokens, Sampling, lost_without_memory
from quire.runner.row_table import RowTable
from quire.runner.verification import SampledTokens, draft_lines, sample_passes
from quire.sampling.logprobs import RowCandidates, RowScores, Scores
from quire.sampling.row_params import DraftedLines, SamplingBatch
from quire.sampling.sampler import Sampler

_log = logging.getLogger(__name__)

# Prompt positions whose logits exist at the same time: 256 x a vocabulary of 150,000 are 154 MB.
_LOGPROBS_AT_ONCE = 256


class ModelRunner:
    """A model, its KV stores and its rows on one device."""

    def __init__(
        self,
        model: Model,
        stores: KvStores,
        *,
        max_rows: int,
        max_length: int,
        row_kernels: RowKernels | None = None,  # with them, steps run as CUDA graphs where possible
        draw_tokens: DrawTokens | None = None,
        max_step_tokens: int = 0,  # prompt tokens of a captured step, beside its decoding rows
        # Of the time, at most, in which captures between steps may pause steps. 0: capture only when told to.
        capture_share: float = 0.0,
        kept_bytes: int = 0,  # of device memory that captures leave free, for eager steps
        capture_graphs: bool = True,  # False: a kernel of the model synchronises, which no CUDA graph may
        drafters: Sequence[Drafter] = (),  # on a CPU only: they read the tokens of the step before
        device_drafts: DraftConfig | None = None,  # drafts on the device, in captured steps only
        draft_model: DraftModelConfig | None = None,  # on a CPU only
        least: Least | None = None,  # with several ranks: a missing shape is captured by all, as rank 0 decides
    ) -> None:
        self.device = device = stores.device.device
        on_host = device.type == "cpu" and row_kernels is None  # there rows may draft what their grammars force
        assert on_host or not (drafters or draft_model), "drafts are proposed on the host"
        self._model = model
        self._stores = stores
        self._rows = RowTable(max_rows, max_length, stores.block_size, device)
        self._sampler = Sampler(max_rows + 1, model.vocab_size, device, row_kernels, draw_tokens)
        host_model = None if draft_model is None else DraftModel(draft_model, self._rows, self._sampler)
        self._draft_model: DraftModel | DeviceDraftModel | None = host_model
        self._drafting = Drafting(max_rows, drafters, host_model) if on_host else None
        self._pools = Pools()
        self._finish = None if row_kernels is None else row_kernels.finish_rows
        self._decode_inputs = None if row_kernels is None else row_kernels.decode_inputs
        self._on_demand = capture_share > 0
        self._has_ranks = least is not None
        self._wanted: StepSize | None = None  # a missing shape, to be captured by all ranks
        self.num_first = 0  # shapes that `prepare` captures first
        self._graphs: GraphedSteps | None = None
        self._representative: list[StepSize] = []
        self._logits: LogitsBuffer | None = None
        self._device_drafting: DeviceDrafting | None = None
        if row_kernels is not None and capture_graphs:
            chosen = shapes_to_capture(max_rows, max_step_tokens)
            verifying = [] if device_drafts is None else verifying_shapes(max_rows)
            shapes = [*chosen.first, *verifying, *chosen.later]
            self.num_first = len(chosen.first) + len(verifying)
            self._representative = [*chosen.representative, *verifying]
            num_lines = max(shape.rows + shape.chunks + shape.drafts for shape in shapes)
            self._logits = LogitsBuffer.allocate(num_lines, model.vocab_size, device)
            self._graphs = self._graphed(shapes, capture_share, kept_bytes, least)
            if device_drafts is not None:
                self._device_drafting = drafting = DeviceDrafting(self._rows, max_length, device_drafts, num_lines)
                if device_drafts.model is not None:
                    facts = (device_drafts.model, self._sampler, row_kernels, self._graphs.capturer)
                    self._draft_model = drafting.add_model(*facts)
        self._ends = self._sampler.end_columns.end_ids
        self._greedy_step: GreedyStep | None = None  # the step before, if it was one
        self.launches = LaunchCounts() if self._graphs is None else self._graphs.counts

    def _graphed(
        self, shapes: list[StepSize], capture_share: float, kept_bytes: int, least: Least | None
    ) -> GraphedSteps:
        return GraphedSteps(
            self._forward,
            self._sample_captured,
            shapes,
            self._rows.padding_row,
            self.device,
            capture_share=capture_share,
            kept_bytes=kept_bytes,
            verify=self._forward_drafts,
            least=least,
        )

    @property
    def model(self) -> Model:
        """What it runs; for measurements."""
        return self._model

    @property
    def num_replayed(self) -> int:
        """Steps that ran as a CUDA graph."""
        return self.launches.replayed

    @property
    def prepared(self) -> bool:
        return self._graphs is None or self._graphs.complete

    def prepare(self) -> None:
        """Capture one more shape. Call between steps. Capturing ends when memory runs out."""
        self.capture(self.next_missing)

    @property
    def next_missing(self) -> StepSize | None:
        return None if self._graphs is None else self._graphs.next_missing

    def take_wanted(self) -> StepSize | None:
        """With several ranks, the shape whose absence has cost as much as its capture will; None: none, or taken."""
        wanted, self._wanted = self._wanted, None
        return wanted

    @torch.inference_mode()
    def capture(self, shape: StepSize | None) -> None:
        """Capture this missing shape, and missing sampling graphs. Call between steps."""
        if self._graphs is not None:
            self._capture(shape)

    @torch.inference_mode()
    def dry_run(self) -> None:
        """Run steps of padding that together launch the kernels of most others. Call between steps."""
        if self._graphs is None or self._logits is None:
            return
        whole, self._model = self._model, self._model.truncated()
        try:
            self._graphs.dry_run(self._representative)
            self._sampler.dry_run(self._logits.logits[:1])
            if isinstance(self._draft_model, DeviceDraftModel):
                self._draft_model.dry_run({shape.rows for shape in self._representative if shape.drafts})
        finally:
            self._model = whole

    def _capture(self, shape: StepSize | None) -> None:
        """Capture this shape, and missing sampling graphs. Call between steps."""
        assert self._graphs is not None and self._logits is not None
        self._logits.emitting.fill_(PADDING)  # a capture may run: no row may be sampled a second time
        try:
            self._graphs.capture(shape)
            if shape is not None and shape.drafts and isinstance(self._draft_model, DeviceDraftModel):
                self._graphs.count(partial(self._draft_model.capture, shape.rows))
        except RuntimeError as error:  # torch.OutOfMemoryError, or what an interrupted capture makes of it
            _log.warning("no more CUDA graphs are captured: %s", error)
            self._graphs.stop_capturing()
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step_times(self) -> StepTimes | None:
        """Times of captured steps; None if too few are captured. Call between steps."""
        return None if self._graphs is None else self._graphs.step_times()

    @torch.inference_mode()
    def draft_times(self) -> StepTimes | None:
        """Times of captured passes of a draft model; None: it has none. Call between steps."""
        model = self._draft_model
        return model.pass_times(self.device) if isinstance(model, DeviceDraftModel) else None

    def launch(self, plan: StepPlan) -> PendingStep | ComputedStep:
        again = self._repeat(plan)
        if again is not None:
            return again
        slow_s = self.launches.slow_s
        with lost_without_memory(plan.num_tokens):
            pending = self._launch(plan)
        self.launches.note_step(plan.step, slow_s)
        return pending

    def note_imported(self, blocks: IntArray) -> None:
        """Another engine's keys and values are in these blocks now. Call between steps."""
        if self._draft_model is not None:
            self._draft_model.forget(blocks)

    def _repeat(self, plan: StepPlan) -> PendingStep | ComputedStep | None:
        """The step before once more, if that was greedy and nothing changed: without a tensor operation."""
        if self._greedy_step is None or any_armed():
            return None
        rows = self._rows.repeat(plan)
        if rows is None:
            return None
        if self._draft_model is not None:
            self._draft_model.apply(plan)
        slots = None if self._features is None else self._features.decode_slots(rows, self._rows.columns)
        tokens = self._greedy_step()
        if slots is not None:
            self._note_features(slots)
        if tokens is None:
            return PendingStep(plan.step, self._sampled(rows, self._greedy_step.outcome, None))
        if self._drafting is not None:
            self._drafting.append(rows, tokens)
        return ComputedStep(StepResult(plan.step, rows, tokens))

    @property
    def _features(self) -> DraftFeatures | None:
        return None if self._draft_model is None else self._draft_model.features

    @torch.inference_mode()
    def _note_features(self, slots: NDArray[np.int64] | None) -> None:
        """The model has computed the tokens of these slots: an EAGLE head reads its states of them."""
        if self._features is not None and slots is not None:
            self._features.note(slots)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        self._greedy_step = None
        self._stores.carry(plan.moves)
        if self._draft_model is not None:
            self._draft_model.carry(plan.moves)
        self._follow(plan)
        decoding = self._rows.apply(plan)
        if self._draft_model is not None:
            self._draft_model.apply(plan)
        self._trip(FaultSite.BUILD_BATCH)
        if not plan.num_padding:
            sampled = self._verify(plan, decoding) or self._replay(plan, decoding)
            if sampled is not None:
                return PendingStep(plan.step, sampled, drafts=plan.drafts)
        drafted = self._propose(plan) if len(plan.drafts) else None
        sampled = self._decode_rows(plan, decoding, drafted)
        if sampled is not None:
            return PendingStep(plan.step, sampled, drafts=plan.drafts)
        begun_s = time.perf_counter()
        if drafted is not None:
            decoding = np.concatenate([decoding[~np.isin(decoding, drafted.rows)], drafted.rows])
        batch = build_batch(self._rows, plan, decoding, drafted)
        if len(batch.tokens) == 0:
            return PendingStep(plan.step)
        self._trip(FaultSite.FORWARD)
        hidden = self._model.forward(batch.tokens, batch.layout, self._stores.device, batch.needed)
        self._note_features(None if self._features is None else batch.layout.slots.numpy())
        if self.device.type != "cpu" or self._graphs is not None:
            self._note_eager(
                StepSize(len(decoding), len(plan.chunks), len(batch.tokens) - len(decoding)),
                time.perf_counter() - begun_s,
            )
        sampling, sampled = batch.sampling, None
        if len(sampling.at):
            at = sampling.at if batch.further is None else torch.cat([sampling.at, batch.further])
            logits = self._model.logits(hidden[at])
            sampled = self._choose(plan, self._sampling(plan, logits, sampling.batch, drafted), drafted)
        return PendingStep(
            plan.step,
            sampled,
            self._find_candidates(batch.host_driven, hidden) if batch.host_driven is not None else None,
            tuple((part, self._score(part, hidden)) for part in batch.scoring),
            self._pools.add(batch.pooling, hidden),
            plan.drafts,
            None if sampled is not None or self.device.type == "cpu" else torch.cuda.current_stream().record_event(),
        )

    def _propose(self, plan: StepPlan) -> Drafted | None:
        """Drafts for rows that have not ended."""
        if self._drafting is None:
            return None
        rows, counts = plan.drafts.rows, plan.drafts.counts
        alive = self._rows.alive[torch.from_numpy(rows).long()].numpy()
        return self._drafting.propose(Drafts(rows[alive], counts[alive]), plan.forced)

    def _sampling(self, plan: StepPlan, logits: Tensor, batch: SamplingBatch, drafted: Drafted | None) -> Choose:
        """How to sample these rows. logits: of the rows, then after their drafts."""
        if drafted is None:
            return partial(self._sample, logits, batch)
        return partial(sample_passes, logits, batch, drafted, self._sample, plan.masked)

    def _note_eager(self, step: StepSize, seconds: float) -> None:
        """Not on a CPU, which computes while it is launched."""
        self.launches.eager += 1
        self.launches.eager_s += seconds
        if self._graphs is not None:
            self._graphs.note_eager(step)

    def _choose(self, plan: StepPlan, choose: Choose, drafted: Drafted | MaskedDrafts | None = None) -> Sampling:
        """Sample now, or when the masks come, which is before the next forward pass."""
        if not plan.masked:
            return choose(None)
        if isinstance(drafted, MaskedDrafts):
            return PendingTokens(choose, plan.num_tokens, drafted.wait)
        known = {} if drafted is None else drafted.of_rows(plan.masked)
        return PendingTokens(choose, plan.num_tokens, lambda: known)

    def _decode_rows(self, plan: StepPlan, decoding: IntArray, drafted: Drafted | None) -> Sampling | None:
        """The step by a model that reads the row table itself, if rows only decode; None: it must be built."""
        decoder = self._model.row_decoder
        if decoder is None or plan.chunks or plan.num_padding or not len(decoding):
            return None
        self._trip(FaultSite.FORWARD)
        rows, ends, kv = self._rows, self._sampler.end_columns, self._stores.device
        lines, columns = (decoding, rows.columns) if drafted is None else draft_lines(rows, decoding, drafted)
        slots = None if self._features is None else self._features.decode_slots(lines, columns)
        if drafted is None and not plan.masked and not self._sampler.features(decoding):
            for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE):
                self._trip(site)
            self._greedy_step = decoder.greedy_step(decoding, rows.columns, ends, kv)
            self._greedy_step()
            self._note_features(slots)
            self._trip(FaultSite.LOGPROBS)
            return self._sampled(decoding, self._greedy_step.outcome, None)
        logits = decoder.decode_logits(lines, columns, ends, kv)
        self._note_features(slots)
        device_rows = upload(decoding.astype(np.int64), self.device)
        batch = SamplingBatch(device_rows, decoding, rows.lengths[device_rows])
        return self._choose(plan, self._sampling(plan, logits, batch, drafted), drafted)

    def _sampled(self, rows: IntArray, outcome: Tensor | NDArray[np.int64], scores: RowScores | None) -> SampledTokens:
        """The tokens that these rows got. outcome: [5, rows] int64."""
        copied = HostCopy(outcome)
        if self._drafting is not None:
            self._drafting.append(rows, copied.wait())
        return SampledTokens(rows, copied, scores)

    def _replay(self, plan: StepPlan, decoding: IntArray) -> Sampling | None:
        """Run the step as a CUDA graph; None if no graph holds it, or if a chunk returns more than a token."""
        if self._graphs is None:
            return None
        chunks = plan.chunks
        arrays = chunk_arrays(self._rows, chunks) if chunks else None
        if chunks and arrays is None:
            return None
        if self._on_demand:
            missing = self._graphs.worth_capturing(shape_of(decoding, arrays))
            if self._has_ranks:
                self._wanted, missing = missing, None
            if missing is not None or self._graphs.lacks_sampling:
                self._capture(missing)
        self._trip(FaultSite.FORWARD)
        shape = self._graphs.forward(decoding, arrays)
        if shape is None:
            return None
        rows = np.concatenate([decoding, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
        return self._choose(plan, partial(self._sample_replayed, shape, rows, len(decoding), chunks))

    def _verify(self, plan: StepPlan, decoding: IntArray) -> Sampling | None:
        """Run a step with drafts as a CUDA graph; None: without them, since no graph holds it."""
        if self._device_drafting is None or self._graphs is None:
            return None
        if not len(plan.drafts) or plan.chunks:
            return None
        self._trip(FaultSite.FORWARD)
        drafted = self._device_drafting.choose(plan)
        if drafted is None:
            return None
        lines = DraftedLines.of(decoding, counts_of(decoding, drafted))
        made = self._device_drafting.make(drafted, plan.masked, plan.forced)
        shape = self._graphs.verify(decoding, lines.counts)
        if shape is None:
            return None
        return self._choose(plan, partial(self._sample_verified, shape, lines, drafted, plan.masked), made)

    def _sample_verified(
        self, shape: StepSize, lines: DraftedLines, drafted: Drafted, masked: tuple[Row, ...], masks: Masks | None
    ) -> VerifiedRows:
        """Sample all lines of a step with drafts. Around the graph: what only some rows need, of their lines."""
        assert self._logits is not None and self._device_drafting is not None
        sampler, rows, needs_more = self._sampler, lines.rows, self._sampler.needs_more(lines.rows)
        logits, emitting, positions = self._logits.first(shape.size)
        raw = sampler.scored_logits(logits, lines) if needs_more else None
        if masks is not None:
            sampler.mask(logits, rows, lines.starts, masks)
        if needs_more:
            sampler.process_drafted(logits, lines, self._device_drafting.tokens(shape.size), emitting, positions)
        if masks is not None:
            self._device_drafting.reject(lines.without(masks, masked))
            drafted = drafts_with_masks(drafted, masks, masked)
        outcome = self._sample_from_graph(shape, rows, len(rows))
        if outcome is None:  # not captured yet
            outcome = self._sample_captured(shape, sampler.stages(rows))[:, :, : len(rows)]
        scores = None if raw is None else sampler.drafted_logprobs(raw, lines, outcome)
        if needs_more:
            sampler.commit_drafted(rows, outcome)
        return VerifiedRows(rows, HostCopy(outcome), drafted, scores)

    def _sample_replayed(
        self, shape: StepSize, rows: IntArray, num_decoding: int, chunks: tuple[Chunk, ...], masks: Masks | None
    ) -> SampledTokens:
        """Sample after a replayed model, by a graph where one does all that these rows need."""
        assert self._logits is not None
        if not self._sampler.needs_more(rows):
            if masks is not None:
                places = np.arange(len(rows))
                places[num_decoding:] += shape.rows - num_decoding
                self._sampler.mask(self._logits.logits, rows, places, masks)
                masks = None
            outcome = self._sample_from_graph(shape, rows, num_decoding)
            if outcome is not None:
                return SampledTokens(rows, HostCopy(outcome), None)
        return self._sample_from_buffer(shape, rows, num_decoding, chunks, masks)

    def _sample_from_graph(self, shape: StepSize, rows: IntArray, num_decoding: int) -> Tensor | None:
        """[5, rows] int64; None if that sampling graph is not captured."""
        assert self._graphs is not None
        if self._ends is not self._sampler.end_columns.end_ids:  # the table grew: graphs read the old one
            self._ends = self._sampler.end_columns.end_ids
            self._graphs.drop_sampling_graphs()
        for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE, FaultSite.LOGPROBS):
            self._trip(site)
        num_chunks = len(rows) - num_decoding
        return self._graphs.sample(shape, num_decoding, num_chunks, self._sampler.stages(rows))

    def _sample_from_buffer(
        self, shape: StepSize, rows: IntArray, num_decoding: int, chunks: tuple[Chunk, ...], masks: Masks | None
    ) -> SampledTokens:
        """Sample outside the graph, from the logits that a replayed model left, for the rows that get a token."""
        assert self._logits is not None
        emits = np.ones(len(rows), dtype=np.bool_)
        emits[num_decoding:] = [ChunkOutput.SAMPLE in chunk.output for chunk in chunks]
        places = np.arange(len(rows))
        places[num_decoding:] += shape.rows - num_decoding
        return self._sample_lines(rows[emits], places[emits], masks)

    def _sample_lines(self, rows: IntArray, lines: NDArray[np.int64], masks: Masks | None) -> SampledTokens:
        """Sample these rows from lines of the buffer."""
        assert self._logits is not None
        at, device_rows = upload_integers(self.device, lines, rows)
        return self._sample(
            self._logits.logits[at], SamplingBatch(device_rows, rows, self._logits.positions[at]), masks
        )

    def _forward(self, rows: Tensor, chunks: ChunkInputs | None) -> Tensor:
        """The captured model part: logits after these rows and chunks, into the buffer."""
        assert self._logits is not None and self._decode_inputs is not None
        if chunks is None:
            batch, needed = decode_batch(self._rows, rows, self._decode_inputs), None
        else:
            batch = mixed_batch(self._rows, rows, chunks, self._decode_inputs)
            needed = batch.last_tokens
        hidden = self._model.forward(batch.tokens, batch.layout, self._stores.device, needed)
        buffer = self._logits.first(len(batch.emitting))
        buffer.emitting.copy_(batch.emitting)
        buffer.positions.copy_(batch.layout.context_lengths)  # the position of each next token
        return self._model.logits(hidden, out=buffer.logits)

    def plant_acceptance(self, chance: float) -> None:
        """For measurements: accept any draft with this probability (`build(planted_drafts=True)`)."""
        assert self._device_drafting is not None
        self._device_drafting.plant_acceptance(chance)

    def _forward_drafts(self, rows: Tensor, starts: Tensor, shape: StepSize) -> Tensor:
        """The captured model part of a step with drafts."""
        assert self._logits is not None and self._device_drafting is not None
        inputs, layout = self._device_drafting.inputs(rows, starts, shape.size, shape.queries)
        hidden = self._model.forward(inputs.tokens, layout, self._stores.device)
        buffer = self._logits.first(shape.size)
        buffer.emitting.copy_(inputs.sampled_rows)
        torch.add(inputs.positions, 1, out=buffer.positions)
        return self._model.logits(hidden, out=buffer.logits)

    def _sample_captured(self, shape: StepSize, stages: SamplingStage) -> Tensor:
        """The captured sampling part. [5, rows] int64; [5, queries, rows] with drafts."""
        assert self._finish is not None and self._logits is not None and self._graphs is not None
        logits, emitting, positions = self._logits.first(shape.size)
        chosen = self._sampler.sample_with_kernels(logits, emitting, positions, stages)
        if shape.drafts:
            assert self._device_drafting is not None
            rows, starts = self._graphs.row_inputs(shape)
            ends = self._sampler.end_columns
            return self._device_drafting.finish(chosen, rows, starts, positions, ends, shape.queries)
        return self._finish(chosen, emitting, positions, self._sampler.end_columns, self._rows.state)

    def _trip(self, site: FaultSite) -> None:
        trip_any(site, (row_start.sequence for row_start in self._rows.starts.values()))

    def _follow(self, plan: StepPlan) -> None:
        """Apply the plan's row changes to the sampler and the pooled sums."""
        if plan.reset:
            self._sampler.clear()
            self._pools.clear()
        for row in plan.releases:
            self._sampler.release(row)
            self._pools.release(row)
        self._sampler.assign(plan.starts)
        if self._drafting is not None:
            self._drafting.follow(plan.releases, plan.starts)
        if self._device_drafting is not None:
            self._device_drafting.start(plan.starts)
        for append in plan.appends:
            self._sampler.append_tokens(append.row, append.tokens)

    def _sample(
        self,
        logits: Tensor,  # [n, vocab] float32
        batch: SamplingBatch,
        masks: Masks | None,
    ) -> SampledTokens:
        for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE):  # one call does all three
            self._trip(site)
        chosen = self._sampler.sample(logits, batch, masks)
        self._trip(FaultSite.LOGPROBS)
        scores = self._sampler.logprobs(logits, batch, chosen.tokens)
        self._sampler.commit(batch, chosen.tokens)
        return self._sampled(batch.host_rows, self._advance(batch, chosen), scores)

    def _advance(self, batch: SamplingBatch, chosen: Sampled) -> Tensor:
        """Append each row's token. Returns [5, n] int64: token, alive, finite, stop, length."""
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
        needed: LogitsNeeded,
        hidden: Tensor,  # [tokens, hidden]
    ) -> RowCandidates:
        found = self._sampler.candidates(self._model.logits(hidden[needed.at]), needed.batch)
        self._rows.end(needed.batch.rows, ~found.finite)
        return found

    def _score(self, part: PromptScoring, hidden: Tensor) -> list[Scores]:
        """Logprobs of prompt tokens, a few positions at a time: the logits of a whole prompt would not fit."""
        num_top = self._rows.starts[part.chunk.row].sampling.num_prompt_logprobs or 0
        targets = upload(part.targets, hidden.device).long()
        states = hidden[part.first : part.first + len(targets)]
        return [
            self._sampler.logprobs_of(
                self._model.logits(states[start : start + _LOGPROBS_AT_ONCE]),
                targets[start : start + _LOGPROBS_AT_ONCE],
                num_top,
            )
            for start in range(0, len(targets), _LOGPROBS_AT_ONCE)
        ]


class LogitsBuffer(NamedTuple):
    """Where a captured model leaves its logits for sampling. The tensors stay in place."""

    logits: Tensor  # [most, vocab] float32
    emitting: Tensor  # [most] int64: the row that gets a token, or PADDING
    positions: Tensor  # [most] int64: the position of the token in its sequence

    @staticmethod
    def allocate(most: int, vocab_size: int, device: torch.device) -> "LogitsBuffer":
        return LogitsBuffer(
            logits=torch.zeros(most, vocab_size, dtype=torch.float32, device=device),
            emitting=torch.full((most,), PADDING, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
        )

    def first(self, count: int) -> "LogitsBuffer":
        return LogitsBuffer(*(each[:count] for each in self))
