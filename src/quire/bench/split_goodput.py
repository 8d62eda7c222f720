"""Goodput of replicas with chunked prefill, and of prefill and decode pools, at equal numbers of GPUs, simulated.

Goodput of a cluster: the highest rate of requests of which 99 % meet a service level. Requests have the lengths of a
trace, in its order, and random (Poisson) arrivals. The sizes of steps and the ratio of prefill to decode engines are
chosen on the first half of the trace; the goodput that is reported is that on the second half.

Every engine is one H200 with Llama-3.1-8B (`bench/simulated.py`).
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from quire.bench.service_levels import (
    ATTAINMENT,
    CapacityProbe,
    ServedRequest,
    ServiceLevel,
    TokenArrival,
    find_capacity,
)
from quire.bench.simulated import (
    H200,
    H200_MACHINE,
    HTTP_OVERHEAD,
    SimulatedMachine,
    StepSizing,
    fitting,
    make_scheduler,
    simulated_requests,
    sizings,
)
from quire.core.errors import ConfigError
from quire.sim.cluster import ClusterSimulation, LinkSpeed, PoolSizes, SplitPolicy
from quire.sim.simulator import Simulation
from quire.workload.traces import TraceRow, poisson

KV_BYTES_PER_TOKEN = 131_072  # Llama-3.1-8B in bf16
_NEW_PREFIXES = 1 << 32  # ids of a trace's prefixes when it is repeated


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Requests of one half of a trace."""

    rows: tuple[TraceRow, ...]
    seconds: float
    seed: int = 0

    def at(self, per_s: float) -> list[TraceRow]:
        """The requests of a window with this rate."""
        arrived = poisson(islice(_repeated(self.rows), max(round(per_s * self.seconds), 1)), per_s, self.seed)
        return [row for row in arrived if row.arrived_s < self.seconds] or arrived[:1]


def _repeated(rows: Many[TraceRow]) -> Iterator[TraceRow]:
    """The trace again and again; when it is repeated, no prefix is shared with the time before."""
    turn = 0
    while True:
        for row in rows:
            yield row._replace(prefix_ids=tuple(each + turn * _NEW_PREFIXES for each in row.prefix_ids))
        turn += 1


def halves(rows: Many[TraceRow], seconds: float, seed: int, trace: str) -> tuple[ClusterLoad, ClusterLoad]:
    """To choose on, and to report on."""
    middle = len(rows) // 2
    if middle == 0:
        raise ConfigError(f"The trace {trace} has {len(rows)} requests; 2 or more are needed.", param="trace")
    return ClusterLoad(tuple(rows[:middle]), seconds, seed), ClusterLoad(tuple(rows[middle:]), seconds, seed)


class ClusterSetup(NamedTuple):
    """How some GPUs are used."""

    sizes: PoolSizes
    sizing: StepSizing
    policy: SplitPolicy = SplitPolicy.ALL

    @property
    def name(self) -> str:
        if not self.sizes.num_prefill:
            return f"{self.sizes.num_decode} replicas"
        return f"{self.sizes.num_prefill} prefill + {self.sizes.num_decode} decode, {self.policy.value}"


class ClusterGoodput(NamedTuple):
    """Of one setup at one level."""

    setup: ClusterSetup
    requests_per_s: float | None  # None: no tried rate holds the level
    probes: tuple[CapacityProbe, ...]

    @property
    def rate(self) -> float:
        return self.requests_per_s or 0.0


def simulate_cluster(
    rows: Many[TraceRow],
    setup: ClusterSetup,
    link: LinkSpeed,
    machine: SimulatedMachine = H200_MACHINE,
    level: ServiceLevel | None = None,
) -> list[ServedRequest]:
    """What the clients would see: first and last tokens. With a level it ends as soon as that is missed; requests
    without their last token count as failed."""
    overhead, rows = HTTP_OVERHEAD, fitting(rows, machine)

    def engine() -> Simulation:
        return Simulation(make_scheduler(machine, setup.sizing), (), H200(), depth=1)

    cluster = ClusterSimulation(setup.sizes, engine, machine.max_model_len, link, setup.policy)
    allowed = int((1 - ATTAINMENT) * len(rows))
    num_missed = 0
    served: dict[int, ServedRequest] = {}
    for number in cluster.run(simulated_requests(rows, machine, overhead)):
        row, (first_s, last_s) = rows[number], cluster.times[number]
        arrivals = [TokenArrival(first_s + overhead.delivery_s, 1)]
        if row.num_output > 1:
            arrivals.append(TokenArrival(last_s + overhead.delivery_s, row.num_output - 1))
        served[number] = ServedRequest(
            number, row.arrived_s, row.arrived_s, row.num_prompt, row.num_output, tuple(arrivals), last_s
        )
        num_missed += level is not None and not level.is_met_by(served[number])
        if num_missed > allowed:
            break
    return [
        served.get(number)
        or ServedRequest(number, row.arrived_s, row.arrived_s, row.num_prompt, row.num_output, error="not served")
        for number, row in enumerate(rows)
    ]


def goodput(
    load: ClusterLoad, setup: ClusterSetup, link: LinkSpeed, level: ServiceLevel, first_per_s: float, tolerance: float
) -> ClusterGoodput:
    """The highest rate that holds a level, searched from a first one on."""

    def probe(scale: float) -> CapacityProbe | None:
        per_s = first_per_s * scale
        rows = load.at(per_s)
        records = simulate_cluster(rows, setup, link, level=level)
        return CapacityProbe(scale, per_s, sum(map(level.is_met_by, records)) / len(records))

    probes = find_capacity(probe, 1.0, tolerance, factor=1 + tolerance)  # two are enough if the first rate is right
    best = max((each for each in probes if each.holds), key=lambda each: each.scale, default=None)
    return ClusterGoodput(setup, None if best is None else best.requests_per_s, tuple(probes))


