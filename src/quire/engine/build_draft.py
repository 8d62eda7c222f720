"""Builds the draft model of speculative decoding, or a head that drafts: kernels, weights and KV store, beside those of
the model."""

import time
from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.speculative import parse_sources
from quire.engine.build_runner import allocate_weights, choose_kernels, kv_token_bytes, make_stores, weight_usage
from quire.engine.open_model import OpenedModel
from quire.engine.resolved_config import ResolvedConfig
from quire.engine.startup import StartupReporter
from quire.formats.checkpoint import Checkpoint
from quire.formats.draft_head import DraftHeadCheckpoint
from quire.kernels.select import KernelChoice
from quire.models.decoder import Decoder
from quire.models.draft_head import DraftHead, DraftHeadWeights
from quire.models.parameters import DecoderWeights
from quire.runner.cuda_graphs import StepTimes
from quire.runner.draft_model import DraftFeatures, DraftModelConfig, feature_geometry
from quire.runner.kv_store import new_store
from quire.runner.warmup import time_steps, warm_up
from quire.weights.draft_head_weights import load_draft_head

_TIMED_LATER = "its passes are captured with the steps"  # and timed then


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
class LoadedHead:
    """The weights of an EAGLE head or a multi-token-prediction layer, before the KV cache is sized."""

    checkpoint: DraftHeadCheckpoint
    choice: KernelChoice
    weights: DraftHeadWeights
    dtype: torch.dtype

    @property
    def feature_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype is torch.float32 else torch.bfloat16  # any state is in its range

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values, and of what the head reads of the model."""
        layer = self.checkpoint.spec.layer
        features = feature_geometry(layer.hidden_size, self.feature_dtype).token_bytes
        return kv_token_bytes(layer, self.choice, self.dtype) + features


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """A draft model that is ready, what it takes of the memory, and how long its steps take."""

    config: DraftModelConfig
    weight_bytes: int
    times: StepTimes | None  # None on a GPU, where its captured passes are timed


def choose_draft_kernels(
    config: EngineConfig, opened: OpenedModel, dtype: torch.dtype, device: torch.device
) -> KernelChoice | None:
    """None if the settings name no draft model. One that a GPU cannot run is refused, before anything is loaded."""
    if parse_sources(config.speculative).model is None:
        return None
    assert opened.draft is not None, "the model was opened without its draft model"
    what = "a head that drafts" if isinstance(opened.draft, DraftHeadCheckpoint) else "a draft model"
    spec = opened.draft.spec.layer if isinstance(opened.draft, DraftHeadCheckpoint) else opened.draft.spec
    choice = choose_kernels(config, spec, dtype, device, StartupReporter())
    if device.type != "cpu":
        _check_captured(config, choice, what)
    return choice


def load_draft(
    config: EngineConfig,
    opened: OpenedModel,
    choice: KernelChoice | None,
    dtype: torch.dtype,
    device: torch.device,
    reporter: StartupReporter,
) -> LoadedDraft | LoadedHead | None:
    """None without a draft model. Its weights are quantized as those of the model."""
    if choice is None or opened.draft is None:
        return None
    quiet = StartupReporter(loading=reporter.loading)
    if isinstance(opened.draft, DraftHeadCheckpoint):
        head = load_draft_head(opened.draft, dtype, device, reporter.loading)
        return LoadedHead(opened.draft, choice, head, dtype)
    weights = allocate_weights(config, opened.draft, dtype, device, quiet, choice).filled()
    return LoadedDraft(opened.draft, choice, weights, dtype)


def _check_captured(config: EngineConfig, choice: KernelChoice, what: str) -> None:
    """On a GPU its passes are captured."""
    if choice.draft_kernels is None:
        raise ConfigError(
            f"speculative is {config.speculative}, and on a GPU {what} needs Triton. {choice.reason}.",
            param="speculative",
        )
    if not choice.capturable:
        raise ConfigError(
            f"speculative is {config.speculative}, and attention_backend is {config.attention_backend}, which no CUDA "
            f"graph can hold: on a GPU, {what} runs in CUDA graphs. Omit --attention-backend.",
            param="attention_backend",
        )


def build_draft(
    config: EngineConfig,
    loaded: LoadedDraft | LoadedHead | None,
    target: Decoder,
    resolved: ResolvedConfig,
    device: torch.device,
    reporter: StartupReporter,
) -> BuiltDraft | None:
    """`target`: the model that it drafts for."""
    if loaded is None:
        return None
    if isinstance(loaded, LoadedHead):
        return _build_head(loaded, target, resolved, device, reporter)
    spec = loaded.checkpoint.spec
    model = Decoder(spec, loaded.weights, loaded.choice.kernels, resolved.max_model_len)
    stores = make_stores(model, resolved, loaded.choice, device)
    usage, times = weight_usage(config, loaded.checkpoint, model, loaded.weights, loaded.dtype), None
    timed = _TIMED_LATER
    if device.type == "cpu":
        warm_up(model, stores)
        times = time_steps(model, stores, time.monotonic)
        timed = f"one row {1e3 * times.decode_s:.2f} ms"
    reporter.done("draft model", f"{usage.describe()} · {timed}")
    return BuiltDraft(DraftModelConfig(model, stores, spec.max_positions, target.vocab_size), usage.num_bytes, times)


def _build_head(
    loaded: LoadedHead, target: Decoder, resolved: ResolvedConfig, device: torch.device, reporter: StartupReporter
) -> BuiltDraft:
    spec = loaded.checkpoint.spec
    head = DraftHead(spec, loaded.weights, loaded.choice.kernels, resolved.max_model_len, target.embed, target.logits)
    stores = make_stores(head, resolved, loaded.choice, device)
    stores.device.zero_()  # the last slot of a shared block may be read before its row wrote it
    features = DraftFeatures(
        target.capture(spec.captured_layers),
        head.fuse,
        new_store(
            feature_geometry(head.hidden_size, loaded.feature_dtype),
            resolved.num_blocks,
            resolved.block_size,
            device,
            resolved.num_host_blocks,
            loaded.choice.copy_blocks,
        ),
    )
    times, timed = None, _TIMED_LATER
    if device.type == "cpu":
        warm_up(head, stores)
        times = time_steps(head, stores, time.monotonic)
        timed = f"one row {1e3 * times.decode_s:.2f} ms"
    what, reads = "EAGLE head", f"layers {', '.join(map(str, spec.captured_layers))}"
    if spec.source == "mtp":
        what, reads = "multi-token-prediction layer", "what leaves the last layer"
    reporter.done(what, f"reads {reads} · {timed}")
    config = DraftModelConfig(head, stores, spec.layer.max_positions, spec.target_vocab_size, features)
    return BuiltDraft(config, head.num_bytes, times)
