"""From a model's file to what a rank runs: kernels, weights and a runner. An engine without ranks is one rank."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.model import ModelSpec
from quire.core.sharding import WHOLE, Shard
from quire.core.shared_blocks import SharedBlocks
from quire.core.speculative import parse_sources
from quire.dist.process_group import ProcessGroup
from quire.engine.block_transport import LOCAL_TRANSPORT, BlockTransport
from quire.engine.machine import inspect
from quire.engine.prefix_transfer import EngineRole
from quire.engine.resolved_config import GIB, ResolvedConfig, resolve_block_size, resolve_dtype
from quire.engine.startup import StartupReporter
from quire.engine.stats import WeightUsage
from quire.formats.checkpoint import Checkpoint, CheckpointSource
from quire.kernels.attention_backends import AttentionNeeds
from quire.kernels.interface import AttentionRule, Weight
from quire.kernels.select import KernelChoice, select_kernels
from quire.models.decoder import Decoder
from quire.models.draft_head import DraftHead
from quire.models.interface import KvGeometry
from quire.models.parameters import DecoderWeights
from quire.runner.cuda_ipc import export_store
from quire.runner.device_drafting import DraftConfig, SuffixDrafter
from quire.runner.draft_model import DraftModelConfig
from quire.runner.drafters import drafters_of
from quire.runner.kv_store import KvStores, new_store
from quire.runner.model_runner import ModelRunner
from quire.runner.pipeline_parallel import StageRunner
from quire.weights.allocate import UnfilledWeights, dummy_weights, num_parameters
from quire.weights.dequantize import Dequantizer
from quire.weights.load import unfilled_weights
from quire.weights.stored_weights import stored_weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_KV_DTYPES = {**DTYPES, "int8": torch.int8, "auto": None}
_SERVING_CAPTURE_SHARE = 0.15  # of the time, in which captures between steps may pause steps of a server; never tuned


def choose_kernels(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, reporter: StartupReporter
) -> KernelChoice:
    """Before the weights are loaded: a requested attention backend that is not available fails early."""
    block_size = resolve_block_size(config, device.type)
    windows = dict.fromkeys(spec.window(layer) for layer in range(spec.num_layers))
    rules = tuple(AttentionRule(spec.scale, window, spec.attention_softcap) for window in windows)
    needs = AttentionNeeds(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype, block_size, rules)
    quantization = None if config.quantization in ("auto", "none") else config.quantization
    choice = select_kernels(
        device.type,
        needs,
        config.attention_backend,
        quantization,
        config.threads,
        batch_invariant=config.batch_invariant,
        num_ranks=config.tensor_parallel_size * config.pipeline_parallel_size,
        kv_dtype=_KV_DTYPES[config.kv_cache_dtype],
    )
    if choice.attention:
        reporter.done("attention", " · ".join(choice.attention))
    else:
        reporter.done("kernels", choice.reason)
    return choice


def make_stores(
    model: Decoder | DraftHead,
    resolved: ResolvedConfig,
    choice: KernelChoice,
    device: torch.device,
    role: EngineRole = EngineRole.WHOLE,
    memory: NDArray[np.uint8] | None = None,
) -> KvStores:
    """Other engines read the blocks of a prefill engine, so these are in memory that is shared or exported; and rank 0
    writes what it copies into the blocks of all ranks. `memory`: of a rank above 0, whose blocks are in rank 0's."""
    num_ranks = resolved.tensor_parallel_size
    is_read = role is EngineRole.PREFILL
    shared = None
    if device.type == "cpu" and (is_read or (role is EngineRole.DECODE and num_ranks > 1)):
        shared = _share_blocks(model, resolved, num_ranks)
        memory = shared.part(0)
    stores = new_store(
        model.kv_geometry,
        resolved.num_blocks,
        resolved.block_size,
        device,
        resolved.num_host_blocks,
        choice.copy_blocks,
        memory,
    )
    stores.shared = shared
    if is_read and device.type == "cuda":
        stores.shared = SharedBlocks(len(stores.device), stores.raw_blocks.shape[1], export_store(stores.device))
    return stores


def _share_blocks(model: Decoder | DraftHead, resolved: ResolvedConfig, num_ranks: int) -> SharedBlocks:
    """With the null block."""
    block_bytes = model.kv_geometry.block_bytes(resolved.block_size)
    try:
        return SharedBlocks(resolved.num_blocks + 1, block_bytes, num_parts=num_ranks)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"No shared memory for a KV cache of {resolved.num_blocks} blocks "
            f"({block_bytes * resolved.num_blocks * num_ranks} bytes): {error}; use a smaller --kv-cache-memory.",
            param="kv_cache_memory",
        ) from error


