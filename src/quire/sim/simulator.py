"""Simulation: a workload through the shipped scheduler on a simulated machine, with memory accounts per step.

The machine is a runner without a model. Its clock adds predicted step times, such as those of a cost table; planning
takes no time. Memory is counted in token slots after each plan: *held* are the blocks in tables (a shared one once),
*reserved* those reserved for a row, *live* the positions that are computed when the step is done.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from quire.core.ids import IntArray, Row
from quire.core.request import Request
from quire.core.step import Masks, Pending, StepPlan, StepResult
from quire.core.step_output import StepOutput
from quire.sched.cost_model import StepShape
from quire.sched.loop import Loop
from quire.sched.scheduler import Scheduler
from quire.sim.runners import BulkRunner

_IDLE_POLL_S = 0.01  # how far the clock of an idle machine advances if no arrival is known


class StepTimePredictor(Protocol):
    """Predicts the time of a step."""

    def predict_s(self, shape: StepShape) -> float: ...


class SimulatedArrival(NamedTuple):
    """A request and its arrival time."""

    at_s: float
    request: Request
    held: int | None = None  # a held prefix of its prompt, which another engine has written by then


@dataclass(slots=True)
class SimulationAccount:
    """Sums over all steps."""

    steps: int = 0
    finished_s: float = 0.0  # when the last request finished
    rows: int = 0  # computing rows
    tokens: int = 0  # without padding
    padding: int = 0
    held: int = 0
    reserved: int = 0
    live: int = 0
    longest_step_s: float = 0.0  # among steps with decoding rows

    @property
    def mean_batch(self) -> float:
        return self.rows / self.steps

    @property
    def padding_share(self) -> float:
        return self.padding / (self.padding + self.tokens)

    @property
    def waste_held(self) -> float:
        """The share of the slots in tables that holds nothing."""
        return 1 - self.live / self.held

    @property
    def waste_reserved(self) -> float:
        """The same, of the slots in tables or reserved."""
        return 1 - self.live / (self.held + self.reserved)


class Simulation:
    """One run. `turns` drives it; the caller may inspect everything between steps."""

    def __init__(
        self, scheduler: Scheduler, arrivals: Many[SimulatedArrival], times: StepTimePredictor, depth: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.account = SimulationAccount()
        self.now_s = 0.0
        self.plan: StepPlan | None = None  # of this step, if there was one
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        self._times = times
        self._body = BulkRunner(scheduler.max_rows)
        self._done_s = 0.0  # when the machine will have computed every launched step
        self._loop = Loop(scheduler, self, depth, lambda: self.now_s)

    def arrive(self, arrival: SimulatedArrival) -> None:
        """A further request, while the simulation runs."""
        insort(self._arrivals, arrival, key=lambda each: each.at_s)

    def turns(self, until_s: float = inf) -> Iterator[StepOutput | None]:
        """Step after step until all requests are finished, or until the clock has reached a time."""
        while self.now_s < until_s and (self._arrivals or not self.scheduler.idle):
            while self._arrivals and self._arrivals[0].at_s <= self.now_s:
                self._add(self._arrivals.popleft())
            self.plan = None
            absorbed = self._loop.step()
            if absorbed is None and self.plan is None:
                self._sleep(until_s)
            self.account.finished_s = self.now_s
            yield absorbed

    def _add(self, arrival: SimulatedArrival) -> None:
        if arrival.held is not None:
            self.scheduler.release_prefix(arrival.held, written=True)
        self.scheduler.add(arrival.request, self.now_s)

    def run(self) -> SimulationAccount:
        for _ in self.turns():
            pass
        return self.account

    def launch(self, plan: StepPlan) -> Pending:
        """The simulation is the runner that the loop drives."""
        self.plan = plan
        pending = self._body.launch(plan)
        seconds = self._times.predict_s(self._body.shape)
        self._done_s = max(self._done_s, self.now_s) + seconds
        self._write(plan, seconds)
        return _TimedStep(pending, self._done_s, self)

    def _sleep(self, until_s: float) -> None:
        """Advance to the next arrival; at most by `_IDLE_POLL_S` while a queued request waits for a window to pass."""
        times_s = [until_s, self._arrivals[0].at_s if self._arrivals else inf]
        if not self._arrivals or self.scheduler.num_queued:
            times_s.append(self.now_s + _IDLE_POLL_S)
        self.now_s = min(times_s)

    def _write(self, plan: StepPlan, seconds: float) -> None:
        account, kv = self.account, self.scheduler.kv
        lengths = kv.tables.lengths
        in_use = lengths > 0
        held = (kv.pool.num_in_service - kv.pool.num_free - kv.pool.num_evictable) * kv.block_size
        slack = int((lengths[in_use] * kv.block_size - self._body.num_computed[in_use]).sum())
        account.steps += 1
        account.rows += plan.num_decoding + len(plan.chunks)
        account.tokens += plan.num_tokens
        account.padding += plan.num_padding
        account.held += held
        account.reserved += kv.num_reserved * kv.block_size
        account.live += held - slack
        if plan.num_decoding:
            account.longest_step_s = max(account.longest_step_s, seconds)


class _TimedStep(NamedTuple):
    """A step in flight: waiting for it advances the clock to its end."""

    pending: Pending
    done_s: float
    simulation: Simulation

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.pending.drafted

    def sample(self, masks: Masks) -> None:
        self.pending.sample(masks)

    def wait(self) -> StepResult:
        self.simulation.now_s = max(self.simulation.now_s, self.done_s)
        return self.pending.wait()
