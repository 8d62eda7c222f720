"""How many replicas a queue asks for over time, and what a cluster has room for."""

from dataclasses import fields
from typing import Any, cast

import pytest

from quire.cli import options
from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.stats import EngineStats
from quire.server.autoscaling import (
    UPSCALE_DELAY_S,
    Autoscaler,
    ReplicaLimits,
    ReplicaResources,
    check_room,
    needed_resources,
)

ROWS = 8


def stats(running: int, waiting: int = 0, held: int = 0) -> EngineStats:
    """With 100 blocks, of which so many are held."""
    counts: dict[str, Any] = {field.name: 0 for field in fields(EngineStats)}
    counts |= {"num_running": running, "num_waiting": waiting, "waiting_for": None, "captured_shapes": ()}
    counts |= {"num_blocks": 100, "num_free_blocks": 100 - held}
    return EngineStats(**cast(Any, counts))


def test_replicas_follow_the_queue_within_their_limits() -> None:
    scaler = Autoscaler(ReplicaLimits(1, 4, downscale_delay_s=60.0))

    def wanted(now_s: float, num_replicas: int, found: EngineStats | None) -> int:
        return scaler.wanted(num_replicas, ROWS * num_replicas, found, now_s)

    assert wanted(0.0, 1, stats(8, waiting=3)) == 1, "a burst"
    assert wanted(1.0, 1, stats(8)) == 1
    assert wanted(2.0, 1, stats(8, waiting=3)) == 1
    assert wanted(2.0 + UPSCALE_DELAY_S, 1, stats(8, waiting=3)) == 2
    assert wanted(10.0, 2, stats(16, waiting=100)) == 2
    assert wanted(10.0 + UPSCALE_DELAY_S, 2, stats(16, waiting=100)) == 4, "not more than twice as many"
    assert wanted(20.0, 4, stats(32, waiting=100)) == 4
    assert wanted(20.0 + UPSCALE_DELAY_S, 4, stats(32, waiting=100)) == 4, "the limit"
    assert wanted(100.0, 4, stats(10)) == 4
    assert wanted(150.0, 4, stats(20)) == 4, "three replicas would be full"
    assert wanted(170.0, 4, stats(10)) == 4, "needed in between"
    assert wanted(230.0, 4, stats(10)) == 3
    assert wanted(231.0, 3, stats(0, held=60)) == 3, "of blocks, two would be full"
    assert wanted(400.0, 3, stats(0, held=60)) == 3
    assert wanted(401.0, 1, stats(0)) == 1
    assert wanted(999.0, 1, stats(0)) == 1, "the fewest"
    assert wanted(1000.0, 0, None) == 1, "none is ready"


def test_a_replica_needs_a_gpu_for_each_rank_and_a_cpu_for_each_thread() -> None:
    cpus, gpus = {"CPU": 8.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 2.0}
    divided = EngineConfig(threads=2, tensor_parallel_size=2)
    assert needed_resources(divided, [cpus]) == (2, 0)
    assert needed_resources(divided, [cpus, gpus]) == (2, 2)
    assert needed_resources(EngineConfig(device="cpu"), [gpus]) == (1, 0)
    assert needed_resources(EngineConfig(device="cuda"), [cpus]) == (1, 1)
    check_room(ReplicaResources(4, 1), [cpus, gpus], ReplicaLimits(2, 8))


def test_without_ray_the_flag_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict.fromkeys(("min_replicas", "downscale_delay_s", "prefill_engines", "kv_events", "record"))
    monkeypatch.setattr(options, "_is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r'--ray needs ray: pip install "quire\[ray\]"'):
        options.read_replica_limits({**given, "ray": True, "replicas": 1, "max_replicas": 4})
    monkeypatch.setattr(options, "_is_installed", lambda name: True)
    assert options.read_replica_limits({**given, "ray": True, "replicas": 1, "max_replicas": 4}) == (1, 4, 300.0)
    assert options.read_replica_limits({**given, "ray": False, "replicas": 2, "max_replicas": None}) is None


def test_a_cluster_without_room_is_refused_in_one_sentence() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 16.0, "GPU": 1.0}]
    with pytest.raises(ConfigError, match=r"needs 1 CPU and 2 GPUs on one node, .* at most 16 CPUs and 1 GPUs each"):
        check_room(ReplicaResources(1, 2), nodes, ReplicaLimits())
    with pytest.raises(ConfigError, match=r"needs 1 CPU and 1 GPU on one node, .* at most 0 CPUs and 0 GPUs"):
        check_room(ReplicaResources(1, 1), [], ReplicaLimits())
    with pytest.raises(ConfigError, match=r"--min-replicas is 4, .* room for 2, of 8 CPUs each: use --min-replicas 2"):
        check_room(ReplicaResources(8, 0), nodes, ReplicaLimits(4, 4))
    check_room(ReplicaResources(8, 0), nodes, ReplicaLimits(1, 4), prefill_engines=1)
    with pytest.raises(
        ConfigError, match=r"--min-replicas is 2 and --prefill-engines 1, .* room for 2 engines, of 8 CPUs"
    ):
        check_room(ReplicaResources(8, 0), nodes, ReplicaLimits(2, 4), prefill_engines=1)