def check_role(
    role: EngineRole, config: EngineConfig, device: torch.device, transport: BlockTransport = LOCAL_TRANSPORT
) -> None:
    """Before the weights are loaded."""
    if role is EngineRole.WHOLE:
        return
    if device.type == "cuda" and transport.is_remote:
        raise ConfigError(
            "--kv-transport nixl copies the KV caches of CPUs so far; omit it, or use --device cpu.",
            param="kv_transport",
        )
    if device.type == "cuda" and config.kv_cache_memory is None:
        raise ConfigError(
            "With --prefill-engines several engines share a GPU, and none can know what the others need: say how much "
            "each may use for its KV cache, such as --kv-cache-memory 20GiB.",
            param="kv_cache_memory",
        )
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--prefill-engines copies KV blocks with all their layers, and --pipeline-parallel-size "
            f"{config.pipeline_parallel_size} divides these; omit one of them, or use --tensor-parallel-size.",
            param="prefill_engines",
        )
    if config.tensor_parallel_size > 1:
        _check_ranks(config, device, transport)
    if parse_sources(config.speculative).model is not None:
        raise ConfigError(
            f"--prefill-engines copies the KV blocks of one model, and --speculative {config.speculative} has two; "
            f"omit one of them.",
            param="prefill_engines",
        )
    if not hasattr(os, "memfd_create"):
        raise ConfigError("--prefill-engines shares memory as Linux does; omit it here.", param="prefill_engines")


def _check_ranks(config: EngineConfig, device: torch.device, transport: BlockTransport) -> None:
    """Rank 0 copies the blocks of all ranks, while none of them computes."""
    size = config.tensor_parallel_size
    if device.type == "cuda":
        raise ConfigError(
            f"--prefill-engines with --tensor-parallel-size {size} copies the KV caches of CPUs so far; omit one of "
            f"them, or use --device cpu.",
            param="prefill_engines",
        )
    if transport.is_remote:
        raise ConfigError(
            f"--prefill-engines with --tensor-parallel-size {size} copies KV blocks within one machine so far; use "
            f"--kv-transport memory.",
            param="kv_transport",
        )
    if config.run_ahead:
        raise ConfigError(
            f"--prefill-engines with --tensor-parallel-size {size} copies KV blocks between two steps, and --run-ahead "
            f"{config.run_ahead} leaves no time between them; omit it.",
            param="run_ahead",
        )


def block_layout(name: str, stores: KvStores, weights: str, num_ranks: int) -> str:
    """A hash of what the bytes of a block are: of engines with the same, one reads the blocks of the other."""
    store = stores.device
    layout = (name, weights, str(store.dtype), tuple(store.shape[1:]), num_ranks)
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


def make_runner(
    model: Decoder,
    stores: KvStores,
    resolved: ResolvedConfig,
    choice: KernelChoice,
    serving: bool,
    planted: bool,
    shard: Shard = WHOLE,
    draft_model: DraftModelConfig | None = None,
    group: ProcessGroup | None = None,
) -> ModelRunner | StageRunner:
    """What samples, or a pipeline stage before that."""
    if not shard.is_last:
        return StageRunner(model, stores, max_rows=resolved.max_num_seqs, max_length=resolved.max_model_len)
    on_host = stores.device.device.type == "cpu" and choice.draft_kernels is None
    return ModelRunner(
        model,
        stores,
        max_rows=resolved.max_num_seqs,
        max_length=resolved.max_model_len,
        row_kernels=choice.row_kernels,
        draw_tokens=choice.draw_tokens,
        max_step_tokens=resolved.max_num_batched_tokens,
        capture_share=_SERVING_CAPTURE_SHARE if serving else 1.0,
        kept_bytes=max(resolved.workspace_bytes - GIB, 0),
        capture_graphs=choice.capturable,
        drafters=drafters_of(resolved.drafters) if on_host else (),
        draft_model=draft_model if on_host else None,
        device_drafts=_device_drafts(resolved, choice, stores.device.device, draft_model, planted=planted),
        least=None if group is None else group.least,
    )


