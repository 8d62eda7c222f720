"""Law (a), watched from outside: nothing that a step in flight touches may be given to somebody else."""

from collections import deque

from quire.core.ids import BlockId, Row, SequenceId
from quire.core.step import StepPlan


class FlightWatch:
    """Keeps, for every step in flight, whose each row and each block was."""

    def __init__(self) -> None:
        self._owner: dict[Row, SequenceId] = {}
        self._blocks: dict[Row, list[BlockId]] = {}
        self._in_flight: deque[tuple[dict[Row, SequenceId], dict[BlockId, SequenceId]]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Raise AssertionError if the plan hands out a row or block that an earlier step still touches."""
        for row in plan.leaves:
            del self._owner[row]
            del self._blocks[row]
        for seat in plan.seats:
            self._owner[seat.row] = seat.sequence
            self._blocks[seat.row] = []
        for grant in plan.grants:
            self._blocks[grant.row].append(grant.block)
        block_owner = {block: self._owner[row] for row, blocks in self._blocks.items() for block in blocks}
        for rows, blocks in self._in_flight:
            for seat in plan.seats:
                assert rows.get(seat.row, seat.sequence) == seat.sequence, f"row {seat.row} is still in flight"
            for grant in plan.grants:
                owner = self._owner[grant.row]
                assert blocks.get(grant.block, owner) == owner, f"block {grant.block} is still in flight"
        self._in_flight.append((dict(self._owner), block_owner))

    def absorb(self) -> None:
        self._in_flight.popleft()
