"""The ranks of an engine, tensor and pipeline parallel: started by rank 0, and built in their own processes.

Rank 0 calls `build`, each other rank `build_rank`. Both load, run their first steps and follow plans in the same order,
since a collective waits for all. On GPUs, rank r has the r-th of those that this process sees: the process of a rank
above 0 sees no other.
"""

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.core.model import ModelSpec
from quire.core.process import num_cores
from quire.core.sharding import Shard
from quire.core.shared_blocks import map_part
from quire.core.step import Runner
from quire.core.worker_process import receive_frame, send_frame
from quire.dist.process_group import NcclGroup, ProcessGroup, new_rendezvous
from quire.dist.symmetric_group import SymmetricGroup
from quire.engine.build_runner import DTYPES, allocate_weights, choose_kernels, make_runner, make_stores
from quire.engine.first_steps import dry_run, first_steps, start_precompilation
from quire.engine.machine import check_gpus, gpu_names, inspect
from quire.engine.open_model import find_checkpoint, refuse_stages_on_gpus
from quire.engine.prefix_transfer import EngineRole
from quire.engine.rank_processes import GpuMemory, RankProcesses, RankStart, read_sizes
from quire.engine.resolved_config import MachineInfo, ResolvedConfig
from quire.engine.startup import StartupReporter
from quire.kernels.select import KernelChoice
from quire.layers.parallel import StageEnds
from quire.models.decoder import Decoder
from quire.runner.model_runner import ModelRunner
from quire.runner.pipeline_parallel import PipelineParallelRunner, StageRunner, follow_stage, full_answer
from quire.runner.tensor_parallel import TensorParallelRunner, follow, summary

_log = logging.getLogger(__name__)
_BACKENDS = {"gloo": ProcessGroup, "nccl": NcclGroup, "symmetric": SymmetricGroup}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class RankGroups(NamedTuple):
    """How a rank reaches others: those of its stage, and those of the stages beside it."""

    group: ProcessGroup | None = None
    ends: StageEnds | None = None

    def capturing(self, choice: KernelChoice) -> KernelChoice:
        """The kernels, whose steps are captured only where the collectives between them can be."""
        return choice if self.group is None or self.group.capturable else choice._replace(capturable=False)


def join_groups(shard: Shard, spec: ModelSpec, rendezvous: int, backend: str) -> RankGroups:
    """Waits for the other ranks."""
    group = _BACKENDS[backend](shard, rendezvous, f"stage {shard.stage}") if shard.size > 1 else None
    if shard.num_stages == 1:
        return RankGroups(group)
    all_ranks = ProcessGroup(Shard(shard.number, shard.num_ranks), rendezvous, "pipeline")
    return RankGroups(group, StageEnds(shard, spec.hidden_size, all_ranks))


class Ranks:
    """Starts the other ranks, which load their weights while rank 0 loads its own."""

    def __init__(
        self, config: EngineConfig, dtype: str, device: torch.device, role: EngineRole, shared_gpu: str | None = None
    ) -> None:
        """`shared_gpu`: for tests, the backend ("gloo" or "symmetric") of ranks that are all on one GPU."""
        self.shard = Shard.of(0, config.tensor_parallel_size, config.pipeline_parallel_size)
        gpus = None
        if device.type == "cuda":
            refuse_stages_on_gpus(config)
            if shared_gpu is None:
                num_gpus, visible = torch.cuda.device_count(), os.environ.get(_VISIBLE)
                check_gpus(self.shard.num_ranks, num_gpus, visible)
                gpus = gpu_names(num_gpus, visible)
        elif self.shard.num_ranks > num_cores():
            _log.warning(
                "The model is divided among %s processes, and this one may use %s CPUs: ranks that take turns on a CPU "
                "make each step slower.",
                self.shard.num_ranks,
                num_cores(),
            )
        self._has_own_gpus = gpus is not None
        self._backend = shared_gpu or ("gloo" if gpus is None else "nccl")
        self._rendezvous = new_rendezvous()
        self.processes = RankProcesses(self.shard.num_ranks, self._rendezvous, gpus=gpus)
        self.processes.send_start(config, dtype, device.type, self._backend, role)

    def wait_loaded(self, device: torch.device) -> MachineInfo:
        """What one rank may use, when all have allocated their weights: the GPU that has the least free memory, or a
        share of the memory that the ranks have in common."""
        others, machine = self.processes.wait_loaded(), inspect(device)
        if self._has_own_gpus:
            free, total = min([GpuMemory(machine.free_bytes, machine.total_bytes), *others])
            return replace(machine, free_bytes=free, total_bytes=total)
        num_ranks = self.shard.num_ranks
        return replace(
            machine, free_bytes=machine.free_bytes // num_ranks, total_bytes=machine.total_bytes // num_ranks
        )

    def join(self, resolved: ResolvedConfig, spec: ModelSpec, choice: KernelChoice) -> tuple[RankGroups, KernelChoice]:
        """When the sizes are known. With the kernels, whose steps may not be captured now."""
        self.processes.send_sizes(resolved)
        groups = join_groups(self.shard, spec, self._rendezvous, self._backend)
        if isinstance(groups.group, NcclGroup):  # gloo finds closed connections by itself
            self.processes.call_at_end(groups.group.close)
        return groups, groups.capturing(choice)

    def runner(self, local: ModelRunner | StageRunner) -> "TensorParallelRunner | PipelineParallelRunner":
        """When all ranks have run their first steps: from now on they must send heartbeats."""
        self.processes.note_ready()
        connections, why_lost = self.processes.connections, self.processes.why_lost
        if isinstance(local, StageRunner):
            return PipelineParallelRunner(local, connections, self.shard, why_lost)
        return TensorParallelRunner(local, connections, why_lost, local)