def _device_drafts(
    resolved: ResolvedConfig,
    choice: KernelChoice,
    device: torch.device,
    model: DraftModelConfig | None,
    *,
    planted: bool,
) -> DraftConfig | None:
    """Drafts that are proposed and verified on a GPU, where steps are captured."""
    if not resolved.drafters or choice.draft_kernels is None or not choice.capturable:
        return None
    tree, drafter = "tree" in resolved.drafters, None
    ngram = "ngram" in resolved.drafters or not (tree or model)
    if ngram or tree:
        sizes = (resolved.max_num_seqs, resolved.max_model_len)
        drafter = SuffixDrafter(*sizes, device, ngram=ngram, tree=tree, kernels=choice.draft_kernels)
    chance = torch.zeros((), dtype=torch.int64, device=device) if planted else None
    return DraftConfig(drafter, choice.draft_kernels, chance, model)


def choose_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> str:
    dtype = resolve_dtype(config, inspect(device))
    if dtype == "float16" and checkpoint.spec.family.startswith("gemma"):
        raise ConfigError("Gemma's activations do not fit float16; use --dtype bfloat16.", param="dtype")
    return dtype


def allocate_weights(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    reporter: StartupReporter,
    choice: KernelChoice,
    shard: Shard = WHOLE,
) -> UnfilledWeights:
    """A GGUF file's weights stay as they are stored where the kernels can read them, and nothing else is asked for."""
    stays = choice.stored_encodings and config.quantization != "none" and dtype is not torch.float32
    if checkpoint.source is not CheckpointSource.GGUF or not stays:
        return _allocate_tensors(config, checkpoint, dtype, device, reporter, shard)
    stored = stored_weights(checkpoint, _gguf_dequantizer(), choice.stored_encodings, reporter.loading, shard)
    return UnfilledWeights(stored, lambda: None)


def _gguf_dequantizer() -> Dequantizer:
    from quire.weights.gguf_dequantize import GgufDequantizer  # gguf is imported only for GGUF files

    return GgufDequantizer()


def _allocate_tensors(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    reporter: StartupReporter,
    shard: Shard = WHOLE,
) -> UnfilledWeights:
    if checkpoint.source is CheckpointSource.DUMMY:
        return dummy_weights(checkpoint.spec, dtype, device, config.seed, shard)
    dequantizer = _gguf_dequantizer() if checkpoint.source is CheckpointSource.GGUF else None
    return unfilled_weights(checkpoint, dtype, device, reporter.loading, dequantizer, shard)


def weights_of(checkpoint: Checkpoint, dtype: torch.dtype) -> DecoderWeights:
    """A second copy of a model's weights, for comparisons."""
    return _allocate_tensors(EngineConfig(), checkpoint, dtype, torch.device("cpu"), StartupReporter()).filled()


def weight_usage(
    config: EngineConfig, checkpoint: Checkpoint, model: Decoder, weights: DecoderWeights, dtype: torch.dtype
) -> WeightUsage:
    """After packing: kernels may keep a matrix as stored, quantize it, or convert it to the dtype."""
    name, encodings = str(dtype).removeprefix("torch."), Counter[str]()
    for matrix in model.matrices:
        encodings.update([name] if isinstance(matrix, torch.Tensor) else matrix.encodings)
    vectors = num_weight_bytes(weights) - sum(each.nbytes for each in _matrices(weights))
    stored = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1]
    return WeightUsage(
        num_bytes=vectors + sum(matrix.nbytes for matrix in model.matrices),
        encodings=encodings,
        dtype=name,
        dtype_bytes=num_parameters(checkpoint.spec) * dtype.itemsize,
        stored=Counter(tensor.encoding for tensor in stored),
        stored_bytes=sum(tensor.num_bytes for tensor in stored),
        quantization=config.quantization,
    )


def _matrices(weights: DecoderWeights) -> Iterator[Weight]:
    yield weights.embedding
    if weights.head is not weights.embedding:
        yield weights.head
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)


def kv_token_bytes(spec: ModelSpec, choice: KernelChoice, dtype: torch.dtype) -> int:
    return KvGeometry.of(spec, choice.kernels.kv_dtype(dtype)).token_bytes


def num_weight_bytes(weights: DecoderWeights) -> int:
    tensors = [weights.embedding, weights.final_norm]
    if weights.head is not weights.embedding:
        tensors.append(weights.head)
    for layer in weights.layers:
        tensors.extend(t for name in layer.__slots__ if (t := getattr(layer, name)) is not None)
    return sum(tensor.nbytes for tensor in tensors)
