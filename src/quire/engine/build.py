"""The composition root: from settings to a running engine, phase by phase."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quire.catalog.hub import fetch as fetch_hub
from quire.catalog.locate import locate
from quire.catalog.progress import Report, ignore
from quire.config import EngineConfig, Machine, Resolved, resolve, resolve_dtype
from quire.core.errors import ConfigError, ModelNotFound
from quire.core.model import ModelSpec
from quire.engine.costs import first_costs
from quire.engine.door import Door
from quire.engine.engine import Engine
from quire.engine.local import LocalFront
from quire.engine.machine import inspect, pick_device
from quire.formats.checkpoint import Checkpoint, Source
from quire.formats.huggingface import open_folder
from quire.formats.shapes import dummy_checkpoint
from quire.kernels.select import select_kernels
from quire.kv.manager import KVManager, count_blocks
from quire.models.decoder import Decoder
from quire.models.parameters import DecoderWeights
from quire.runner.kv_store import KvStores, measure_transfer, new_store
from quire.runner.model_runner import ModelRunner
from quire.runner.warm_up import warm_up
from quire.sched.cost import CostTable
from quire.sched.policy import REGIMES, Policy
from quire.sched.reserve import Stance
from quire.sched.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer
from quire.weights.dequantize import Unpacker
from quire.weights.dummy import dummy_weights
from quire.weights.load import load_weights

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Phase(NamedTuple):
    """One line of the start-up report."""

    name: str
    seconds: float
    detail: str


@dataclass(slots=True)
class Watch:
    """Who watches the start: downloads, weights as they load, and each phase when it is done."""

    fetching: Report = ignore
    loading: Callable[[int, int], None] = lambda done, total: None
    finished: Callable[[Phase], None] = lambda phase: None
    _since: float = field(default_factory=time.monotonic)

    def done(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self.finished(Phase(name, now - self._since, detail))
        self._since = now


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and what it was built from."""

    name: str
    engine: Engine
    front: LocalFront
    tokenizer: Tokenizer | None
    checkpoint: Checkpoint
    resolved: Resolved
    machine: Machine
    dtype: str
    kernels: str


def build(config: EngineConfig, watch: Watch | None = None) -> Built:
    """Find the model, load it, size the cache. A `QuireError` says what is wrong with model, settings or machine."""
    watch = watch or Watch()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    name, checkpoint = _open(config, watch)
    tokenizer = _tokenizer(checkpoint)
    dtype = resolve_dtype(config, inspect(device))
    _check_dtype(config, checkpoint, dtype)
    spec = checkpoint.spec
    watch.done("config", f"context {spec.max_positions:,} · {spec.num_layers} layers · {spec.family}")

    weights = _weights(config, checkpoint, _DTYPES[dtype], device, watch)
    choice = select_kernels(device.type)
    machine = inspect(device)
    resolved = resolve(config, spec, spec.kv_bytes_per_token(_DTYPES[dtype].itemsize), machine)
    model = Decoder(spec, weights, choice.kernels, resolved.max_model_len)
    watch.done("weights", f"{_num_weight_bytes(weights) / 2**30:.2f} GiB {dtype}")

    stores = new_store(model.kv_geometry, resolved.num_blocks, resolved.block_size, device, resolved.num_host_blocks)
    costs = _costs(spec, weights, _DTYPES[dtype].itemsize, machine, resolved, stores)
    engine = Engine(
        _scheduler(config, resolved, costs),
        ModelRunner(model, stores, max_rows=resolved.max_num_seqs, max_length=resolved.max_model_len),
        _door(spec, _end_ids(checkpoint, tokenizer), resolved),
        depth=resolved.run_ahead,
        seed=config.seed,
        clock=time.monotonic,
    )
    watch.done("kv cache", _describe_cache(resolved))
    warm_up(model, stores)
    watch.done("warm-up", choice.reason)
    front = LocalFront(engine, tokenizer)
    return Built(name, engine, front, tokenizer, checkpoint, resolved, machine, dtype, choice.reason)


def _door(spec: ModelSpec, end_ids: tuple[int, ...], resolved: Resolved) -> Door:
    return Door(
        vocab_size=spec.vocab_size,
        end_ids=end_ids,
        max_length=resolved.max_model_len,
        max_rows=resolved.max_num_seqs,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
    )


