"""The composition root: from settings to a running engine, phase by phase."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO

import torch

from quire.config import EngineConfig
from quire.core.model import ModelSpec
from quire.core.sharding import Shard
from quire.core.step import Runner
from quire.engine.block_transport import LOCAL_TRANSPORT, BlockTransport
from quire.engine.build_draft import BuiltDraft, LoadedDraft, LoadedHead, build_draft, choose_draft_kernels, load_draft
from quire.engine.build_ranks import RankCheck, RankGroups, Ranks
from quire.engine.build_runner import (
    DTYPES,
    allocate_weights,
    block_layout,
    check_role,
    choose_dtype,
    choose_kernels,
    kv_token_bytes,
    make_runner,
    make_stores,
    num_weight_bytes,
    weight_usage,
)
from quire.engine.build_scheduler import (
    captured_sizes,
    first_costs,
    load_vocabulary,
    make_grammars,
    make_scheduler,
    make_validator,
)
from quire.engine.engine import Engine
from quire.engine.first_steps import Precompilation, dry_run, first_steps, start_precompilation
from quire.engine.machine import check_mps_share, inspect, lower_mps_priority, pick_device
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.prefix_transfer import DEVICE_COPY_BYTES, EngineRole
from quire.engine.resolved_config import MachineInfo, ResolvedConfig, resolve
from quire.engine.startup import StartupReporter
from quire.engine.stats import EngineInfo, MemoryUsage, WeightUsage, account_memory
from quire.formats.checkpoint import Checkpoint
from quire.kernels.select import KernelChoice
from quire.models.decoder import Decoder
from quire.models.interface import KvGeometry
from quire.models.parameters import DecoderWeights
from quire.runner.cuda_graphs import StepTimes
from quire.runner.cuda_ipc import PeerStores
from quire.runner.kv_store import KvStores
from quire.runner.model_runner import ModelRunner
from quire.runner.pipeline_parallel import StageRunner
from quire.runner.warmup import measure_transfer
from quire.sched.batching import MAX_STEP_S
from quire.sched.cost_model import DRAFTS_DIFFER, CostTable
from quire.sched.pacing import usual_itl_s
from quire.sched.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer
from quire.weights.allocate import UnfilledWeights

if TYPE_CHECKING:
    from quire.engine.grammar_masks import GrammarMasks


# Keys and values that a draft reads again, as a share of the row's: 0.28 where the native kernels compute a greedy row
# (at 4,096 keys), 1 for rows that are drawn. One number for both.
_CPU_CONTEXT_PER_DRAFT = 0.4
# Prompts are computed by strips of twelve tokens: those of two to six take up to twice as long for each.
_CPU_DRAFTS_DEARER = 2.0


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what it was built from."""

    opened: OpenedModel
    engine: Engine
    resolved: ResolvedConfig
    machine: MachineInfo
    weights: WeightUsage
    kernels: str
    memory: MemoryUsage
    attention: tuple[str, ...] = ()  # why each attention backend was chosen, where there is a choice

    @property
    def name(self) -> str:
        return self.opened.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.opened.tokenizer

    @property
    def checkpoint(self) -> Checkpoint:
        return self.opened.checkpoint

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
            tensor_parallel_size=resolved.tensor_parallel_size,
            pipeline_parallel_size=resolved.pipeline_parallel_size,
        )


def _model_line(config: EngineConfig, spec: ModelSpec) -> str:
    context = min(spec.max_positions, config.max_model_len or spec.max_positions)
    return f"context {context:,} · {spec.num_layers} layers · {spec.family}"


