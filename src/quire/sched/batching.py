"""Who computes what in a step: cruising rows first, then what must catch up. Fills a draft, within its budget.

How long a prefill chunk may be, so that the step it joins keeps a time. Knows shapes and costs, no requests.
"""

from itertools import takewhile
from math import sqrt

import numpy as np

from quire.core.ids import IndexArray, Row
from quire.core.request import Sequence, SequenceState
from quire.sched.cost_model import CostTable, StepShape
from quire.sched.plan_builder import PlanBuilder, output_of
from quire.sched.preemption import Preemption
from quire.sched.state import SchedulerState

LEAST = 16  # tokens that a step prefills at any price, so that prompts never starve: one block
PATIENCE_S = 0.04  # for which prompts wait behind each other; beyond it those who decode wait a little, too

# Of a time between two tokens that nobody asked for.
MOST_STRETCH = 2.5  # while prompts pile up
PER_DECODE = 1.6  # it is no less than so many times what the step would take without prompts: many rows take long, too
_BESIDE_PROMPTS = 2.8  # so many times as long as a token takes that is computed alone
_UNNOTICED_S = 0.01  # and never less than this


def usual_target_s(decode_s: float) -> float:
    """The time between two tokens to aim at where nobody names one, if a step with one row alone takes so long."""
    return max(_UNNOTICED_S, _BESIDE_PROMPTS * decode_s)


def stretched(target_s: float, queue_s: float, most: float) -> float:
    """The time that a step may take while prompts wait so long behind each other; at the most `most` times as long.

    It grows with the root of the queue: of a queue four times as long, those who wait and those who decode each bear a
    part.
    """
    return target_s * min(max(sqrt(queue_s / PATIENCE_S), 1.0), most)


