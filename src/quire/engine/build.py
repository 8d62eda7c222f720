"""The composition root: from settings to a running engine, phase by phase."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

import torch

from quire.config import GIB, EngineConfig, MachineInfo, ResolvedConfig, resolve, resolve_dtype
from quire.core.errors import ConfigError
from quire.core.model import ModelSpec
from quire.core.step import Runner
from quire.engine.build_scheduler import (
    captured_sizes,
    first_costs,
    load_vocabulary,
    make_grammars,
    make_scheduler,
    make_validator,
)
from quire.engine.engine import Engine
from quire.engine.local_client import LocalClient
from quire.engine.machine import inspect, pick_device
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.startup import StartupReporter
from quire.engine.stats import EngineInfo, MemoryUsage, WeightUsage, account_memory
from quire.formats.checkpoint import Checkpoint, CheckpointSource
from quire.kernels.attention_backends import AttentionNeeds
from quire.kernels.interface import AttentionRule, Precompiling, Weight
from quire.kernels.select import KernelChoice, precompiling_for, select_kernels
from quire.models.decoder import Decoder
from quire.models.parameters import DecoderWeights
from quire.runner.cuda_graphs import StepTimes
from quire.runner.device_drafting import DraftConfig, SuffixDrafter
from quire.runner.drafters import drafters_of
from quire.runner.kv_store import KvStores, measure_transfer, new_store
from quire.runner.model_runner import ModelRunner, time_steps, warm_up
from quire.sched.batching import MAX_STEP_S
from quire.sched.cost_model import CostTable
from quire.sched.pacing import usual_itl_s
from quire.sched.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer
from quire.weights.allocate import UnfilledWeights, dummy_weights, num_parameters
from quire.weights.dequantize import Dequantizer
from quire.weights.load import unfilled_weights
from quire.weights.stored_weights import stored_weights

if TYPE_CHECKING:
    from quire.engine.grammar_masks import GrammarMasks


class Precompilation:
    """Kernel precompilation in the background. The first kernel is compiled at construction, to load the compiler."""

    __slots__ = ("_compiling", "_first")

    def __init__(self, compiling: Precompiling) -> None:
        self._compiling = compiling
        # Not a daemon: a process that refuses a model and exits must wait for it, or it is killed inside the compiler.
        self._first = Thread(target=compiling.first, name="quire-first-kernel")
        self._first.start()

    @contextmanager
    def compiling(self, dry_run: Callable[[], None], num_at_once: int, reporter: StartupReporter) -> Iterator[None]:
        """Compile the kernels that `dry_run` would launch while the block runs."""
        self._first.join()
        with self._compiling.launched(dry_run, num_at_once) as finish:
            reporter.done("dry run", "collects the kernels to compile")
            yield
            reporter.done("kernels", finish().describe())


_SERVING_CAPTURE_SHARE = 0.15  # of the time, in which captures between steps may pause steps of a server; never tuned
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what it was built from."""

    name: str
    engine: Engine
    client: LocalClient
    tokenizer: Tokenizer | None
    checkpoint: Checkpoint
    resolved: ResolvedConfig
    machine: MachineInfo
    weights: WeightUsage
    kernels: str
    memory: MemoryUsage
    attention: tuple[str, ...] = ()  # why each attention backend was chosen, where there is a choice

    @property
    def dtype(self) -> str:
        """Of the weights in memory."""
        return self.weights.name

    @property
    def info(self) -> EngineInfo:
        resolved = self.resolved
        return EngineInfo(
            name=self.name,
            max_model_len=resolved.max_model_len,
            vocab_size=self.checkpoint.spec.vocab_size,
            max_num_seqs=resolved.max_num_seqs,
            num_blocks=resolved.num_blocks,
            block_size=resolved.block_size,
            device=self.machine.device,
            dtype=self.dtype,
            memory=self.memory,
            run_ahead=resolved.run_ahead,
            pid=os.getpid(),
            caches_prefixes=resolved.regime == "prefix",
        )


