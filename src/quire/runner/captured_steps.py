"""Steps of a model as CUDA graphs: what is captured, and which part of a plan a replay computes.

The model part of a step leaves its logits in a buffer, which sampling reads: in a second graph where one does all that
the rows need, and outside it otherwise. Steps with drafts are verified in one graph. A step that no graph holds is left
to the caller.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.fault_injection import FaultSite
from quire.core.ids import IntArray, Row
from quire.core.step import Chunk, ChunkOutput, Masks, RowStart, StepPlan
from quire.kernels.row_interface import PADDING, RowKernels, SamplingStage
from quire.kernels.transfers import HostCopy, upload_integers
from quire.models.interface import Model
from quire.runner.batch import chunk_arrays, decode_batch, mixed_batch
from quire.runner.cuda_graphs import ChunkInputs, GraphedSteps, Least, shape_of
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import DeviceDrafting, DraftConfig, VerifiedRows, counts_of, drafts_with_masks
from quire.runner.drafters import Drafted
from quire.runner.graph_shapes import StepSize, shapes_to_capture, verifying_shapes
from quire.runner.kv_store import KvStores
from quire.runner.pending_step import Sampling, sampling_of
from quire.runner.row_table import RowTable
from quire.runner.verification import SampledTokens
from quire.sampling.row_params import DraftedLines, SamplingBatch
from quire.sampling.sampler import Sampler

_log = logging.getLogger(__name__)

SampleEagerly = Callable[[Tensor, SamplingBatch, Masks | None], SampledTokens]  # logits: [n, vocab] float32


class CaptureLimits(NamedTuple):
    """What captures may hold and take."""

    max_rows: int
    max_length: int
    max_step_tokens: int  # prompt tokens of a captured step, beside its decoding rows
    share: float  # of the time, at most, in which captures may pause steps. 0: capture only when told to
    kept_bytes: int  # of device memory that captures leave free, for eager steps


class CapturedSteps:
    """The graphs of one model over its KV stores and rows."""

    def __init__(
        self,
        model: Model,
        stores: KvStores,
        rows: RowTable,
        sampler: Sampler,
        row_kernels: RowKernels,
        limits: CaptureLimits,
        sample: SampleEagerly,
        drafts: DraftConfig | None,  # drafts on the device
        least: Least | None,  # with several ranks: a missing shape is captured by all, as rank 0 decides
    ) -> None:
        self.model = model
        self._stores, self._rows, self._sampler, self._sample = stores, rows, sampler, sample
        self._finish, self._decode_inputs = row_kernels.finish_rows, row_kernels.decode_inputs
        self._on_demand, self._has_ranks = limits.share > 0, least is not None
        self._wanted: StepSize | None = None  # a missing shape, to be captured by all ranks
        chosen = shapes_to_capture(limits.max_rows, limits.max_step_tokens)
        verifying = [] if drafts is None else verifying_shapes(limits.max_rows)
        shapes = [*chosen.first, *verifying, *chosen.later]
        self.num_first = len(chosen.first) + len(verifying)  # shapes that are captured first
        self.representative = [*chosen.representative, *verifying]
        num_lines = max(shape.rows + shape.chunks + shape.drafts for shape in shapes)
        self._logits = LogitsBuffer.allocate(num_lines, model.vocab_size, rows.device)
        self._graphs = GraphedSteps(
            self._forward,
            self._sample_captured,
            shapes,
            rows.padding_row,
            rows.device,
            capture_share=limits.share,
            kept_bytes=limits.kept_bytes,
            verify=self._forward_drafts,
            least=least,
        )
        self._drafting: DeviceDrafting | None = None
        self.draft_model: DeviceDraftModel | None = None
        if drafts is not None:
            self._drafting = DeviceDrafting(rows, limits.max_length, drafts, num_lines)
            if drafts.model is not None:
                facts = (drafts.model, sampler, row_kernels, self._graphs.capturer)
                self.draft_model = self._drafting.add_model(*facts)
        self._ends = sampler.end_columns.end_ids

    @property
    def graphs(self) -> GraphedSteps:
        return self._graphs

    def take_wanted(self) -> StepSize | None:
        """With several ranks, the shape whose absence has cost as much as its capture will; None: none, or taken."""
        wanted, self._wanted = self._wanted, None
        return wanted

    def start(self, starts: tuple[RowStart, ...]) -> None:
        """Rows start with their known tokens."""
        if self._drafting is not None:
            self._drafting.start(starts)

    def dry_run(self) -> None:
        """Run steps of padding that together launch the kernels of most others. Call between steps."""
        whole, self.model = self.model, self.model.truncated()
        try:
            self._graphs.dry_run(self.representative)
            self._sampler.dry_run(self._logits.logits[:1])
            if self.draft_model is not None:
                self.draft_model.dry_run({shape.rows for shape in self.representative if shape.drafts})
        finally:
            self.model = whole

    def capture(self, shape: StepSize | None) -> None:
        """Capture this shape, and missing sampling graphs. Call between steps."""
        self._logits.emitting.fill_(PADDING)  # a capture may run: no row may be sampled a second time
        try:
            self._graphs.capture(shape)
            if shape is not None and shape.drafts and self.draft_model is not None:
                self._graphs.count(partial(self.draft_model.capture, shape.rows))
        except RuntimeError as error:  # torch.OutOfMemoryError, or what an interrupted capture makes of it
            _log.warning("no more CUDA graphs are captured: %s", error)
            self._graphs.stop_capturing()
            torch.cuda.empty_cache()

    def replay(self, plan: StepPlan, decoding: IntArray) -> Sampling | None:
        """Run the step as a CUDA graph; None if no graph holds it, or if a chunk returns more than a token."""
        chunks = plan.chunks
        arrays = chunk_arrays(self._rows, chunks) if chunks else None
        if chunks and arrays is None:
            return None
        if self._on_demand:
            missing = self._graphs.worth_capturing(shape_of(decoding, arrays))
            if self._has_ranks:
                self._wanted, missing = missing, None
            if missing is not None or self._graphs.lacks_sampling:
                self.capture(missing)
        self._rows.trip(FaultSite.FORWARD)
        shape = self._graphs.forward(decoding, arrays)
        if shape is None:
            return None
        rows = np.concatenate([decoding, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
        return sampling_of(plan, partial(self._sample_replayed, shape, rows, len(decoding), chunks))

    def verify(self, plan: StepPlan, decoding: IntArray) -> Sampling | None:
        """Run a step with drafts as a CUDA graph; None: without them, since no graph holds it."""
        if self._drafting is None or not len(plan.drafts) or plan.chunks:
            return None
        self._rows.trip(FaultSite.FORWARD)
        drafted = self._drafting.choose(plan)
        if drafted is None:
            return None
        lines = DraftedLines.of(decoding, counts_of(decoding, drafted))
        made = self._drafting.make(drafted, plan.masked, plan.forced)
        shape = self._graphs.verify(decoding, lines.counts)
        if shape is None:
            return None
        return sampling_of(plan, partial(self._sample_verified, shape, lines, drafted, plan.masked), made)

    def _sample_verified(
        self, shape: StepSize, lines: DraftedLines, drafted: Drafted, masked: tuple[Row, ...], masks: Masks | None
    ) -> VerifiedRows:
        """Sample all lines of a step with drafts. Around the graph: what only some rows need, of their lines."""
        assert self._drafting is not None
        sampler, rows, needs_more = self._sampler, lines.rows, self._sampler.needs_more(lines.rows)
        logits, emitting, positions = self._logits.first(shape.size)
        raw = sampler.scored_logits(logits, lines) if needs_more else None
        if masks is not None:
            sampler.mask(logits, rows, lines.starts, masks)
        if needs_more:
            sampler.process_drafted(logits, lines, self._drafting.tokens(shape.size), emitting, positions)
        if masks is not None:
            self._drafting.reject(lines.without(masks, masked))
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
        if self._ends is not self._sampler.end_columns.end_ids:  # the table grew: graphs read the old one
            self._ends = self._sampler.end_columns.end_ids
            self._graphs.drop_sampling_graphs()
        for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE, FaultSite.LOGPROBS):
            self._rows.trip(site)
        num_chunks = len(rows) - num_decoding
        return self._graphs.sample(shape, num_decoding, num_chunks, self._sampler.stages(rows))

    def _sample_from_buffer(
        self, shape: StepSize, rows: IntArray, num_decoding: int, chunks: tuple[Chunk, ...], masks: Masks | None
    ) -> SampledTokens:
        """Sample outside the graph, from the logits that a replayed model left, for the rows that get a token."""
        emits = np.ones(len(rows), dtype=np.bool_)
        emits[num_decoding:] = [ChunkOutput.SAMPLE in chunk.output for chunk in chunks]
        places = np.arange(len(rows))
        places[num_decoding:] += shape.rows - num_decoding
        return self._sample_lines(rows[emits], places[emits], masks)

    def _sample_lines(self, rows: IntArray, lines: NDArray[np.int64], masks: Masks | None) -> SampledTokens:
        """Sample these rows from lines of the buffer."""
        at, device_rows = upload_integers(self._rows.device, lines, rows)
        return self._sample(
            self._logits.logits[at], SamplingBatch(device_rows, rows, self._logits.positions[at]), masks
        )

    def _forward(self, rows: Tensor, chunks: ChunkInputs | None) -> Tensor:
        """The captured model part: logits after these rows and chunks, into the buffer."""
        if chunks is None:
            batch, needed = decode_batch(self._rows, rows, self._decode_inputs), None
        else:
            batch = mixed_batch(self._rows, rows, chunks, self._decode_inputs)
            needed = batch.last_tokens
        hidden = self.model.forward(batch.tokens, batch.layout, self._stores.device, needed)
        buffer = self._logits.first(len(batch.emitting))
        buffer.emitting.copy_(batch.emitting)
        buffer.positions.copy_(batch.layout.context_lengths)  # the position of each next token
        return self.model.logits(hidden, out=buffer.logits)

    def plant_acceptance(self, chance: float) -> None:
        """For measurements: accept any draft with this probability (`build(planted_drafts=True)`)."""
        assert self._drafting is not None
        self._drafting.plant_acceptance(chance)

    def _forward_drafts(self, rows: Tensor, starts: Tensor, shape: StepSize) -> Tensor:
        """The captured model part of a step with drafts."""
        assert self._drafting is not None
        inputs, layout = self._drafting.inputs(rows, starts, shape.size, shape.queries)
        hidden = self.model.forward(inputs.tokens, layout, self._stores.device)
        buffer = self._logits.first(shape.size)
        buffer.emitting.copy_(inputs.sampled_rows)
        torch.add(inputs.positions, 1, out=buffer.positions)
        return self.model.logits(hidden, out=buffer.logits)

    def _sample_captured(self, shape: StepSize, stages: SamplingStage) -> Tensor:
        """The captured sampling part. [5, rows] int64; [5, queries, rows] with drafts."""
        logits, emitting, positions = self._logits.first(shape.size)
        chosen = self._sampler.sample_with_kernels(logits, emitting, positions, stages)
        if shape.drafts:
            assert self._drafting is not None
            rows, starts = self._graphs.row_inputs(shape)
            ends = self._sampler.end_columns
            return self._drafting.finish(chosen, rows, starts, positions, ends, shape.queries)
        return self._finish(chosen, emitting, positions, self._sampler.end_columns, self._rows.state)


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