def largest_next_chunk(
    table: CostTable, shape: StepShape, start: int, most: int, target_s: float, grains: tuple[int, ...] = ()
) -> int:
    """The largest further chunk with which a step of this shape is predicted to take no more than `target_s`.

    A step's first chunk has `LEAST` tokens (or `most`, if that is less) even if the step then takes longer; a further
    one may have none. Lengths are tried in ascending order, because a corrected table need not be monotone, and what
    exceeds the target at a shorter length is not trusted at a longer one: those of the grains or, without any, in
    doubling steps, then bisected.
    """
    least = 0 if shape.num_chunk_tokens else min(most, LEAST)

    def fits(length: int) -> bool:
        return table.predict_s(shape.with_chunk(start, length)) <= target_s

    if grains:
        lengths = [*(grain for grain in grains if least < grain < most), most]
        return max(takewhile(fits, lengths), default=least)
    good, bad = least, most + 1
    probe = max(1, least)
    while probe < bad:
        if not fits(probe):
            bad = probe
            break
        good, probe = probe, 2 * probe
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class StepBatcher:
    """Gives rows their blocks and their chunks."""

    __slots__ = ("_cost", "_pressure", "_state")

    def __init__(self, state: SchedulerState, pressure: Preemption, cost: CostTable) -> None:
        self._state = state
        self._pressure = pressure
        self._cost = cost

    # Cruising rows.

    def decoding(self, draft: PlanBuilder) -> None:
        calendar = self._state.calendar
        if len(self._state.masked):
            self._hold_back(draft)
        rows = calendar.due(draft.step)
        if len(rows):
            blocks = self._state.kv.grow_each(rows)
            if blocks is None:
                self._one_by_one(rows, draft)
            else:
                draft.grant_each(rows, blocks)
                calendar.book_granted(rows, draft.step)
                self._charge(rows, draft.step)
        if draft.held:
            draft.held = [row for row in draft.held if calendar.is_decoding(row)]  # some may have had to go
        draft.num_decoding = calendar.num_decoding - len(draft.paused) - len(draft.held)
        draft.budget -= draft.num_decoding

    def _hold_back(self, draft: PlanBuilder) -> None:
        """Masked rows whose last token is in flight sit this step out."""
        calendar = self._state.calendar
        draft.held = [row for row in self._state.masked.unknown(self._state.last_absorbed) if calendar.is_decoding(row)]
        for row in draft.held:
            calendar.hold(row)

    def _one_by_one(self, rows: IndexArray, draft: PlanBuilder) -> None:
        """There are not blocks for all: the first come first, and may cost others their seat."""
        calendar = self._state.calendar
        fed: list[Row] = []
        for sequence in self._state.row_sequences(rows.tolist()):
            row = sequence.row
            if sequence.state is not SequenceState.RUNNING or row is None:  # somebody has just taken its place
                continue
            while not (granted := self._state.kv.grow(row, sequence.request.id)):
                draft.pressure = True
                if not self._pressure.make_room(sequence.request.id) or sequence.state is not SequenceState.RUNNING:
                    break
            (fed if granted else draft.paused).append(row)
        fed = [row for row in fed if calendar.is_decoding(row)]  # some had to go after all
        draft.paused = [row for row in draft.paused if calendar.is_decoding(row)]
        granted_rows = np.array(fed, dtype=np.intp)
        draft.grant_each(granted_rows, np.array([self._state.kv.tables.last(row) for row in fed], dtype=np.int32))
        calendar.book_granted(granted_rows, draft.step)
        self._charge(granted_rows, draft.step)

    def _charge(self, rows: IndexArray, step: int) -> None:
        """Each has just got a block: it pays for what it computed and held before."""
        state = self._state
        state.charges.pay(rows, state.calendar.positions_at(rows, step), state.kv.tables.lengths[rows] - 1)

    # What must catch up. From here on nobody is preempted.

    def fresh(self, draft: PlanBuilder) -> None:
        """Siblings and beams that have begun since the last plan."""
        draft.appends.extend(self._state.appends)
        for sequence in self._state.fresh:
            assert sequence.row is not None, sequence
            draft.assign(sequence, self._state.kv.tables.of(sequence.row).copy())

    def host_driven(self, draft: PlanBuilder) -> None:
        for sequence in tuple(self._state.host_driven):
            if draft.budget > 0:
                self.take_chunk(sequence, draft, decoding=True)

    def short_prefills(self, draft: PlanBuilder) -> None:
        """Unfinished prompts; half of what the step has left is kept for long ones, if there are any."""
        draft.budget = self._sized(draft)
        if self._long():
            draft.kept = draft.budget // 2 if self._state.policy.regime.chunked else 0
            draft.budget -= draft.kept
        for sequence in tuple(self._state.prefilling):
            if draft.budget <= 0:
                break
            if not self._is_long(sequence):
                self.take_chunk(sequence, draft)

    def long_prefills(self, draft: PlanBuilder) -> None:
        """Long prompts, after new work: they take their half, and what nobody else needed."""
        draft.budget += draft.kept
        for sequence in self._long():
            if draft.budget > 0 and sequence not in draft.chunked:
                self.take_chunk(sequence, draft)

    def _long(self) -> list[Sequence]:
        return [sequence for sequence in self._state.prefilling if self._is_long(sequence)]

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_tokens >= self._state.policy.order.long_prompt

    def _sized(self, draft: PlanBuilder) -> int:
        """The tokens that prompts may take: what the budget leaves, or fewer if the step has a time to keep."""
        state, target_s = self._state, self._state.policy.itl_target_s
        if target_s is None or draft.num_decoding == 0 or not state.policy.regime.chunked:
            return draft.budget
        if not (state.prefilling or state.room):
            return draft.budget
        start = state.prefilling[0].num_planned if state.prefilling else 0
        shape, grains = self.shape(draft), state.policy.grains_beside(draft.num_decoding)
        target_s = max(target_s, state.policy.itl_per_decode * self._cost.predict_s(shape))
        length = largest_next_chunk(self._cost, shape, start, draft.budget, target_s, grains)
        queue_s = target_s * self._num_behind() / max(length, 1)
        stretched_s = stretched(target_s, queue_s, state.policy.itl_stretch)
        if stretched_s == target_s:
            return length
        return largest_next_chunk(self._cost, shape, start, draft.budget, stretched_s, grains)

    def _num_behind(self) -> int:
        """Tokens of prompts that have still to be computed, but for those of the longest: what others wait for."""
        prefilling, room = self._state.prefilling, self._state.room
        if len(prefilling) + len(room) < 2:
            return 0
        unread = [sequence.num_tokens - sequence.num_planned for sequence in prefilling]
        return sum(unread) - max(unread, default=0) + room.num_tokens

    def take_chunk(self, sequence: Sequence, draft: PlanBuilder, *, decoding: bool = False) -> None:
        """As much of its known tokens as the budget holds; with the last of them it starts to cruise, or, pooled, to
        coast. A beam that only computes the token it was told is decoding: it pays for the token that it gives, not for
        this one too."""
        state, row, request, num_tokens = self._state, sequence.row, sequence.request, len(sequence.tokens)
        assert row is not None, sequence
        start = sequence.num_planned
        length = min(draft.budget, num_tokens - start)
        draft.grant(row, state.kv.grow_to(row, start + length, request.id))
        sequence.num_planned = start + length
        draft.chunk(sequence, start, length, output_of(sequence, start, length))
        state.counters.recomputed_tokens += max(min(start + length, sequence.num_computed_before) - start, 0)
        num_blocks, tenant, pooled = state.kv.tables.lengths.item(row), request.tenant, request.sampling.pooled
        catches_up = sequence.num_planned == num_tokens
        state.charges.chunk(tenant, 0 if decoding else length, int(catches_up and not pooled), num_blocks)
        if catches_up:
            state.caught_up(sequence)
            if pooled or request.beam is None:
                if request.sampling.masked:
                    self._state.masked.note(row, draft.step)
                capacity = num_blocks * state.kv.block_size
                state.calendar.start(row, draft.step + 1, num_tokens, sequence.last_position, capacity)
                state.charges.start(row, tenant, num_tokens)

    def shape(self, draft: PlanBuilder) -> StepShape:
        """What the step costs depends on this."""
        shape = StepShape(draft.num_decoding, self._state.calendar.num_context(draft.step))
        return shape.with_chunks([(chunk.start, chunk.length) for chunk in draft.chunks]) if draft.chunks else shape
