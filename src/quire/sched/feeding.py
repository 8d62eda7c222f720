"""Who computes what in a step: cruising rows first, then what must catch up. Fills a draft, within its budget."""

import numpy as np

from quire.core.ids import IndexArray, Row
from quire.core.request import Sequence, State
from quire.sched.books import Books
from quire.sched.cost import CostTable, StepShape
from quire.sched.draft import Draft
from quire.sched.outputs import output_of
from quire.sched.pressure import Pressure
from quire.sched.sizing import largest_next_chunk, stretched


class Feeding:
    """Gives rows their blocks and their chunks."""

    __slots__ = ("_books", "_cost", "_pressure")

    def __init__(self, books: Books, pressure: Pressure, cost: CostTable) -> None:
        self._books = books
        self._pressure = pressure
        self._cost = cost

    # Cruising rows.

    def cruising(self, draft: Draft) -> None:
        cruise = self._books.cruise
        if len(self._books.masked):
            self._hold_back(draft)
        rows = cruise.due(draft.step)
        if len(rows):
            blocks = self._books.kv.grow_each(rows)
            if blocks is None:
                self._one_by_one(rows, draft)
            else:
                draft.grant_each(rows, blocks)
                cruise.book_granted(rows, draft.step)
                self._charge(rows, draft.step)
        if draft.held:
            draft.held = [row for row in draft.held if cruise.cruises(row)]  # some may have had to go
        draft.num_cruising = cruise.num_cruising - len(draft.paused) - len(draft.held)
        draft.budget -= draft.num_cruising

    def _hold_back(self, draft: Draft) -> None:
        """Masked rows whose last token is in flight sit this step out."""
        cruise = self._books.cruise
        draft.held = [row for row in self._books.masked.unknown(self._books.last_absorbed) if cruise.cruises(row)]
        for row in draft.held:
            cruise.hold(row)

    def _one_by_one(self, rows: IndexArray, draft: Draft) -> None:
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
        granted_rows = np.array(fed, dtype=np.intp)
        draft.grant_each(granted_rows, np.array([self._books.kv.tables.last(row) for row in fed], dtype=np.int32))
        cruise.book_granted(granted_rows, draft.step)
        self._charge(granted_rows, draft.step)

    def _charge(self, rows: IndexArray, step: int) -> None:
        """Each has just got a block: it pays for what it computed and held before."""
        books = self._books
        books.charges.pay(rows, books.cruise.positions_at(rows, step), books.kv.tables.lengths[rows] - 1)

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
                self.take_chunk(sequence, draft, decoding=True)

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
        if target_s is None or draft.num_cruising == 0 or not books.policy.regime.chunked:
            return draft.budget
        if not (books.prefilling or books.room):
            return draft.budget
        start = books.prefilling[0].num_planned if books.prefilling else 0
        shape, grains = self.shape(draft), books.policy.grains_beside(draft.num_cruising)
        target_s = max(target_s, books.policy.itl_per_decode * self._cost.predict_s(shape))
        length = largest_next_chunk(self._cost, shape, start, draft.budget, target_s, grains)
        queue_s = target_s * self._num_behind() / max(length, 1)
        stretched_s = stretched(target_s, queue_s, books.policy.itl_stretch)
        if stretched_s == target_s:
            return length
        return largest_next_chunk(self._cost, shape, start, draft.budget, stretched_s, grains)

    def _num_behind(self) -> int:
        """Tokens of prompts that have still to be computed, but for those of the longest: what others wait for."""
        prefilling, room = self._books.prefilling, self._books.room
        if len(prefilling) + len(room) < 2:
            return 0
        unread = [sequence.num_tokens - sequence.num_planned for sequence in prefilling]
        return sum(unread) - max(unread, default=0) + room.num_tokens

    def take_chunk(self, sequence: Sequence, draft: Draft, *, decoding: bool = False) -> None:
        """As much of its known tokens as the budget holds; with the last of them it starts to cruise, or, pooled, to
        coast. A beam that only computes the token it was told is decoding: it pays for the token that it gives, not for
        this one too."""
        books, row, request, num_tokens = self._books, sequence.row, sequence.request, len(sequence.tokens)
        assert row is not None, sequence
        start = sequence.num_planned
        length = min(draft.budget, num_tokens - start)
        draft.grant(row, books.kv.grow_to(row, start + length, request.id))
        sequence.num_planned = start + length
        draft.chunk(sequence, start, length, output_of(sequence, start, length))
        books.tally.recomputed_tokens += max(min(start + length, sequence.num_had) - start, 0)
        num_blocks, tenant, pooled = books.kv.tables.lengths.item(row), request.tenant, request.sampling.pooled
        catches_up = sequence.num_planned == num_tokens
        books.charges.chunk(tenant, 0 if decoding else length, int(catches_up and not pooled), num_blocks)
        if catches_up:
            books.caught_up(sequence)
            if pooled or request.beam is None:
                if request.sampling.masked:
                    self._books.masked.note(row, draft.step)
                capacity = num_blocks * books.kv.block_size
                books.cruise.start(row, draft.step + 1, num_tokens, sequence.last_position, capacity)
                books.charges.start(row, tenant, num_tokens)

    def shape(self, draft: Draft) -> StepShape:
        """What the step costs depends on this."""
        shape = StepShape(draft.num_cruising, self._books.cruise.num_context(draft.step))
        return shape.with_chunks([(chunk.start, chunk.length) for chunk in draft.chunks]) if draft.chunks else shape
