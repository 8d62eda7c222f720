"""Builds the draft model of speculative decoding: its kernels, weights and KV store, beside those of the model."""

import time
from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.core.speculative import parse_sources
from quire.engine.build_runner import allocate_weights, choose_kernels, kv_token_bytes, make_stores, weight_usage
from quire.engine.open_model import OpenedModel, draft_on_gpu_refused
from quire.engine.resolved_config import ResolvedConfig
from quire.engine.startup import StartupReporter
from quire.formats.checkpoint import Checkpoint
from quire.kernels.select import KernelChoice
from quire.models.decoder import Decoder
from quire.models.parameters import DecoderWeights
from quire.runner.cuda_graphs import StepTimes
from quire.runner.draft_model import DraftModelConfig
from quire.runner.warmup import time_steps, warm_up


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """The weights of a draft model, before the KV cache is sized."""

    checkpoint: Checkpoint
    choice: KernelChoice
    weights: DecoderWeights
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of a token, beside those of the model."""
        return kv_token_bytes(self.checkpoint.spec, self.choice, self.dtype)


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """A draft model that is ready, what it takes of the memory, and how long its steps take."""

    config: DraftModelConfig
    weight_bytes: int
    times: StepTimes


def load_draft(
    config: EngineConfig, opened: OpenedModel, dtype: torch.dtype, device: torch.device, reporter: StartupReporter
) -> LoadedDraft | None:
    """None if the settings name no draft model. Its weights are quantized as those of the model."""
    if parse_sources(config.speculative).model is None:
        return None
    if device.type != "cpu":
        raise draft_on_gpu_refused(config.speculative)
    assert opened.draft is not None, "the model was opened without its draft model"
    quiet = StartupReporter(loading=reporter.loading)
    choice = choose_kernels(config, opened.draft.spec, dtype, device, quiet)
    weights = allocate_weights(config, opened.draft, dtype, device, quiet, choice).filled()
    return LoadedDraft(opened.draft, choice, weights, dtype)


def build_draft(
    config: EngineConfig,
    loaded: LoadedDraft | None,
    vocab_size: int,
    resolved: ResolvedConfig,
    device: torch.device,
    reporter: StartupReporter,
) -> BuiltDraft | None:
    """`vocab_size`: of the model that it drafts for."""
    if loaded is None:
        return None
    spec = loaded.checkpoint.spec
    model = Decoder(spec, loaded.weights, loaded.choice.kernels, resolved.max_model_len)
    stores = make_stores(model, resolved, loaded.choice, device)
    warm_up(model, stores)
    times = time_steps(model, stores, time.monotonic)
    usage = weight_usage(config, loaded.checkpoint, model, loaded.weights, loaded.dtype)
    reporter.done("draft model", f"{usage.describe()} · one row {1e3 * times.decode_s:.2f} ms")
    return BuiltDraft(DraftModelConfig(model, stores, spec.max_positions, vocab_size), usage.num_bytes, times)