def build(
    config: EngineConfig,
    reporter: StartupReporter | None = None,
    observe: Callable[[Runner], Runner] = lambda runner: runner,
    *,
    serving: bool = False,
    opened: OpenedModel | None = None,
    planted_drafts: bool = False,
) -> BuiltEngine:
    """Find the model, load it, size the cache. Raises `QuireError` if model, settings or machine do not allow it.

    A benchmark may put an observer around the runner, and plant the acceptance of drafts. With `serving`, prefill is
    limited by the ITL target; offline, prompts are computed as fast as possible. `opened`: the model, if found before.
    """
    reporter = reporter or StartupReporter()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    precompilation = _start_precompilation(device, reporter)
    opened = opened or open_model(config, reporter.fetching)
    name, checkpoint, tokenizer = opened
    dtype = resolve_dtype(config, inspect(device))
    _check_dtype(config, checkpoint, dtype)
    spec = checkpoint.spec
    reporter.done("config", f"context {spec.max_positions:,} · {spec.num_layers} layers · {spec.family}")
    choice = _kernels(config, spec, _DTYPES[dtype], device, reporter)
    grammars = make_grammars(opened, spec.vocab_size)
    to_preload = grammars if serving else None
    unfilled = _allocate_weights(config, checkpoint, _DTYPES[dtype], device, reporter, choice)
    weights = unfilled.weights
    if precompilation is None:  # free memory is measured after the weights are loaded and packed
        _load_weights(unfilled, to_preload)
    machine = inspect(device)
    resolved = resolve(config, spec, spec.kv_bytes_per_token(_DTYPES[dtype].itemsize), machine, serving=serving)
    model = Decoder(spec, weights, choice.kernels, resolved.max_model_len)
    usage = _weight_usage(config, checkpoint, model, weights, _DTYPES[dtype])
    if precompilation is None:
        reporter.done("weights", usage.describe())
    num_blocks, num_host_blocks = resolved.num_blocks, resolved.num_host_blocks
    stores = new_store(model.kv_geometry, num_blocks, resolved.block_size, device, num_host_blocks, choice.copy_blocks)
    runner = _runner(model, stores, resolved, choice, serving, planted_drafts)
    reporter.done("kv cache", _describe_cache(resolved))
    if precompilation is not None:
        with precompilation.compiling(lambda: _dry_run(model, stores, runner), machine.num_cores, reporter):
            _load_weights(unfilled, to_preload)
            model.refresh_norms(weights)
            reporter.done("weights", usage.describe())
    warm_up(model, stores)
    reporter.done("warm-up", choice.reason)
    step_times = _step_times(model, stores, runner, choice, reporter)
    costs = _costs(spec, weights, _DTYPES[dtype].itemsize, resolved, stores, step_times)
    scheduler = _scheduler(config, resolved, costs, step_times, machine, serving)
    engine = _engine(config, opened, resolved, scheduler, runner, observe, grammars)
    memory = _memory_usage(usage.num_bytes, resolved, runner.launches.captured_bytes, inspect(device))
    reporter.done("memory", memory.describe())
    client = LocalClient(engine, tokenizer)
    return BuiltEngine(
        name, engine, client, tokenizer, checkpoint, resolved, machine, usage, choice.reason, memory, choice.attention
    )


def _start_precompilation(device: torch.device, reporter: StartupReporter) -> Precompilation | None:
    """Start precompilation, if the device has kernels to compile. Takes about a second, while the model is located; the
    device's context is created meanwhile."""
    if device.type != "cpu":
        Thread(target=partial(torch.empty, 1, device=device), name="quire-context").start()
    compiling = precompiling_for(device.type)
    if compiling is None:
        return None
    reporter.done("compiler", "import")
    return Precompilation(compiling)


def _load_weights(unfilled: UnfilledWeights, to_preload: "GrammarMasks | None") -> None:
    """Load the weights; a server reads the grammar vocabulary in a thread meanwhile. Not earlier: compile workers are
    forked before."""
    if to_preload is not None:
        Thread(target=load_vocabulary, args=(to_preload,), name="quire-vocabulary", daemon=True).start()
    unfilled.fill()


def _kernels(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, reporter: StartupReporter
) -> KernelChoice:
    """Before the weights are loaded: a requested attention backend that is not available fails early."""
    windows = dict.fromkeys(spec.window(layer) for layer in range(spec.num_layers))
    rules = tuple(AttentionRule(spec.scale, window, spec.attention_softcap) for window in windows)
    needs = AttentionNeeds(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype, config.block_size, rules)
    quantization = None if config.quantization in ("auto", "none") else config.quantization
    choice = select_kernels(
        device.type, needs, config.attention_backend, quantization, config.threads,
        batch_invariant=config.batch_invariant,
    )  # fmt: skip
    if choice.attention:
        reporter.done("attention", " · ".join(choice.attention))
    else:
        reporter.done("kernels", choice.reason)
    return choice


