"""A plan in the making."""

import numpy as np

from quire.core.ids import IndexArray, IntArray, Row
from quire.core.moves import Move
from quire.core.request import Sequence
from quire.core.step import Chunk, Grants, Output, Seat, StepPlan, Tell

_NO_GRANTS = Grants()


class Draft:
    """Collects the differences of one step within its token budget."""

    __slots__ = ("_granted", "_granted_rows", "budget", "chunked", "chunks", "held", "kept", "now_s", "num_cruising",
                 "paused", "pressure", "seats", "step", "tells")  # fmt: skip

    def __init__(self, step: int, now_s: float, budget: int) -> None:
        self.step = step
        self.now_s = now_s
        self.budget = budget
        self.kept = 0  # of the budget, for long prompts
        self.pressure = False  # a running row was denied a block
        self.num_cruising = 0
        self.seats: list[Seat] = []
        self.tells: list[Tell] = []
        self.chunks: list[Chunk] = []
        self.chunked: list[Sequence] = []  # whose each chunk is
        self.paused: list[Row] = []  # denied a block
        self.held: list[Row] = []  # their next token needs the one in flight
        self._granted_rows: list[IntArray] = []
        self._granted: list[IntArray] = []

    def seat(self, sequence: Sequence, blocks: IntArray) -> None:
        """A sequence sits down on its row, with the blocks it already has."""
        assert sequence.row is not None, sequence
        request = sequence.request
        self.seats.append(
            Seat(
                row=sequence.row,
                sequence=sequence.id,
                index=sequence.index,
                tokens=sequence.tokens,
                num_prompt=len(request.prompt),
                max_length=request.max_length,
                sampling=request.sampling,
            )
        )
        self.grant(sequence.row, blocks)

    def grant(self, row: Row, blocks: IntArray) -> None:
        """Several blocks for one row."""
        if len(blocks):
            self._granted_rows.append(np.full(len(blocks), row, dtype=np.int32))
            self._granted.append(blocks)

    def grant_each(self, rows: IndexArray, blocks: IntArray) -> None:
        """One block for each row."""
        if len(rows):
            self._granted_rows.append(rows.astype(np.int32))
            self._granted.append(blocks)

    def chunk(self, sequence: Sequence, start: int, length: int, output: Output) -> None:
        assert sequence.row is not None and 0 < length <= self.budget, (sequence, length, self.budget)
        self.budget -= length
        self.chunks.append(Chunk(sequence.row, start, length, output))
        self.chunked.append(sequence)

    @property
    def empty(self) -> bool:
        return self.num_cruising == 0 and not self.chunks

    def build(
        self,
        moves: tuple[Move, ...],
        leaves: tuple[Row, ...],
        *,
        masked: tuple[Row, ...],
        num_padding: int,
        reset: bool,
    ) -> StepPlan:
        return StepPlan(
            step=self.step,
            moves=moves,
            leaves=leaves,
            seats=tuple(self.seats),
            tells=tuple(self.tells),
            grants=Grants(_joined(self._granted_rows), _joined(self._granted)) if self._granted else _NO_GRANTS,
            chunks=tuple(self.chunks),
            pauses=(*self.paused, *self.held),
            masked=masked,
            num_cruising=self.num_cruising,
            num_padding=num_padding,
            reset=reset,
        )


def _joined(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