class ClusterComparison(NamedTuple):
    """Of one number of GPUs and one level: the best setups of the first half, with their goodput on the second."""

    num_gpus: int
    level: ServiceLevel
    replicas: ClusterGoodput
    split: ClusterGoodput | None  # all prompts to prefill engines
    by_cost: ClusterGoodput | None
    tried: tuple[ClusterGoodput, ...]  # on the first half

    @property
    def gain(self) -> float | None:
        """The better of the splits by the replicas."""
        rates = [each.rate for each in (self.split, self.by_cost) if each is not None]
        return max(rates) / self.replicas.rate if rates and self.replicas.rate else None


class SplitSearch:
    """Compares numbers of GPUs, the smallest first: each search begins where the one before has ended."""

    def __init__(
        self,
        choosing: ClusterLoad,
        reporting: ClusterLoad,
        link: LinkSpeed,
        tolerance: float,
        choose_up_to: int,
        say: Callable[[str], None],
    ) -> None:
        """More GPUs than `choose_up_to` are used as these were: the same sizes of steps, the same share of prefill
        engines."""
        self._choosing, self._reporting = choosing, reporting
        self._link = link
        self._tolerance = tolerance
        self._choose_up_to = choose_up_to
        self._say = say
        self._per_gpu: dict[str, float] = {}  # requests per second, of the last number of GPUs
        self._shares: dict[tuple[ServiceLevel, SplitPolicy], float] = {}  # of prefill engines, the best so far
        self._sizings: dict[ServiceLevel, StepSizing] = {}  # of replicas, the same

    def compare(self, num_gpus: int, level: ServiceLevel, *, split: bool) -> ClusterComparison:
        tried: list[ClusterGoodput] = []
        chosen = [self._choose_sizing(num_gpus, level, tried)]
        policies = tuple(SplitPolicy) if split and num_gpus > 1 else ()
        chosen += [self._choose_ratio(num_gpus, policy, level, tried) for policy in policies]
        replicas, *splits = [self._search(self._reporting, setup, level) for setup in chosen]
        by_policy = dict(zip(policies, splits, strict=True))
        return ClusterComparison(
            num_gpus, level, replicas, by_policy.get(SplitPolicy.ALL), by_policy.get(SplitPolicy.BY_COST), tuple(tried)
        )

    def _choose_sizing(self, num_gpus: int, level: ServiceLevel, tried: list[ClusterGoodput]) -> ClusterSetup:
        whole = PoolSizes(0, num_gpus)
        if num_gpus > self._choose_up_to and level in self._sizings:
            return ClusterSetup(whole, self._sizings[level])
        found = [self._try(ClusterSetup(whole, sizing), level, tried) for sizing in _sizings_for(level)]
        best = max(found, key=lambda each: each.rate).setup
        self._sizings[level] = best.sizing
        return best

    def _try(self, setup: ClusterSetup, level: ServiceLevel, tried: list[ClusterGoodput]) -> ClusterGoodput:
        made = self._search(self._choosing, setup, level)
        tried.append(made)
        return made

    def _search(self, load: ClusterLoad, setup: ClusterSetup, level: ServiceLevel) -> ClusterGoodput:
        num_gpus = sum(setup.sizes)
        kind = f"{level} {'split' if setup.sizes.num_prefill else 'whole'}"
        near = self._per_gpu.get(kind) or self._per_gpu.get(f"{level} whole") or 4.0
        made = goodput(load, setup, self._link, level, near * num_gpus, self._tolerance)
        if made.rate:
            self._per_gpu[kind] = made.rate / num_gpus
        half = "chosen on" if load is self._choosing else "reported on"
        self._say(f"{num_gpus} GPUs, level {level}, {setup.name} ({half}): {made.rate:.1f} requests/s")
        return made

    def _choose_ratio(
        self, num_gpus: int, policy: SplitPolicy, level: ServiceLevel, tried: list[ClusterGoodput]
    ) -> ClusterSetup:
        """From the best share of the last number of GPUs on, uphill in steps that become smaller."""
        known: dict[int, ClusterGoodput] = {}

        def setup_of(num_prefill: int) -> ClusterSetup:
            return ClusterSetup(PoolSizes(num_prefill, num_gpus - num_prefill), sizings()[-1], policy)

        def rate(num_prefill: int) -> float:
            if num_prefill not in known:
                known[num_prefill] = self._try(setup_of(num_prefill), level, tried)
            return known[num_prefill].rate

        share = self._shares.get((level, policy))
        best = min(max(round((share or self._shares.get((level, SplitPolicy.ALL), 0.5)) * num_gpus), 1), num_gpus - 1)
        if num_gpus > self._choose_up_to and share is not None:
            return setup_of(best)
        step = max(num_gpus // 8, 1)
        while step:
            around = [each for each in (best - step, best + step) if 1 <= each < num_gpus]
            better = max([best, *around], key=rate)
            step = step if better != best else step // 2
            best = better
        self._shares[level, policy] = best / num_gpus
        return setup_of(best)


def _sizings_for(level: ServiceLevel) -> list[StepSizing]:
    """Of single engines: the defaults, and the level's own numbers as targets."""
    return [sizings()[-1], sizings(level.tpot_ms / 1000, level.ttft_ms / 1000 / 2)[-1]]
