"""Who computes what in a step: cruising rows first, then what must catch up. Fills a draft, within its budget."""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray, Row
from quire.core.request import Sequence, State
from quire.core.step import Output
from quire.sched.books import Books
from quire.sched.cost import CostTable, StepShape
from quire.sched.draft import Draft
from quire.sched.outputs import output_of
from quire.sched.pressure import Pressure
from quire.sched.shares import ServiceCost
from quire.sched.sizing import largest_next_chunk


class Feeding:
    """Gives rows their blocks and their chunks."""

    __slots__ = ("_books", "_cost", "_pressure", "_service", "_tenants")

    def __init__(self, books: Books, pressure: Pressure, cost: CostTable, max_rows: int) -> None:
        self._books = books
        self._pressure = pressure
        self._cost = cost
        self._service = ServiceCost()
        self._tenants: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # whom a row's service is charged to

    # Cruising rows.

    def cruising(self, draft: Draft) -> None:
        cruise = self._books.cruise
        rows = cruise.due(draft.step)
        if len(rows):
            blocks = self._books.kv.grow_each(rows)
            if blocks is None:
                self._one_by_one(rows, draft)
            else:
                draft.grant_each(rows, blocks)
                cruise.book_granted(rows, draft.step)
                self._charge_decodes(rows)
        draft.num_cruising = cruise.num_cruising - len(draft.paused)
        draft.budget -= draft.num_cruising

    def _one_by_one(self, rows: IntArray, draft: Draft) -> None:
        """There are not blocks for all: the first come first, and may cost others their seat."""
        cruise = self._books.cruise
        fed: list[Row] = []
        for sequence in self._books.row_sequences(rows.tolist()):
            row = sequence.row
            if sequence.state is not State.RUNNING or row is None:  # somebody has just taken its place
                continue
            while not (granted := self._books.kv.grow(row, sequence.request.id)):
                draft.pressure = True
                if not self._pressure.make_room(sequence.request.id) or sequence.state is not State.RUNNING:
                    break
            (fed if granted else draft.paused).append(row)
        fed = [row for row in fed if cruise.cruises(row)]  # some had to go after all
        draft.paused = [row for row in draft.paused if cruise.cruises(row)]
        granted_rows = np.array(fed, dtype=np.int32)
        draft.grant_each(granted_rows, np.array([self._books.kv.tables.last(row) for row in fed], dtype=np.int32))
        cruise.book_granted(granted_rows, draft.step)
        self._charge_decodes(granted_rows)

    # What must catch up. From here on nobody is preempted.

    def fresh(self, draft: Draft) -> None:
        """Siblings and beams that have begun since the last plan."""
        draft.tells.extend(self._books.tells)
        for sequence in self._books.fresh:
            assert sequence.row is not None, sequence
            draft.seat(sequence, self._books.kv.tables.of(sequence.row).copy())

    def tethered(self, draft: Draft) -> None:
        for sequence in tuple(self._books.tethered):
            if draft.budget > 0:
                self.take_chunk(sequence, draft)

    def short_prefills(self, draft: Draft) -> None:
        """Unfinished prompts; half of what the step has left is kept for long ones, if there are any."""
        draft.budget = self._sized(draft)
        if self._long():
            draft.kept = draft.budget // 2 if self._books.policy.regime.chunked else 0
            draft.budget -= draft.kept
        for sequence in tuple(self._books.prefilling):
            if draft.budget <= 0:
                break
            if not self._is_long(sequence):
                self.take_chunk(sequence, draft)

    def long_prefills(self, draft: Draft) -> None:
        """Long prompts, after new work: they take their half, and what nobody else needed."""
        draft.budget += draft.kept
        for sequence in self._long():
            if draft.budget > 0 and sequence not in draft.chunked:
                self.take_chunk(sequence, draft)

    def _long(self) -> list[Sequence]:
        return [sequence for sequence in self._books.prefilling if self._is_long(sequence)]

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_tokens >= self._books.policy.order.long_prompt

    def _sized(self, draft: Draft) -> int:
        """The tokens that prompts may take: what the budget leaves, or fewer if the step has a time to keep."""
        books, target_s = self._books, self._books.policy.itl_target_s
        unhurried = target_s is None or draft.num_cruising == 0 or not books.policy.regime.chunked
        if target_s is None or unhurried or not (books.prefilling or books.room):
            return draft.budget
        start = books.prefilling[0].num_planned if books.prefilling else 0
        return largest_next_chunk(self._cost, self.shape(draft), start, draft.budget, target_s)

    def take_chunk(self, sequence: Sequence, draft: Draft) -> None:
        """As much of its known tokens as the budget holds; with the last of them, it starts to cruise."""
        row = sequence.row
        assert row is not None, sequence
        start = sequence.num_planned
        length = min(draft.budget, sequence.num_tokens - start)
        draft.grant(row, self._books.kv.grow_to(row, start + length, sequence.request.id))
        sequence.num_planned += length
        output = output_of(sequence, start, length)
        draft.chunk(sequence, start, length, output)
        self._books.tally.recomputed_tokens += max(min(start + length, sequence.num_had) - start, 0)
        self._books.shares.charge(sequence.request.tenant, length * self._service.prefill)
        if sequence.num_planned == sequence.num_tokens:
            self._books.caught_up(sequence)
            if Output.SAMPLE in output:
                capacity = int(self._books.kv.tables.lengths[row]) * self._books.kv.block_size
                self._books.cruise.start(row, draft.step + 1, sequence.num_tokens, sequence.last_position, capacity)
                self._tenants[row] = self._books.shares.index(sequence.request.tenant)

    def _charge_decodes(self, rows: IntArray) -> None:
        """A block's worth of tokens, and of room, paid for when the block is given."""
        block_size, service = self._books.kv.block_size, self._service
        num_blocks: NDArray[np.float64] = self._books.kv.tables.lengths[rows].astype(np.float64)
        costs: NDArray[np.float64] = num_blocks * (block_size * service.block_step) + block_size * service.decode
        self._books.shares.charge_many(self._tenants[rows], costs)

    def shape(self, draft: Draft) -> StepShape:
        """What the step costs depends on this. Only looked at where the cost decides something."""
        if self._books.policy.itl_target_s is None and self._books.kv.host is None:
            return StepShape(draft.num_cruising)
        shape = StepShape(draft.num_cruising, self._books.cruise.num_context(draft.step))
        for chunk in draft.chunks:
            shape = shape.with_chunk(chunk.start, chunk.length)
        return shape
