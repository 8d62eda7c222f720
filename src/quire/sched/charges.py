"""What tenants pay for: prompt tokens computed, tokens generated, and the room that rows hold meanwhile.

A row that cruises pays in arrears, when it gets a block or leaves: for every token since it last paid, and for its
blocks in each of those steps. So the price is by the token, and nobody looks at a row in between.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, Row
from quire.sched.shares import ServiceCost, Shares


class Charges:
    """The open bills of all rows."""

    __slots__ = ("_block_step", "_decode", "_paid_up_to", "_prices", "_shares", "_tenants")

    def __init__(self, shares: Shares, max_rows: int, prices: ServiceCost | None = None) -> None:
        self._shares = shares
        self._prices = prices or ServiceCost()
        # As arrays: numpy multiplies by them in half the time.
        self._decode, self._block_step = np.array(self._prices.decode), np.array(self._prices.block_step)
        self._tenants: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # by row, as the shares number them
        self._paid_up_to: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # position

    def chunk(self, tenant: str, num_prefilled: int, num_generated: int, num_blocks: int) -> None:
        """A chunk of a row that holds so many blocks: tokens that it had to catch up with, and those that it gives."""
        prices = self._prices
        cost = num_prefilled * prices.prefill + num_generated * prices.decode + num_blocks * prices.block_step
        self._shares.charge(tenant, cost)

    def start(self, row: Row, tenant: str, position: int) -> None:
        """The row cruises from this position on."""
        self._tenants[row] = self._shares.index(tenant)
        self._paid_up_to[row] = position

    def pay_last(self, row: Row, tenant: str, position: int, num_blocks: int) -> None:
        """The row leaves: it has computed all before this position, and held so many blocks since it last paid."""
        num_tokens = position - self._paid_up_to.item(row)
        self._shares.charge(tenant, num_tokens * (self._prices.decode + num_blocks * self._prices.block_step))

    def pay(self, rows: IndexArray, positions: NDArray[np.int64], num_blocks: NDArray[np.int64]) -> None:
        """Each has computed all before this position, and held so many blocks since it last paid."""
        num_tokens = positions - self._paid_up_to[rows]
        self._paid_up_to[rows] = positions
        costs: NDArray[np.float64] = num_tokens * (self._decode + num_blocks * self._block_step)
        self._shares.charge_many(self._tenants[rows], costs)
