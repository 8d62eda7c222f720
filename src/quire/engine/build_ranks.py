"""The ranks of an engine, tensor and pipeline parallel: started by rank 0, and built in their own processes.

Rank 0 calls `build`, each other rank `build_rank`. Both load, run their first steps and follow plans in the same order,
since a collective waits for all.
"""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from quire.config import EngineConfig
from quire.core.model import ModelSpec
from quire.core.sharding import Shard
from quire.core.step import Runner
from quire.core.worker_process import receive_frame, send_frame
from quire.dist.process_group import ProcessGroup, new_rendezvous
from quire.engine.build_runner import DTYPES, allocate_weights, choose_kernels, make_runner, make_stores
from quire.engine.machine import inspect, num_cores
from quire.engine.open_model import find_checkpoint, refuse_ranks_on_gpus
from quire.engine.rank_processes import RankProcesses, read_sizes
from quire.engine.resolved_config import MachineInfo, ResolvedConfig
from quire.engine.startup import StartupReporter
from quire.layers.parallel import StageEnds
from quire.models.decoder import Decoder
from quire.runner.graph_shapes import LaunchCounts
from quire.runner.model_runner import ModelRunner
from quire.runner.pipeline_parallel import PipelineParallelRunner, StageRunner, follow_stage, full_answer
from quire.runner.tensor_parallel import TensorParallelRunner, follow, summary
from quire.runner.warmup import time_steps, warm_up

_log = logging.getLogger(__name__)


class RankGroups(NamedTuple):
    """How a rank reaches others: those of its stage, and those of the stages beside it."""

    group: ProcessGroup | None = None
    ends: StageEnds | None = None


def join_groups(shard: Shard, spec: ModelSpec, rendezvous: int) -> RankGroups:
    """Waits for the other ranks."""
    group = ProcessGroup(shard, rendezvous, f"stage {shard.stage}") if shard.size > 1 else None
    if shard.num_stages == 1:
        return RankGroups(group)
    all_ranks = ProcessGroup(Shard(shard.number, shard.num_ranks), rendezvous, "pipeline")
    return RankGroups(group, StageEnds(shard, spec.hidden_size, all_ranks))


class Ranks:
    """Starts the other ranks, which load their weights while rank 0 loads its own."""

    def __init__(self, config: EngineConfig, dtype: str, device: torch.device) -> None:
        self.shard = Shard.of(0, config.tensor_parallel_size, config.pipeline_parallel_size)
        if device.type != "cpu":
            refuse_ranks_on_gpus(config)
        if self.shard.num_ranks > num_cores():
            _log.warning(
                "The model is divided among %s processes, and this one may use %s CPUs: ranks that take turns on a CPU "
                "make each step slower.",
                self.shard.num_ranks,
                num_cores(),
            )
        self._rendezvous = new_rendezvous()
        self.processes = RankProcesses(self.shard.num_ranks, self._rendezvous)
        self.processes.send_start(config, dtype)

    def wait_loaded(self, device: torch.device) -> MachineInfo:
        """The machine, with the share of its free memory that one rank may use, when all have loaded their weights."""
        self.processes.wait_loaded()
        machine = inspect(device)
        return replace(machine, free_bytes=machine.free_bytes // self.shard.num_ranks)

    def join(self, resolved: ResolvedConfig, spec: ModelSpec) -> RankGroups:
        self.processes.send_sizes(resolved)
        return join_groups(self.shard, spec, self._rendezvous)

    def runner(self, local: ModelRunner | StageRunner) -> Runner:
        """When all ranks have run their first steps: from now on they must send heartbeats."""
        self.processes.note_ready()
        connections, why_lost = self.processes.connections, self.processes.why_lost
        if isinstance(local, StageRunner):
            return PipelineParallelRunner(local, connections, self.shard, why_lost)
        return TensorParallelRunner(local, connections, why_lost)


class RankCheck:
    """What the engine asks between steps: nothing is prepared while it is idle, but a rank may have ended."""

    def __init__(self, launches: LaunchCounts, ranks: Ranks) -> None:
        self.launches = launches
        self._ranks = ranks

    @property
    def prepared(self) -> bool:
        """Raises `RankFailed`, which ends the engine."""
        self._ranks.processes.check()
        return True

    def prepare(self) -> None:
        """Nothing is captured on a CPU."""


def build_rank(config: EngineConfig, shard: Shard, leader: socket.socket, rendezvous: int) -> Callable[[], None] | None:
    """A rank above 0: follows rank 0 until the connection is closed. None: it was closed already."""
    device, dtype, reporter = torch.device("cpu"), DTYPES[config.dtype], StartupReporter()
    _, checkpoint = find_checkpoint(config)
    spec = shard.spec(checkpoint.spec)
    choice = choose_kernels(config, spec, dtype, device, reporter)
    weights = allocate_weights(config, checkpoint, dtype, device, reporter, choice, shard).filled()
    send_frame(leader, {"loaded": True})
    sizes = receive_frame(leader)
    if sizes is None:
        return None
    resolved = read_sizes(sizes)
    model = Decoder(spec, weights, choice.kernels, resolved.max_model_len, *join_groups(shard, spec, rendezvous))
    stores = make_stores(model, resolved, choice, device)
    runner = make_runner(model, stores, resolved, choice, serving=False, planted=False, shard=shard)
    warm_up(model, stores, samples=shard.is_last)
    time_steps(model, stores, time.monotonic, samples=shard.is_last)
    if isinstance(runner, StageRunner):
        return partial(follow_stage, runner, leader)
    sends_results = shard.num_stages > 1 and shard.rank == 0
    return partial(follow, runner, leader, full_answer if sends_results else summary)