def build(
    config: EngineConfig,
    reporter: StartupReporter | None = None,
    observe: Callable[[Runner], Runner] = lambda runner: runner,
    *,
    serving: bool = False,
    opened: OpenedModel | None = None,
    planted_drafts: bool = False,
    shared_gpu: str | None = None,
    journal: BinaryIO | None = None,
    role: EngineRole = EngineRole.WHOLE,
    transport: BlockTransport = LOCAL_TRANSPORT,
) -> BuiltEngine:
    """Find the model, load it, size the cache. Raises `QuireError` if model, settings or machine do not allow it.

    A benchmark may observe the runner, and plant the acceptance of drafts. With `serving`, prefill is limited by the
    ITL target. `opened`: the model, if found before; `shared_gpu`: see `Ranks`; `journal`: of the scheduler's calls."""
    reporter = reporter or StartupReporter()
    device = _choose_device(config, role, transport)
    precompilation = start_precompilation(device, reporter)
    opened = opened or open_model(config, reporter.fetching)
    name, checkpoint = opened.name, opened.checkpoint
    dtype = choose_dtype(config, checkpoint, device)
    shard = Shard.of(0, config.tensor_parallel_size, config.pipeline_parallel_size)
    ranks = Ranks(config, dtype, device, role, shared_gpu) if shard.num_ranks > 1 else None
    spec = shard.spec(checkpoint.spec)
    reporter.done("config", _model_line(config, spec))
    choice = choose_kernels(config, spec, DTYPES[dtype], device, reporter)
    draft_choice = choose_draft_kernels(config, opened, DTYPES[dtype], device)
    grammars = make_grammars(opened, spec.vocab_size)
    unfilled = allocate_weights(config, checkpoint, DTYPES[dtype], device, reporter, choice, shard)
    weights = unfilled.weights
    if precompilation is None:  # free memory is measured after the weights are loaded and packed
        unfilled.fill()
    loaded_draft = load_draft(config, opened, draft_choice, DTYPES[dtype], device, reporter)
    machine = inspect(device) if ranks is None else ranks.wait_loaded(device)
    resolved = resolve(config, spec, _kv_bytes(spec, choice, DTYPES[dtype], loaded_draft), machine, serving=serving)
    groups, choice = (RankGroups(), choice) if ranks is None else ranks.join(resolved, spec, choice)
    model = Decoder(spec, weights, choice.kernels, resolved.max_model_len, *groups)
    usage = weight_usage(config, checkpoint, model, weights, DTYPES[dtype])
    if precompilation is None:
        reporter.done("weights", usage.describe())
    stores = _make_stores(model, resolved, choice, device, role, ranks)
    draft = build_draft(config, loaded_draft, model, resolved, device, reporter)
    drafts = None if draft is None else draft.config
    runner = make_runner(model, stores, resolved, choice, serving, planted_drafts, shard, drafts, groups.group)
    reporter.done("kv cache", _describe_cache(resolved, model.kv_geometry))
    if precompilation is not None:
        with _compile(precompilation, partial(dry_run, model, stores, runner, groups.group), ranks, machine, reporter):
            _load_weights(unfilled, grammars if serving else None)
            model.refresh_norms(weights)
            reporter.done("weights", usage.describe())
    step_times = first_steps(model, stores, runner, choice, reporter)
    costs = _costs(model.kv_geometry, weights, DTYPES[dtype].itemsize, resolved, stores, step_times, draft, runner)
    scheduler = _scheduler(config, resolved, costs, step_times, machine, serving, journal)
    engine = _engine(config, opened, resolved, scheduler, runner, ranks, observe, grammars)
    _connect(engine, role, transport, stores, block_layout(name, stores, usage.name, shard.size), runner)
    memory = _memory_usage(usage, draft, resolved, runner.launches.captured_bytes, inspect(device), reporter)
    return BuiltEngine(opened, engine, resolved, machine, usage, choice.reason, memory, choice.attention)


def _make_stores(
    model: Decoder,
    resolved: ResolvedConfig,
    choice: KernelChoice,
    device: torch.device,
    role: EngineRole,
    ranks: Ranks | None,
) -> KvStores:
    """Those of rank 0; it sends the other ranks of an engine with a role where theirs are."""
    stores = make_stores(model, resolved, choice, device, role)
    if ranks is not None and stores.shared is not None:
        ranks.processes.send_blocks(stores.shared)
    return stores


def _choose_device(config: EngineConfig, role: EngineRole, transport: BlockTransport) -> torch.device:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if role is EngineRole.PREFILL:
        lower_mps_priority(os.environ)
    device = pick_device(config.device)
    check_role(role, config, device, transport)
    check_mps_share(os.environ, device)
    return device


@contextmanager
def _compile(
    precompilation: Precompilation,
    launched: Callable[[], None],
    ranks: Ranks | None,
    machine: MachineInfo,
    reporter: StartupReporter,
) -> Iterator[None]:
    """Compile what is launched while the block runs. The other ranks find it on disk then."""
    with precompilation.compiling(launched, machine.num_cores, reporter):
        yield
    if ranks is not None:
        ranks.processes.send_compiled()


def _connect(
    engine: Engine,
    role: EngineRole,
    transport: BlockTransport,
    stores: KvStores,
    layout: str,
    runner: ModelRunner | StageRunner,
) -> None:
    """Let a prefill engine lease its blocks, and a decode engine copy those of others."""
    if role is EngineRole.WHOLE:
        return
    device = stores.device.device
    if role is EngineRole.PREFILL:
        assert stores.shared is not None
        # Cached blocks are computed, but one that returns from the host may still be on its way.
        returns = stores.host is not None and device.type == "cuda"
        settle = torch.cuda.current_stream(device).synchronize if returns else None
        if device.type == "cpu":
            transport.offer(stores.shared)
        engine.export_prefixes(layout, stores.shared, settle)
        return
    note_imported = runner.note_imported if isinstance(runner, ModelRunner) else None
    if device.type == "cuda":
        peers = PeerStores(stores)
        engine.import_prefixes(layout, peers.source, note_imported, peers.close_ended, DEVICE_COPY_BYTES)
    else:
        blocks = stores.block_bytes if stores.shared is None else stores.shared.blocks  # of all ranks
        engine.import_prefixes(layout, transport.reader(blocks, time.monotonic), note_imported)


def _load_weights(unfilled: UnfilledWeights, to_preload: "GrammarMasks | None") -> None:
    """Load the weights, which takes a GPU seconds; a server reads the grammar vocabulary in a thread meanwhile. Not
    earlier: compile workers are forked before."""
    if to_preload is not None:
        Thread(target=load_vocabulary, args=(to_preload,), name="quire-vocabulary", daemon=True).start()
    unfilled.fill()


