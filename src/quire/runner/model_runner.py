"""Executes step plans with a model: moves KV blocks, builds the batch, runs it, samples, advances the rows.

One method, `launch`. Nothing between `launch` and `wait` synchronises with the device, so steps can be in flight
(run-ahead). A step replays a CUDA graph where one holds it (`captured_steps`), and is launched eagerly otherwise.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.fault_injection import FaultSite, any_armed
from quire.core.ids import IntArray
from quire.core.step import (
    Drafts,
    Masks,
    StepPlan,
    StepResult,
)
from quire.kernels.row_interface import DrawTokens, GreedyStep, RowKernels, Sampled
from quire.kernels.transfers import HostCopy, upload
from quire.models.interface import Model
from quire.runner.batch import (
    LogitsNeeded,
    Pools,
    PromptScoring,
    build_batch,
)
from quire.runner.captured_steps import CapturedSteps, CaptureLimits
from quire.runner.cuda_graphs import Least, StepTimes
from quire.runner.device_draft_model import DeviceDraftModel
from quire.runner.device_drafting import (
    DraftConfig,
)
from quire.runner.draft_model import DraftFeatures, DraftModel, DraftModelConfig
from quire.runner.drafters import Drafted, Drafter, Drafting
from quire.runner.graph_shapes import LaunchCounts, StepSize
from quire.runner.kv_store import KvStores
from quire.runner.pending_step import Choose, ComputedStep, PendingStep, lost_without_memory, sampling_of
from quire.runner.row_table import RowTable
from quire.runner.verification import (
    SampledTokens,
    draft_lines,
    greedy_result,
    nothing_verified,
    sample_passes,
    verified,
)
from quire.sampling.logprobs import RowCandidates, RowScores, Scores
from quire.sampling.row_params import SamplingBatch
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
        self._captured: CapturedSteps | None = None
        if row_kernels is not None and capture_graphs:
            limits = CaptureLimits(max_rows, max_length, max_step_tokens, capture_share, kept_bytes)
            facts = (model, stores, self._rows, self._sampler, row_kernels, limits, self._sample, device_drafts, least)
            self._captured = CapturedSteps(*facts)
            self._draft_model = self._captured.draft_model
        self.num_first = 0 if self._captured is None else self._captured.num_first  # shapes that are captured first
        self._greedy_step: GreedyStep | None = None  # the step before, if it was one
        self.launches = LaunchCounts() if self._captured is None else self._captured.graphs.counts

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
        return self._captured is None or self._captured.graphs.complete

    def prepare(self) -> None:
        """Capture one more shape. Call between steps. Capturing ends when memory runs out."""
        self.capture(self.next_missing)

    @property
    def next_missing(self) -> StepSize | None:
        return None if self._captured is None else self._captured.graphs.next_missing

    def take_wanted(self) -> StepSize | None:
        """With several ranks, the shape whose absence has cost as much as its capture will; None: none, or taken."""
        return None if self._captured is None else self._captured.take_wanted()

    @torch.inference_mode()
    def capture(self, shape: StepSize | None) -> None:
        """Capture this missing shape, and missing sampling graphs. Call between steps."""
        if self._captured is not None:
            self._captured.capture(shape)

    @torch.inference_mode()
    def dry_run(self) -> None:
        """Run steps of padding that together launch the kernels of most others. Call between steps."""
        if self._captured is not None:
            self._captured.dry_run()

    @torch.inference_mode()
    def step_times(self) -> StepTimes | None:
        """Times of captured steps; None if too few are captured. Call between steps."""
        return None if self._captured is None else self._captured.graphs.step_times()

    @torch.inference_mode()
    def draft_times(self) -> StepTimes | None:
        """Times of captured passes of a draft model; None: it has none. Call between steps."""
        model = self._draft_model
        return model.pass_times(self.device) if isinstance(model, DeviceDraftModel) else None

    def plant_acceptance(self, chance: float) -> None:
        """For measurements: accept any draft with this probability (`build(planted_drafts=True)`)."""
        assert self._captured is not None
        self._captured.plant_acceptance(chance)

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
        has_drafts = len(plan.drafts) > 0
        features = None if self._draft_model is None else self._draft_model.features
        if self._greedy_step is None or any_armed() or (has_drafts and features is not None):
            return None
        rows = self._rows.repeat(plan)
        if rows is None:
            return None
        if self._draft_model is not None:
            self._draft_model.carry(())
            self._draft_model.apply(plan)
        drafted = self._propose(plan) if has_drafts else None
        if drafted is not None:
            return self._verify_greedy(plan, rows, drafted, self._greedy_step)
        slots = None if features is None else features.decode_slots(rows, self._rows.columns)
        tokens = self._greedy_step()
        if slots is not None:
            self._note_features(slots)
        if tokens is None:
            return PendingStep(plan.step, self._sampled(rows, self._greedy_step.outcome, None), drafts=plan.drafts)
        if self._drafting is not None:
            self._drafting.append(rows, tokens)
        if has_drafts:
            return ComputedStep(StepResult(plan.step, rows, tokens, verified=nothing_verified(plan.drafts)))
        return ComputedStep(StepResult(plan.step, rows, tokens))

    def _verify_greedy(self, plan: StepPlan, rows: IntArray, drafted: Drafted, step: GreedyStep) -> ComputedStep:
        """The step of rows that are all greedy, with drafts."""
        counts, tokens = drafted.in_order(rows)
        result, numbers = greedy_result(plan.step, rows, counts, step.verify(counts, tokens))
        if self._drafting is not None:
            self._drafting.append_passes(result.rows, result.tokens, numbers)
        return ComputedStep(result._replace(verified=verified(plan.drafts, drafted, result)))

    @property
    def _features(self) -> DraftFeatures | None:
        return None if self._draft_model is None else self._draft_model.features

    @torch.inference_mode()
    def _note_features(self, slots: NDArray[np.int64] | None) -> None:
        """The model has computed the tokens of these slots: a head reads its states of them."""
        if self._features is not None and slots is not None:
            self._features.note(slots)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep | ComputedStep:
        self._greedy_step = None
        self._stores.carry(plan.moves)
        if self._draft_model is not None:
            self._draft_model.carry(plan.moves)
        self._follow(plan)
        decoding = self._rows.apply(plan)
        if self._draft_model is not None:
            self._draft_model.apply(plan)
        self._rows.trip(FaultSite.BUILD_BATCH)
        if self._captured is not None and not plan.num_padding:
            sampled = self._captured.verify(plan, decoding) or self._captured.replay(plan, decoding)
            if sampled is not None:
                return PendingStep(plan.step, sampled, drafts=plan.drafts)
        drafted = self._propose(plan) if len(plan.drafts) else None
        decoded = self._decode_rows(plan, decoding, drafted)
        if decoded is not None:
            return decoded
        begun_s = time.perf_counter()
        if drafted is not None:
            decoding = np.concatenate([decoding[~np.isin(decoding, drafted.rows)], drafted.rows])
        batch = build_batch(self._rows, plan, decoding, drafted)
        if len(batch.tokens) == 0:
            return PendingStep(plan.step)
        self._rows.trip(FaultSite.FORWARD)
        hidden = self._model.forward(batch.tokens, batch.layout, self._stores.device, batch.needed)
        self._note_features(None if self._features is None else batch.layout.slots.numpy())
        if self.device.type != "cpu" or self._captured is not None:
            self._note_eager(
                StepSize(len(decoding), len(plan.chunks), len(batch.tokens) - len(decoding)),
                time.perf_counter() - begun_s,
            )
        sampling, sampled = batch.sampling, None
        if len(sampling.at):
            at = sampling.at if batch.further is None else torch.cat([sampling.at, batch.further])
            logits = self._model.logits(hidden[at])
            sampled = sampling_of(plan, self._sampling(plan, logits, sampling.batch, drafted), drafted)
        return PendingStep(
            plan.step,
            sampled,
            self._find_candidates(batch.host_driven, hidden) if batch.host_driven is not None else None,
            tuple((part, self._score(part, hidden)) for part in batch.scoring),
            self._pools.add(batch.pooling, hidden),
            plan.drafts,
            None if sampled is not None or self.device.type == "cpu" else torch.cuda.current_stream().record_event(),
        )

    @torch.inference_mode()
    def _propose(self, plan: StepPlan) -> Drafted | None:
        """Drafts for rows that have not ended."""
        if self._drafting is None:
            return None
        rows, counts = plan.drafts.rows, plan.drafts.counts
        alive = self._rows.alive.numpy()[rows]
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
        if self._captured is not None:
            self._captured.graphs.note_eager(step)

    def _decode_rows(
        self, plan: StepPlan, decoding: IntArray, drafted: Drafted | None
    ) -> PendingStep | ComputedStep | None:
        """The step by a model that reads the row table itself, if rows only decode; None: it must be built."""
        decoder = self._model.row_decoder
        if decoder is None or plan.chunks or plan.num_padding or not len(decoding):
            return None
        self._rows.trip(FaultSite.FORWARD)
        rows, ends, kv = self._rows, self._sampler.end_columns, self._stores.device
        whole = drafted is None or self._features is None  # states of drafts are captured with the logits
        if whole and not plan.masked and not self._sampler.features(decoding):
            for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE, FaultSite.LOGPROBS):
                self._rows.trip(site)
            self._greedy_step = step = decoder.greedy_step(decoding, rows.columns, ends, kv)
            if drafted is not None:
                return self._verify_greedy(plan, decoding, drafted, step)
            slots = None if self._features is None else self._features.decode_slots(decoding, rows.columns)
            step()
            self._note_features(slots)
            return PendingStep(plan.step, self._sampled(decoding, step.outcome, None), drafts=plan.drafts)
        lines, columns = (decoding, rows.columns) if drafted is None else draft_lines(rows, decoding, drafted)
        slots = None if self._features is None else self._features.decode_slots(lines, columns)
        logits = decoder.decode_logits(lines, columns, ends, kv)
        self._note_features(slots)
        device_rows = upload(decoding.astype(np.int64), self.device)
        batch = SamplingBatch(device_rows, decoding, rows.lengths[device_rows])
        sampled = sampling_of(plan, self._sampling(plan, logits, batch, drafted), drafted)
        return PendingStep(plan.step, sampled, drafts=plan.drafts)

    def _sampled(self, rows: IntArray, outcome: Tensor | NDArray[np.int64], scores: RowScores | None) -> SampledTokens:
        """The tokens that these rows got. outcome: [5, rows] int64."""
        copied = HostCopy(outcome)
        if self._drafting is not None:
            self._drafting.append(rows, copied.wait())
        return SampledTokens(rows, copied, scores)

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
        if self._captured is not None:
            self._captured.start(plan.starts)
        for append in plan.appends:
            self._sampler.append_tokens(append.row, append.tokens)

    def _sample(
        self,
        logits: Tensor,  # [n, vocab] float32
        batch: SamplingBatch,
        masks: Masks | None,
    ) -> SampledTokens:
        for site in (FaultSite.LOGITS_PROCESSORS, FaultSite.PENALTIES, FaultSite.SAMPLE):  # one call does all three
            self._rows.trip(site)
        chosen = self._sampler.sample(logits, batch, masks)
        self._rows.trip(FaultSite.LOGPROBS)
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