class RankCheck:
    """What the engine asks between steps: whether CUDA graphs are missing, and whether a rank has ended."""

    def __init__(self, local: ModelRunner | StageRunner, computes: Runner, ranks: Ranks) -> None:
        self.launches = local.launches
        self._local, self._computes = local, computes
        self._ranks = ranks

    @property
    def prepared(self) -> bool:
        """Raises `RankFailed`, which ends the engine."""
        self._ranks.processes.check()
        return isinstance(self._local, StageRunner) or self._local.prepared

    def prepare(self) -> None:
        assert isinstance(self._computes, TensorParallelRunner), "no pipeline stage is captured"
        self._computes.prepare()


def _map_blocks(message: Any, shard: Shard) -> NDArray[np.uint8]:
    """This rank's KV blocks, which rank 0 has allocated for all."""
    pid, descriptor, block_bytes = message["blocks"]
    return map_part((pid, descriptor), shard.rank, shard.size, block_bytes)


def build_rank(start: RankStart, leader: socket.socket, rendezvous: int) -> Callable[[], None] | None:
    """A rank above 0: follows rank 0 until the connection is closed. None: it was closed already."""
    config, shard, backend, _ = start
    device, dtype, reporter = torch.device(config.device), DTYPES[config.dtype], StartupReporter()
    precompilation = start_precompilation(device, reporter)
    _, checkpoint = find_checkpoint(config)
    spec = shard.spec(checkpoint.spec)
    choice = choose_kernels(config, spec, dtype, device, reporter)
    weights, fill = allocate_weights(config, checkpoint, dtype, device, reporter, choice, shard)
    if precompilation is None:
        fill()
    machine = inspect(device)
    send_frame(leader, {"loaded": GpuMemory(machine.free_bytes, machine.total_bytes)})
    sizes = receive_frame(leader)
    if sizes is None:
        return None
    resolved = read_sizes(sizes)
    groups = join_groups(shard, spec, rendezvous, backend)
    choice = groups.capturing(choice)
    model = Decoder(spec, weights, choice.kernels, resolved.max_model_len, *groups)
    memory = None
    if start.role is not EngineRole.WHOLE:
        if (blocks := receive_frame(leader)) is None:
            return None
        memory = _map_blocks(blocks, shard)
    stores = make_stores(model, resolved, choice, device, memory=memory)
    runner = make_runner(model, stores, resolved, choice, serving=False, planted=False, shard=shard, group=groups.group)
    if precompilation is not None:
        fill()
        model.refresh_norms(weights)
        if receive_frame(leader) is None:  # otherwise rank 0 has compiled the kernels: they are on disk
            return None
        threads = max(1, machine.num_cores // shard.num_ranks)
        with precompilation.compiling(partial(dry_run, model, stores, runner, groups.group), threads, reporter):
            pass
    first_steps(model, stores, runner, choice, reporter)
    if isinstance(runner, StageRunner):
        return partial(follow_stage, runner, leader)
    answer = full_answer if shard.num_stages > 1 and shard.rank == 0 else summary
    return partial(follow, runner, leader, answer, runner, run_ahead=device.type == "cuda")
