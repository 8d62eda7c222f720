"""Several simulated engines: replicas, and prefill and decode engines, against times that are known."""

import numpy as np
import pytest

from quire.core.ids import RequestId
from quire.core.request import Request
from quire.core.sampling import RowSampling
from quire.kv.manager import KVManager
from quire.sched.audit import audit_rest
from quire.sched.cost_model import Constants, CostTable
from quire.sched.scheduler import Scheduler
from quire.sim.cluster import ClusterSimulation, LinkSpeed, PoolSizes, SplitPolicy
from quire.sim.simulator import SimulatedArrival, Simulation

# A step takes 10 ms, and 1 ms more for each token.
TIMES = Constants(0.010, 0.0, 0.001, 0.0, 0.0)
LINK = LinkSpeed(bytes_per_s=1000.0, bytes_per_token=1, handoff_s=0.003)
NUM_BLOCKS = 64


class Cluster(ClusterSimulation):
    """Keeps its simulations."""

    def __init__(self, sizes: PoolSizes, policy: SplitPolicy = SplitPolicy.ALL, num_blocks: int = NUM_BLOCKS) -> None:
        self.simulations: list[Simulation] = []

        def make() -> Simulation:
            kv = KVManager(num_blocks, 16, 4)
            scheduler = Scheduler(kv, max_rows=4, max_step_tokens=64, cost=CostTable(TIMES, largest_chunk=64))
            self.simulations.append(Simulation(scheduler, (), CostTable(TIMES)))
            return self.simulations[-1]

        super().__init__(sizes, make, 512, LINK, policy)


def arrival(number: int, at_s: float, num_prompt: int, num_output: int) -> SimulatedArrival:
    prompt = np.random.default_rng(number).integers(1, 1000, num_prompt, dtype=np.int32)
    return SimulatedArrival(at_s, Request(RequestId(number), prompt, num_output, RowSampling(end_ids=())))


def test_one_engine_is_a_plain_simulation() -> None:
    work = [arrival(number, 0.02 * number, 20 + 7 * number, 3) for number in range(9)]
    cluster = Cluster(PoolSizes(0, 1))
    assert set(cluster.run(work)) == set(range(9))
    kv = KVManager(NUM_BLOCKS, 16, 4)
    scheduler = Scheduler(kv, max_rows=4, max_step_tokens=64, cost=CostTable(TIMES, largest_chunk=64))
    alone = Simulation(scheduler, work, CostTable(TIMES))
    firsts, lasts = {}, {}
    for output in alone.turns():
        for first in () if output is None else output.first_tokens:
            firsts[first.number] = alone.now_s
        for over in () if output is None else output.finished:
            lasts[over.number] = alone.now_s
    assert {number: tuple(times) for number, times in cluster.times.items()} == {
        number: (firsts[number], lasts[number]) for number in range(9)
    }


def test_a_split_prompt_takes_the_time_of_its_parts() -> None:
    """52 tokens: three whole blocks are computed and copied, the last four tokens computed by the decode engine."""
    cluster = Cluster(PoolSizes(1, 1))
    assert list(cluster.run([arrival(0, 1.0, 52, 3)])) == [0]
    copied_s = 1.0 + (0.010 + 0.048) + 0.003 + 48 / 1000
    first_s = copied_s + 0.010 + 0.004
    assert cluster.times[0] == pytest.approx((first_s, first_s + 2 * (0.010 + 0.001)))
    assert (cluster.num_split, cluster.num_without_room) == (1, 0)


def test_copies_of_a_decode_engine_are_one_after_the_other() -> None:
    cluster = Cluster(PoolSizes(2, 1))
    list(cluster.run([arrival(0, 0.0, 52, 1), arrival(1, 0.0, 52, 1)]))
    copied_s = 0.058 + 0.003 + 48 / 1000
    assert cluster.times[0].first_s == pytest.approx(copied_s + 0.014)
    assert cluster.times[1].first_s == pytest.approx(copied_s + 48 / 1000 + 0.014)


@pytest.mark.parametrize("policy", SplitPolicy)
def test_every_request_is_served_and_no_block_is_left(policy: SplitPolicy) -> None:
    chance = np.random.default_rng(3)
    work = [arrival(number, float(chance.uniform(0, 3)), int(chance.integers(1, 150)), int(chance.integers(1, 12)))
            for number in range(80)]  # fmt: skip
    work += [each._replace(at_s=4.0, request=Request(RequestId(100 + number), each.request.prompt, 2, RowSampling()))
             for number, each in enumerate(work[:20])]  # fmt: skip  # some again, when they may be cached
    cluster = Cluster(PoolSizes(2, 3), policy, num_blocks=16)
    assert sorted(cluster.run(work)) == sorted(int(each.request.id) for each in work)
    for simulation in cluster.simulations:
        audit_rest(simulation.scheduler)
    if policy is SplitPolicy.ALL:
        assert cluster.num_without_room > 0, "the pools are small"
    else:
        assert 0 < cluster.num_split < len(work)