def _scheduler(config: EngineConfig, resolved: Resolved, costs: CostTable) -> Scheduler:
    regime = REGIMES[resolved.regime]
    itl_target_ms = config.itl_target_ms
    policy = Policy(
        regime=regime,
        stance=Stance(config.overcommit),
        itl_target_s=None if itl_target_ms is None else itl_target_ms / 1000,
        max_waiting=config.max_waiting,
    )
    kv = KVManager(
        resolved.num_blocks,
        resolved.block_size,
        resolved.max_num_seqs,
        prefix=regime.prefix,
        num_host_blocks=resolved.num_host_blocks,
        worth_keeping=lambda start, stop: costs.cheaper_to_swap(
            start, stop, count_blocks(stop - start, resolved.block_size)
        ),
    )
    return Scheduler(
        kv,
        max_rows=resolved.max_num_seqs,
        max_step_tokens=resolved.max_num_batched_tokens,
        policy=policy,
        cost=costs,
    )


def _costs(
    spec: ModelSpec, weights: DecoderWeights, itemsize: int, machine: Machine, resolved: Resolved, stores: KvStores
) -> CostTable:
    """The embedding is looked up, not multiplied by, unless it is the head too."""
    read_bytes = _num_weight_bytes(weights)
    if weights.head is not weights.embedding:
        read_bytes -= weights.embedding.nbytes
    costs = first_costs(
        machine,
        num_parameters=read_bytes // itemsize,
        weight_bytes=read_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token(itemsize),
        largest_chunk=resolved.max_num_batched_tokens,
    )
    if resolved.num_host_blocks:
        costs.set_transfer(measure_transfer(stores))
    return costs


def _describe_cache(resolved: Resolved) -> str:
    text = f"{resolved.kv_bytes / 2**30:.2f} GiB → {resolved.num_blocks * resolved.block_size:,} tokens"
    if resolved.num_host_blocks:
        text += f" · host {resolved.num_host_blocks * resolved.block_size:,} tokens"
    return text


def _open(config: EngineConfig, watch: Watch) -> tuple[str, Checkpoint]:
    if config.load_format == "dummy":
        if config.model is None:
            raise ModelNotFound("Dummy weights need the name of a shape, e.g. qwen3-0.6b.", param="model")
        return config.model, dummy_checkpoint(config.model)
    located = locate(
        config.model, fetch_hub=fetch_hub, revision=config.revision, token=config.token, report=watch.fetching
    )
    if located.kind == "folder":
        return located.name, open_folder(located.path)
    from quire.formats.opening import open_checkpoint  # gguf is needed by those who read GGUF files alone

    return located.name, open_checkpoint(located.path)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """None where there is none: such a model still takes token ids, and refuses text with a reason."""
    match checkpoint.source:
        case Source.FOLDER:
            has_one = (checkpoint.path / "tokenizer.json").is_file()
            return Tokenizer.from_folder(checkpoint.path) if has_one else None
        case Source.GGUF:
            return Tokenizer.from_gguf(checkpoint.metadata)
        case Source.DUMMY:
            return None


def _check_dtype(config: EngineConfig, checkpoint: Checkpoint, dtype: str) -> None:
    if dtype == "float16" and checkpoint.spec.family.startswith("gemma"):
        raise ConfigError("Gemma's activations do not fit float16; use --dtype bfloat16.", param="dtype")


def _end_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if checkpoint.end_ids or tokenizer is None:
        return checkpoint.end_ids
    return tuple(tokenizer.end_ids)


def _weights(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, watch: Watch
) -> DecoderWeights:
    if checkpoint.source is Source.DUMMY:
        return dummy_weights(checkpoint.spec, dtype, device, config.seed)
    unpacker: Unpacker | None = None
    if checkpoint.source is Source.GGUF:
        from quire.weights.packed import GgufUnpacker

        unpacker = GgufUnpacker()
    return load_weights(checkpoint, dtype, device, watch.loading, unpacker)


def weights_of(checkpoint: Checkpoint, dtype: torch.dtype) -> DecoderWeights:
    """A second copy of a model's weights, for those who compare."""
    return _weights(EngineConfig(), checkpoint, dtype, torch.device("cpu"), Watch())


def _num_weight_bytes(weights: DecoderWeights) -> int:
    tensors = [weights.embedding, weights.final_norm]
    if weights.head is not weights.embedding:
        tensors.append(weights.head)
    for layer in weights.layers:
        tensors.extend(t for name in layer.__slots__ if (t := getattr(layer, name)) is not None)
    return sum(tensor.nbytes for tensor in tensors)