def _runner(
    model: Decoder, stores: KvStores, resolved: ResolvedConfig, choice: KernelChoice, serving: bool, planted: bool
) -> ModelRunner:
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
        device_drafts=_device_drafts(resolved, choice, stores.device.device, planted=planted),
    )


def _device_drafts(
    resolved: ResolvedConfig, choice: KernelChoice, device: torch.device, *, planted: bool
) -> DraftConfig | None:
    """Drafts that are proposed and verified on a GPU, where steps are captured."""
    if not resolved.drafters or choice.draft_kernels is None or not choice.capturable:
        return None
    drafter = SuffixDrafter(
        resolved.max_num_seqs,
        resolved.max_model_len,
        device,
        ngram="ngram" in resolved.drafters,
        tree="tree" in resolved.drafters,
        kernels=choice.draft_kernels,
    )
    chance = torch.zeros((), dtype=torch.int64, device=device) if planted else None
    return DraftConfig(drafter, choice.draft_kernels, chance)


def _dry_run(model: Decoder, stores: KvStores, runner: ModelRunner) -> None:
    """All kernels launched before the first request, those that take longest to compile first."""
    runner.dry_run()
    warm_up(model.truncated(), stores)


def _step_times(
    model: Decoder,
    stores: KvStores,
    runner: ModelRunner,
    choice: KernelChoice,
    reporter: StartupReporter,
) -> StepTimes | None:
    """Of captured graphs, or on a CPU of two steps. None: a GPU without graphs."""
    if runner.device.type == "cpu":
        times = time_steps(model, stores, time.monotonic)
        reporter.done("steps", _describe_times(times))
        return times
    if choice.row_kernels is None or not choice.capturable:
        return None
    return _capture_first_graphs(runner, reporter)


def _describe_times(times: StepTimes) -> str:
    return f"one row {1e3 * times.decode_s:.2f} ms · {1e6 * times.token_s:.1f} µs per prompt token"


def _capture_first_graphs(runner: ModelRunner, reporter: StartupReporter) -> StepTimes | None:
    """Capture the first CUDA graphs and time them; the rest when idle, and between steps."""
    for _ in range(runner.num_first):
        runner.prepare()
    step_times, launches = runner.step_times(), runner.launches
    size = f"{launches.captured_bytes / GIB:.2f} GiB"
    detail = f"{launches.captured} CUDA graph shapes captured ({size}), others when idle and between steps"
    if step_times is not None:
        detail += f" · {_describe_times(step_times)}"
    reporter.done("graphs", detail)
    return step_times


