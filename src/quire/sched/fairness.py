"""Weighted fair queuing: a virtual clock of service per tenant, and the billing of rows to it.

The tenant with the lowest virtual time goes first. An idle tenant's virtual time is raised to the minimum of the active
ones when it returns, so that idle time earns no credit. Plain totals are kept beside the clocks. Does not depend on
queues or requests.

Tenants are charged for prompt tokens computed, tokens generated and blocks held. A decoding row is charged
retroactively, when it is granted a block or released: for every token since its last charge, and for its blocks in each
of those steps. So no row is scanned in between. A row that verifies drafts is charged for the tokens that it gains,
each as if it took a step, whatever it computes and holds for drafts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, Row

_ROUNDING = 1e-6  # sums of weights are not exact
MAX_IDLE_TENANTS = 1024  # idle tenants remembered: arbitrary, never tuned


@dataclass(frozen=True, slots=True)
class ServiceCost:
    """Prices of service, in computed prompt tokens. Cached tokens are free.

    Defaults until the measured cost table replaces them. `decode`: the 2 to 1 of "Fairness in Serving Large Language
    Models" (Sheng et al., 2024), itself the usual ratio of prices. `block_step`: the time to read a block over the
    time to compute a token, for an 8B model in bf16 on an H100: 2 MiB at 3.35 TB/s over 16 GFLOP at 989 TFLOP/s.
    """

    prefill: float = 1.0  # a prompt token computed
    decode: float = 2.0  # a token generated
    block_step: float = 0.04  # a block held for one step


class _ActiveTenant(NamedTuple):
    """An active tenant in the heap, with the service it had when last looked at: a lower bound, for it only grows."""

    service: float
    number: int
    activation: int


class WeightedFairShares:
    """Service by tenant. Reading the least of the active costs no scan."""

    __slots__ = (
        "_activation",
        "_active_heap",
        "_active_weight",
        "_counts",
        "_floor",
        "_free",
        "_idle",
        "_index_of",
        "_inverse_weight",
        "_num_activations",
        "_num_active",
        "_service",
        "_total",
        "_weights",
    )

    def __init__(self, weights: Mapping[str, float]) -> None:
        assert all(weight > 0 for weight in weights.values()), weights
        self._weights = dict(weights)
        self._index_of: dict[str, int] = {}
        self._idle: dict[str, None] = {}  # known, nothing in the engine; the longest idle first
        self._free: list[int] = []
        self._counts: list[int] = []  # requests in the engine, by index
        self._activation: list[int] = []  # the last time it became active, by index
        self._service: NDArray[np.float64] = np.zeros(16)
        self._total: NDArray[np.float64] = np.zeros(16)
        self._inverse_weight: NDArray[np.float64] = np.ones(16)
        self._active_heap: list[_ActiveTenant] = []
        self._num_active = 0
        self._active_weight = 0.0
        self._num_activations = 0
        self._floor = 0.0  # the most service of tenants that became idle: with none active, all start level

    # Active tenants.

    def arrive(self, tenant: str) -> None:
        """One more of its requests is in the engine."""
        index = self.index(tenant)
        if self._counts[index] == 0:
            self._activate(tenant, index)
        self._counts[index] += 1

    def depart(self, tenant: str) -> None:
        """One of its requests has ended."""
        index = self._index_of[tenant]
        assert self._counts[index] > 0, f"{tenant!r} has no request in the engine"
        self._counts[index] -= 1
        if self._counts[index] == 0:
            self._num_active -= 1
            self._active_weight = self._active_weight - self._weight(tenant) if self._num_active else 0.0
            self._floor = max(self._floor, float(self._service[index]))
            self._remember_idle(tenant)

    def index(self, tenant: str) -> int:
        """Its number in `charge_many`: small, and the same for as long as it has requests in the engine."""
        index = self._index_of.get(tenant)
        return self._register(tenant) if index is None else index

    # Service.

    def charge(self, tenant: str, cost: float) -> None:
        self._charge(self.index(tenant), cost)

    def _charge(self, index: int, cost: float) -> None:
        assert cost >= 0, cost
        self._total[index] = self._total.item(index) + cost
        self._service[index] = self._service.item(index) + cost * self._inverse_weight.item(index)

    def charge_many(self, indices: NDArray[np.int64], costs: NDArray[np.float64]) -> None:
        """Charge by index; a tenant may be named many times."""
        sums = np.bincount(indices, costs)
        if len(sums) == 1:  # the usual case: one tenant
            self._charge(0, sums.item())
            return
        self._total[: len(sums)] += sums
        self._service[: len(sums)] += sums * self._inverse_weight[: len(sums)]

    def service(self, tenant: str) -> float:
        """Its clock: cost by weight, lifted over idle times. Never falls while the tenant is active."""
        return self._service.item(self.index(tenant))

    def total(self, tenant: str) -> float:
        """All it was charged since it became known."""
        index = self._index_of.get(tenant)
        return 0.0 if index is None else float(self._total[index])

    @property
    def num_active(self) -> int:
        """Tenants with requests in the engine."""
        return self._num_active

    @property
    def active_weight(self) -> float:
        """The weight of all active tenants together."""
        return self._active_weight

    def part(self, tenant: str, total: int) -> int:
        """The part of a total that is due to an active tenant, by its weight among the active ones; rounded down, and
        at least 1."""
        return max(1, int(total * self._weight(tenant) / self._active_weight + _ROUNDING))

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._index_of)

    # Bookkeeping.

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _register(self, tenant: str) -> int:
        if not self._free:
            self._free.append(len(self._counts))
            self._counts.append(0)
            self._activation.append(0)
            if len(self._counts) > len(self._service):
                self._grow()
        index = self._free.pop()
        self._index_of[tenant] = index
        self._service[index] = 0.0
        self._total[index] = 0.0
        self._inverse_weight[index] = 1.0 / self._weight(tenant)
        self._remember_idle(tenant)
        return index

    def _activate(self, tenant: str, index: int) -> None:
        least = self._least_active()
        self._service[index] = max(self._service[index], self._floor if least is None else least)
        del self._idle[tenant]
        self._num_active += 1
        self._active_weight += self._weight(tenant)
        self._num_activations += 1
        self._activation[index] = self._num_activations
        if len(self._active_heap) > 2 * self._num_active + 32:
            self._active_heap = sorted(mark for mark in self._active_heap if self._current(mark))
        heappush(self._active_heap, _ActiveTenant(float(self._service[index]), index, self._num_activations))

    def _remember_idle(self, tenant: str) -> None:
        self._idle[tenant] = None
        if len(self._idle) > MAX_IDLE_TENANTS:
            forgotten = next(iter(self._idle))
            del self._idle[forgotten]
            self._free.append(self._index_of.pop(forgotten))

    def _grow(self) -> None:
        size = len(self._service)
        self._service = np.concatenate([self._service, np.zeros(size)])
        self._total = np.concatenate([self._total, np.zeros(size)])
        self._inverse_weight = np.concatenate([self._inverse_weight, np.ones(size)])

    def _current(self, mark: _ActiveTenant) -> bool:
        """Not left over from an earlier activity."""
        return self._counts[mark.number] > 0 and self._activation[mark.number] == mark.activation

    def _least_active(self) -> float | None:
        while self._active_heap:
            mark = self._active_heap[0]
            service = float(self._service[mark.number])
            if not self._current(mark):
                heappop(self._active_heap)
            elif service > mark.service:
                heapreplace(self._active_heap, mark._replace(service=service))
            else:
                return service
        return None


class Billing:
    """Charges rows to their tenants."""

    __slots__ = ("_billed_up_to", "_block_step", "_decode", "_prices", "_shares", "_tenants")

    def __init__(self, shares: WeightedFairShares, max_rows: int, prices: ServiceCost | None = None) -> None:
        self._shares = shares
        self._prices = prices or ServiceCost()
        # As arrays: numpy multiplies by them in half the time.
        self._decode, self._block_step = np.array(self._prices.decode), np.array(self._prices.block_step)
        self._tenants: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # by row, as the shares number them
        self._billed_up_to: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # position

    def charge_chunk(self, tenant: str, num_prefilled: int, num_generated: int, num_blocks: int) -> None:
        """Charge a chunk of a row with this many blocks: tokens prefilled, and tokens generated."""
        prices = self._prices
        cost = num_prefilled * prices.prefill + num_generated * prices.decode + num_blocks * prices.block_step
        self._shares.charge(tenant, cost)

    def start(self, row: Row, tenant: str, position: int) -> None:
        """The row decodes from this position on."""
        self._tenants[row] = self._shares.index(tenant)
        self._billed_up_to[row] = position

    def charge_last(self, row: Row, tenant: str, position: int, block_size: int) -> None:
        """Final bill of a row: computed up to this position."""
        start = self._billed_up_to.item(row)
        num_held = _block_steps(position, block_size) - _block_steps(start, block_size)
        self._shares.charge(tenant, (position - start) * self._prices.decode + num_held * self._prices.block_step)

    def charge_positions(self, rows: IndexArray, positions: NDArray[np.int64], block_size: int) -> None:
        """Bill rows that may have filled blocks since the last bill: each computed up to its position."""
        starts = self._billed_up_to[rows]
        self._billed_up_to[rows] = positions
        num_held = _block_steps(positions, block_size) - _block_steps(starts, block_size)
        self._shares.charge_many(self._tenants[rows], (positions - starts) * self._decode + num_held * self._block_step)

    def charge_rows(self, rows: IndexArray, positions: NDArray[np.int64], num_blocks: NDArray[np.int64]) -> None:
        """Bill rows: each computed up to its position, with this many blocks since the last bill."""
        num_tokens = positions - self._billed_up_to[rows]
        self._billed_up_to[rows] = positions
        costs: NDArray[np.float64] = num_tokens * (self._decode + num_blocks * self._block_step)
        self._shares.charge_many(self._tenants[rows], costs)


_Positions = TypeVar("_Positions", int, NDArray[np.int64])


def _block_steps(positions: _Positions, block_size: int) -> _Positions:
    """How many blocks a row held, summed over steps that computed these first positions one by one."""
    full = positions // block_size
    return block_size * full * (full + 1) // 2 + positions % block_size * (full + 1)
