"""How many replicas a model needs: what its queue asks for, within limits; and how many of them a cluster has room for.

Requests that wait ask for more replicas, and rows and blocks that stay free for fewer. Does not depend on Ray.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.stats import EngineStats

UPSCALE_DELAY_S = 3.0  # requests must wait for so long: a burst is over before another engine has started
FULL = 0.7  # the most of its rows or blocks that a replica may use, for another one to be stopped


class ReplicaLimits(NamedTuple):
    """How many replicas there may be."""

    min_replicas: int = 1
    max_replicas: int = 1
    downscale_delay_s: float = 300.0  # a replica is stopped after so long without need of it: its cache is lost


class Autoscaler:
    """The number of replicas, from the statistics of their engines over time."""

    __slots__ = ("_idle_since_s", "_limits", "_waiting_since_s")

    def __init__(self, limits: ReplicaLimits) -> None:
        self._limits = limits
        self._waiting_since_s: float | None = None
        self._idle_since_s: float | None = None

    def wanted(self, num_replicas: int, num_rows: int, stats: EngineStats | None, now_s: float) -> int:
        """How many replicas there should be, where this number is ready and has these rows together."""
        limits = self._limits
        wanted = num_replicas
        if stats is None or not num_replicas:
            self._waiting_since_s = self._idle_since_s = None
        elif stats.num_waiting:
            self._idle_since_s = None
            if self._waiting_since_s is None:
                self._waiting_since_s = now_s
            elif now_s - self._waiting_since_s >= UPSCALE_DELAY_S:
                per_replica = max(stats.num_running / num_replicas, 1.0)
                wanted += min(math.ceil(stats.num_waiting / per_replica), num_replicas)  # at most twice as many
                self._waiting_since_s = None
        else:
            self._waiting_since_s = None
            if _usage(stats, num_rows) * num_replicas > FULL * (num_replicas - 1):
                self._idle_since_s = None
            elif self._idle_since_s is None:
                self._idle_since_s = now_s
            elif now_s - self._idle_since_s >= limits.downscale_delay_s:
                wanted -= 1
                self._idle_since_s = None
        return min(max(wanted, limits.min_replicas), limits.max_replicas)


def _usage(stats: EngineStats, num_rows: int) -> float:
    """Of the rows or of the KV blocks, whichever is scarcer."""
    held = stats.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks
    return max(stats.num_running / max(num_rows, 1), held / max(stats.num_blocks, 1))


class ReplicaResources(NamedTuple):
    """What one replica needs of a node, as Ray counts it."""

    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        cpus = f"{self.num_cpus} CPU{'s' * (self.num_cpus > 1)}"
        return f"{cpus} and {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}" if self.num_gpus else cpus

    def room(self, node: Mapping[str, float]) -> int:
        """Replicas that a node can have."""
        by_gpu = [int(node.get("GPU", 0)) // self.num_gpus] if self.num_gpus else []
        return min([int(node.get("CPU", 0)) // self.num_cpus, *by_gpu])


def needed_resources(config: EngineConfig, nodes: Iterable[Mapping[str, float]]) -> ReplicaResources:
    """Of one replica with these settings: a GPU for each rank, unless the model runs on CPUs; a CPU for each thread."""
    gpus = max((int(node.get("GPU", 0)) for node in nodes), default=0)
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    on_gpus = config.device == "cuda" or (config.device == "auto" and gpus > 0)
    return ReplicaResources(config.threads or 1, num_ranks if on_gpus else 0)


def check_room(
    needed: ReplicaResources, nodes: Iterable[Mapping[str, float]], limits: ReplicaLimits, prefill_engines: int = 0
) -> None:
    """Refuse replicas, and prefill engines beside them, for which the nodes of a cluster have too little."""
    nodes = list(nodes)
    room = sum(needed.room(node) for node in nodes)
    if room == 0:
        cpus, gpus = (max((int(node.get(kind, 0)) for node in nodes), default=0) for kind in ("CPU", "GPU"))
        raise ConfigError(
            f"A replica needs {needed} on one node, and the nodes of the Ray cluster have at most {cpus} CPUs and "
            f"{gpus} GPUs each: lower --tensor-parallel-size, --pipeline-parallel-size or --threads, use --device cpu, "
            f"or add a node with ray start.",
            param="ray",
        )
    if prefill_engines and room < limits.min_replicas + prefill_engines:
        raise ConfigError(
            f"--min-replicas is {limits.min_replicas} and --prefill-engines {prefill_engines}, and the Ray cluster has "
            f"room for {room} engines, of {needed} each: lower one of them, or add nodes with ray start.",
            param="prefill_engines",
        )
    if room < limits.min_replicas:
        raise ConfigError(
            f"--min-replicas is {limits.min_replicas}, and the Ray cluster has room for {room}, of {needed} each: use "
            f"--min-replicas {room}, or add nodes with ray start.",
            param="min_replicas",
        )
