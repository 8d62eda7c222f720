"""The tensor-parallel ranks of an engine: started by rank 0, and built in their own processes.

Rank 0 calls `build`, each other rank `build_rank`. Both load, run their first steps and follow plans in the same order,
since a collective waits for all.
"""

import logging
import socket
import time
from dataclasses import replace

import torch

from quire.config import EngineConfig
from quire.core.sharding import Shard
from quire.core.worker_process import receive_frame, send_frame
from quire.dist.process_group import ProcessGroup, new_rendezvous
from quire.engine.build_runner import DTYPES, allocate_weights, choose_kernels, make_runner, make_stores
from quire.engine.machine import inspect, num_cores
from quire.engine.open_model import find_checkpoint, on_gpus_refused
from quire.engine.rank_processes import RankProcesses, read_sizes
from quire.engine.resolved_config import MachineInfo, ResolvedConfig
from quire.engine.startup import StartupReporter
from quire.models.decoder import Decoder
from quire.runner.graph_shapes import LaunchCounts
from quire.runner.model_runner import ModelRunner
from quire.runner.tensor_parallel import TensorParallelRunner
from quire.runner.warmup import time_steps, warm_up

_log = logging.getLogger(__name__)


class TensorParallelRanks:
    """Starts the ranks, which load their weights while rank 0 loads its own."""

    def __init__(self, config: EngineConfig, dtype: str, device: torch.device) -> None:
        self._shard = Shard(0, config.tensor_parallel_size)
        if device.type != "cpu":
            raise on_gpus_refused(self._shard.size)
        if self._shard.size > num_cores():
            _log.warning(
                "tensor_parallel_size is %s, and this process may use %s CPUs: ranks that take turns on a CPU make "
                "each step slower.",
                self._shard.size,
                num_cores(),
            )
        self._rendezvous = new_rendezvous()
        self.processes = RankProcesses(self._shard.size, self._rendezvous)
        self.processes.send_start(config, dtype)

    def wait_loaded(self, device: torch.device) -> MachineInfo:
        """The machine, with the share of its free memory that one rank may use, when all have loaded their weights."""
        self.processes.wait_loaded()
        machine = inspect(device)
        return replace(machine, free_bytes=machine.free_bytes // self._shard.size)

    def join(self, resolved: ResolvedConfig) -> ProcessGroup:
        self.processes.send_sizes(resolved)
        return ProcessGroup(self._shard, self._rendezvous)

    def runner(self, local: ModelRunner) -> TensorParallelRunner:
        """When all ranks have run their first steps: from now on they must send heartbeats."""
        self.processes.note_ready()
        return TensorParallelRunner(local, self.processes.connections, self.processes.why_lost)


class RankCheck:
    """What the engine asks between steps: nothing is prepared while it is idle, but a rank may have ended."""

    def __init__(self, local: ModelRunner, ranks: TensorParallelRanks) -> None:
        self._local = local
        self._ranks = ranks

    @property
    def launches(self) -> LaunchCounts:
        return self._local.launches

    @property
    def prepared(self) -> bool:
        """Raises `RankFailed`, which ends the engine."""
        self._ranks.processes.check()
        return True

    def prepare(self) -> None:
        """Nothing is captured on a CPU."""


def build_rank(config: EngineConfig, shard: Shard, leader: socket.socket, rendezvous: int) -> ModelRunner | None:
    """The runner of a rank above 0. None: rank 0 has closed the connection."""
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
    model = Decoder(spec, weights, choice.kernels, resolved.max_model_len, ProcessGroup(shard, rendezvous))
    stores = make_stores(model, resolved, choice, device)
    runner = make_runner(model, stores, resolved, choice, serving=False, planted=False)
    warm_up(model, stores)
    time_steps(model, stores, time.monotonic)
    return runner