def _scheduler(
    config: EngineConfig,
    resolved: ResolvedConfig,
    costs: CostTable,
    step_times: StepTimes | None,
    machine: MachineInfo,
    serving: bool,
) -> Scheduler:
    """A server has latency targets where steps were timed, and on a CPU limited step times. With CUDA graphs the
    scheduler gets the captured sizes."""
    itl_s = usual_itl_s(step_times.decode_s) if serving and step_times is not None else None
    if machine.device == "cpu":
        return make_scheduler(config, resolved, costs, itl_s, max_step_s=MAX_STEP_S if serving else None)
    if step_times is None:  # no captured graphs, which verify drafts
        return make_scheduler(config, replace(resolved, drafters=()), costs)
    sizes = captured_sizes(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    return make_scheduler(config, resolved, costs, itl_s, sizes)


def _engine(
    config: EngineConfig,
    opened: OpenedModel,
    resolved: ResolvedConfig,
    scheduler: Scheduler,
    runner: ModelRunner,
    observe: Callable[[Runner], Runner],
    grammars: "GrammarMasks | None",
) -> Engine:
    vocab_size = opened.checkpoint.spec.vocab_size
    return Engine(
        scheduler,
        observe(runner),
        make_validator(vocab_size, opened.end_ids, resolved),
        depth=resolved.run_ahead,
        seed=config.seed,
        clock=time.monotonic,
        grammars=grammars,
        preparing=runner,
        span=torch.cuda.nvtx.range if runner.device.type == "cuda" else None,
    )


def _memory_usage(weight_bytes: int, resolved: ResolvedConfig, graph_bytes: int, now: MachineInfo) -> MemoryUsage:
    if now.device == "cpu":
        return MemoryUsage(weights=weight_bytes, kv=resolved.kv_bytes)
    return account_memory(
        weights=weight_bytes,
        kv=resolved.kv_bytes,
        graphs=graph_bytes,
        workspace=resolved.workspace_bytes,
        free=now.free_bytes,
        total=now.total_bytes,
    )


def _costs(
    spec: ModelSpec,
    weights: DecoderWeights,
    itemsize: int,
    resolved: ResolvedConfig,
    stores: KvStores,
    step_times: StepTimes | None,
) -> CostTable:
    """The embedding is looked up, not multiplied by, unless it is the head too."""
    read_bytes = _num_weight_bytes(weights)
    if weights.head is not weights.embedding:
        read_bytes -= weights.embedding.nbytes
    costs = first_costs(
        step_times,
        num_parameters=read_bytes // itemsize,
        weight_bytes=read_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token(itemsize),
        largest_chunk=resolved.max_num_batched_tokens,
        context_per_draft=1.0 if stores.device.device.type == "cpu" else 0.0,
    )
    if resolved.num_host_blocks:
        costs.set_transfer(measure_transfer(stores))
    return costs


def _weight_usage(
    config: EngineConfig, checkpoint: Checkpoint, model: Decoder, weights: DecoderWeights, dtype: torch.dtype
) -> WeightUsage:
    """After packing: kernels may keep a matrix as stored, quantize it, or convert it to the dtype."""
    name, encodings = str(dtype).removeprefix("torch."), Counter[str]()
    for matrix in model.matrices:
        encodings.update([name] if isinstance(matrix, torch.Tensor) else matrix.encodings)
    vectors = _num_weight_bytes(weights) - sum(each.nbytes for each in _matrices(weights))
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


def _describe_cache(resolved: ResolvedConfig) -> str:
    text = f"{resolved.kv_bytes / 2**30:.2f} GiB → {resolved.num_blocks * resolved.block_size:,} tokens"
    if resolved.num_host_blocks:
        text += f" · host {resolved.num_host_blocks * resolved.block_size:,} tokens"
    return text


def _check_dtype(config: EngineConfig, checkpoint: Checkpoint, dtype: str) -> None:
    if dtype == "float16" and checkpoint.spec.family.startswith("gemma"):
        raise ConfigError("Gemma's activations do not fit float16; use --dtype bfloat16.", param="dtype")


def _allocate_weights(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    reporter: StartupReporter,
    choice: KernelChoice,
) -> UnfilledWeights:
    """A GGUF file's weights stay as they are stored where the kernels can read them, and nothing else is asked for."""
    stays = choice.stored_encodings and config.quantization != "none" and dtype is not torch.float32
    if checkpoint.source is not CheckpointSource.GGUF or not stays:
        return _allocate_tensors(config, checkpoint, dtype, device, reporter)
    stored = stored_weights(checkpoint, _gguf_dequantizer(), choice.stored_encodings, reporter.loading)
    return UnfilledWeights(stored, lambda: None)


def _gguf_dequantizer() -> Dequantizer:
    from quire.weights.gguf_dequantize import GgufDequantizer  # gguf is imported only for GGUF files

    return GgufDequantizer()


def _allocate_tensors(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, reporter: StartupReporter
) -> UnfilledWeights:
    if checkpoint.source is CheckpointSource.DUMMY:
        return dummy_weights(checkpoint.spec, dtype, device, config.seed)
    dequantizer = _gguf_dequantizer() if checkpoint.source is CheckpointSource.GGUF else None
    return unfilled_weights(checkpoint, dtype, device, reporter.loading, dequantizer)


def weights_of(checkpoint: Checkpoint, dtype: torch.dtype) -> DecoderWeights:
    """A second copy of a model's weights, for comparisons."""
    return _allocate_tensors(EngineConfig(), checkpoint, dtype, torch.device("cpu"), StartupReporter()).filled()


def _num_weight_bytes(weights: DecoderWeights) -> int:
    tensors = [weights.embedding, weights.final_norm]
    if weights.head is not weights.embedding:
        tensors.append(weights.head)
    for layer in weights.layers:
        tensors.extend(t for name in layer.__slots__ if (t := getattr(layer, name)) is not None)
    return sum(tensor.nbytes for tensor in tensors)