def _scheduler(
    config: EngineConfig,
    resolved: ResolvedConfig,
    costs: CostTable,
    step_times: StepTimes | None,
    machine: MachineInfo,
    serving: bool,
    journal: BinaryIO | None,
) -> Scheduler:
    """A server has latency targets where steps were timed, and on a CPU limited step times. With CUDA graphs the
    scheduler gets the captured sizes."""
    itl_s = usual_itl_s(step_times.decode_s) if serving and step_times is not None else None
    if machine.device == "cpu":
        longest_s = MAX_STEP_S if serving else None
        return make_scheduler(config, resolved, costs, itl_s, max_step_s=longest_s, journal=journal)
    if step_times is None:  # no captured graphs, which verify drafts
        return make_scheduler(config, replace(resolved, drafters=()), costs, journal=journal)
    sizes = captured_sizes(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    return make_scheduler(config, resolved, costs, itl_s, sizes, journal=journal)


def _engine(
    config: EngineConfig,
    opened: OpenedModel,
    resolved: ResolvedConfig,
    scheduler: Scheduler,
    runner: ModelRunner | StageRunner,
    ranks: Ranks | None,
    observe: Callable[[Runner], Runner],
    grammars: "GrammarMasks | None",
) -> Engine:
    vocab_size = opened.checkpoint.spec.vocab_size
    computes: Runner
    preparing: ModelRunner | RankCheck
    if ranks is not None:
        computes = ranks.runner(runner)
        preparing = RankCheck(runner, computes, ranks)
    else:
        assert isinstance(runner, ModelRunner), "a pipeline has several ranks"
        computes = preparing = runner
    return Engine(
        scheduler,
        observe(computes),
        make_validator(vocab_size, opened.end_ids, resolved),
        depth=resolved.run_ahead,
        seed=config.seed,
        clock=time.monotonic,
        grammars=grammars,
        preparing=preparing,
        span=torch.cuda.nvtx.range if runner.device.type == "cuda" else None,
    )


def _kv_bytes(spec: ModelSpec, choice: KernelChoice, dtype: torch.dtype, draft: LoadedDraft | LoadedHead | None) -> int:
    """Of one token: keys and values of the model and of its draft model."""
    return kv_token_bytes(spec, choice, dtype) + (0 if draft is None else draft.token_bytes)


def _memory_usage(
    usage: WeightUsage,
    draft: BuiltDraft | None,
    resolved: ResolvedConfig,
    graph_bytes: int,
    now: MachineInfo,
    reporter: StartupReporter,
) -> MemoryUsage:
    weight_bytes = usage.num_bytes + (0 if draft is None else draft.weight_bytes)
    memory = MemoryUsage(weights=weight_bytes, kv=resolved.kv_bytes)
    if now.device != "cpu":
        memory = account_memory(
            weights=weight_bytes,
            kv=resolved.kv_bytes,
            graphs=graph_bytes,
            workspace=resolved.workspace_bytes,
            free=now.free_bytes,
            total=now.total_bytes,
        )
    reporter.done("memory", memory.describe(resolved.num_ranks))
    return memory


def _costs(
    geometry: KvGeometry,
    weights: DecoderWeights,
    itemsize: int,
    resolved: ResolvedConfig,
    stores: KvStores,
    step_times: StepTimes | None,
    draft: BuiltDraft | None,
    runner: ModelRunner | StageRunner,
) -> CostTable:
    """The embedding is looked up, not multiplied by, unless it is the head too."""
    draft_times = None if draft is None else draft.times
    if draft is not None and draft_times is None and isinstance(runner, ModelRunner):
        draft_times = runner.draft_times()
    read_bytes, on_cpu = num_weight_bytes(weights), stores.device.device.type == "cpu"
    if weights.head is not weights.embedding:
        read_bytes -= weights.embedding.nbytes
    costs = first_costs(
        step_times,
        num_parameters=read_bytes // itemsize,
        weight_bytes=read_bytes,
        kv_bytes_per_token=geometry.token_bytes,
        largest_chunk=resolved.max_num_batched_tokens,
        context_per_draft=_CPU_CONTEXT_PER_DRAFT if on_cpu else 0.0,
        drafts_dearer=_CPU_DRAFTS_DEARER if on_cpu else DRAFTS_DIFFER,
        draft_times=draft_times,
    )
    if resolved.num_host_blocks:
        all_stores = [stores] if draft is None else [stores, *draft.config.all_stores]
        costs.set_transfer(sum(measure_transfer(each) for each in all_stores))
    return costs


def _describe_cache(resolved: ResolvedConfig, geometry: KvGeometry) -> str:
    tokens = f"{resolved.num_blocks * resolved.block_size:,} tokens in {geometry.describe()}"
    text = f"{resolved.kv_bytes / 2**30:.2f} GiB → {tokens}"
    if resolved.num_host_blocks:
        text += f" · host {resolved.num_host_blocks * resolved.block_size:,} tokens"
    if resolved.num_ranks > 1:
        text += f", on each of {resolved.num_ranks} ranks"
    return text
