"""Batching: which rows decode and which prompts prefill in a step, within its token budget and its time target.

Decoding rows come first, then known tokens in chunks (chunked prefill). Chunk sizes follow the cost table, so that a
step with decoding rows keeps the inter-token latency target.
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

MIN_PREFILL_TOKENS = 16  # per step with prompts, at any cost, so that prompts never starve: one block
MAX_STEP_S = 0.5  # default of `Policy.max_step_s` on a CPU, where a step of the whole token budget may take a minute
_PER_SMALLEST = 2  # or this factor times the step with the smallest chunk: most of a long step is not for its tokens
PATIENCE_S = 0.04  # queue delay of prompts beyond which the target grows

# The default inter-token latency target.
MAX_STRETCH = 2.5  # largest factor while prompts queue
PER_DECODE = 1.6  # at least this factor times the step without prompts: a step of many rows takes long by itself
_BESIDE_PROMPTS = 2.8  # times the step of a single decoding row
_UNNOTICED_S = 0.01  # and at least this


def usual_target_s(decode_s: float) -> float:
    """The default inter-token latency target, if a step with one decoding row takes `decode_s`."""
    return max(_UNNOTICED_S, _BESIDE_PROMPTS * decode_s)


def stretched(target_s: float, queue_s: float, most: float) -> float:
    """The step time to aim at when the prompts ahead of the last one take `queue_s` to compute.

    The target grows with sqrt(queue_s / 40 ms), at most `most` times: a longer queue delays waiting prompts and
    decoding rows alike.
    """
    return target_s * min(max(sqrt(queue_s / PATIENCE_S), 1.0), most)


def largest_next_chunk(
    table: CostTable, shape: StepShape, start: int, most: int, target_s: float, captured_sizes: tuple[int, ...] = ()
) -> int:
    """The largest further chunk with which a step of this shape is predicted to take at most `target_s`.

    The first chunk of a step has at least `MIN_PREFILL_TOKENS` (or `most`, if that is less), even if the step then
    takes longer; a further one may have none. Lengths are tried in ascending order: a corrected table need not be
    monotone, and a length beyond one that misses the target is not trusted. Candidates are the captured sizes, or
    without any, doubling lengths followed by a bisection.
    """
    least = 0 if shape.num_chunk_tokens else min(most, MIN_PREFILL_TOKENS)

    def fits(length: int) -> bool:
        return table.predict_s(shape.with_chunk(start, length)) <= target_s

    if captured_sizes:
        lengths = [*(size for size in captured_sizes if least < size < most), most]
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
    """Grants blocks and assigns chunks."""

    __slots__ = ("_cost", "_preemption", "_state")

    def __init__(self, state: SchedulerState, preemption: Preemption, cost: CostTable) -> None:
        self._state = state
        self._preemption = preemption
        self._cost = cost

    # Decoding rows.

    def schedule_decodes(self, builder: PlanBuilder) -> None:
        calendar = self._state.calendar
        rows = calendar.due(builder.step)
        if len(rows):
            blocks = self._state.kv.grow_each(rows)
            if blocks is None:
                self._grant_one_by_one(rows, builder)
            else:
                builder.grant_each(rows, blocks)
                calendar.book_granted(rows, builder.step)
                self._bill(rows, builder.step)
        builder.num_decoding = calendar.num_decoding - len(builder.paused)
        builder.budget -= builder.num_decoding

    def _grant_one_by_one(self, rows: IndexArray, builder: PlanBuilder) -> None:
        """There are not blocks for all rows: grant in order of precedence, and preempt where needed."""
        calendar = self._state.calendar
        granted_list: list[Row] = []
        for sequence in self._state.by_precedence(rows.tolist()):
            row = sequence.row
            if sequence.state is not SequenceState.RUNNING or row is None:  # preempted for an earlier one
                continue
            while not (granted := self._state.kv.grow(row, sequence.request.id)):
                builder.pressure = True
                if (
                    not self._preemption.preempt_for_block(sequence.request.id)
                    or sequence.state is not SequenceState.RUNNING
                ):
                    break
            (granted_list if granted else builder.paused).append(row)
        granted_list = [row for row in granted_list if calendar.is_decoding(row)]  # some were preempted after all
        builder.paused = [row for row in builder.paused if calendar.is_decoding(row)]
        granted_rows = np.array(granted_list, dtype=np.intp)
        builder.grant_each(
            granted_rows, np.array([self._state.kv.tables.last(row) for row in granted_list], dtype=np.int32)
        )
        calendar.book_granted(granted_rows, builder.step)
        self._bill(granted_rows, builder.step)

    def _bill(self, rows: IndexArray, step: int) -> None:
        """Each row was granted a block: charge for the tokens and blocks since its last grant."""
        state = self._state
        state.billing.charge_rows(rows, state.calendar.positions_at(rows, step), state.kv.tables.lengths[rows] - 1)

    # Known tokens. From here on no row is preempted.

    def start_forked(self, builder: PlanBuilder) -> None:
        """Siblings and beams that were forked since the last plan."""
        builder.appends.extend(self._state.appends)
        for sequence in self._state.forked:
            assert sequence.row is not None, sequence
            builder.assign(sequence, self._state.kv.tables.of(sequence.row).copy())

    def schedule_host_driven(self, builder: PlanBuilder) -> None:
        for sequence in tuple(self._state.host_driven):
            if builder.budget > 0:
                self.schedule_chunk(sequence, builder, decoding=True)

    def schedule_short_prefills(self, builder: PlanBuilder) -> None:
        """Unfinished prompts; half of the remaining budget is kept for long ones, if there are any."""
        builder.budget = self._prefill_budget(builder)
        if self._long():
            builder.kept_budget = builder.budget // 2 if self._state.policy.regime.chunked else 0
            builder.budget -= builder.kept_budget
        for sequence in tuple(self._state.prefilling):
            if builder.budget <= 0:
                break
            if not self._is_long(sequence):
                self.schedule_chunk(sequence, builder)

    def schedule_long_prefills(self, builder: PlanBuilder) -> None:
        """Long prompts, after admission: their half, and what is left."""
        builder.budget += builder.kept_budget
        for sequence in self._long():
            if builder.budget > 0 and sequence not in builder.chunk_sequences:
                self.schedule_chunk(sequence, builder)

    def _long(self) -> list[Sequence]:
        return [sequence for sequence in self._state.prefilling if self._is_long(sequence)]

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_tokens >= self._state.policy.order.long_prompt

    def _prefill_budget(self, builder: PlanBuilder) -> int:
        """Tokens for prompts: the remaining budget, or fewer if the step is limited in time or has a time target."""
        state, target_s = self._state, self._state.policy.itl_target_s
        if not (state.prefilling or state.waiting) or not state.policy.regime.chunked:
            return builder.budget
        if state.policy.max_step_s is not None:
            builder.budget = self._limited_in_time(builder, state.policy.max_step_s)
        if target_s is None or builder.num_decoding == 0:
            return builder.budget
        start = state.prefilling[0].num_planned if state.prefilling else 0
        shape, captured_sizes = self.shape(builder), state.policy.captured_beside(builder.num_decoding)
        target_s = max(target_s, state.policy.itl_per_decode * self._cost.predict_s(shape))
        length = largest_next_chunk(self._cost, shape, start, builder.budget, target_s, captured_sizes)
        queue_s = target_s * self._num_waiting_tokens() / max(length, 1)
        stretched_s = stretched(target_s, queue_s, state.policy.itl_stretch)
        if stretched_s == target_s:
            return length
        return largest_next_chunk(self._cost, shape, start, builder.budget, stretched_s, captured_sizes)

    def _limited_in_time(self, builder: PlanBuilder, max_step_s: float) -> int:
        """As many tokens as are predicted to take `max_step_s`, or twice as long as the fewest."""
        shape, fewest = self.shape(builder), min(builder.budget, MIN_PREFILL_TOKENS)
        start = max([sequence.num_planned for sequence in self._state.prefilling], default=0)
        limit_s = max(max_step_s, _PER_SMALLEST * self._cost.predict_s(shape.with_chunk(start, fewest)))
        return max(fewest, largest_next_chunk(self._cost, shape, start, builder.budget, limit_s))

    def _num_waiting_tokens(self) -> int:
        """Prompt tokens still to be computed, without those of the longest prefill: what other prompts wait for."""
        prefilling, waiting = self._state.prefilling, self._state.waiting
        if len(prefilling) + len(waiting) < 2:
            return 0
        remaining = [sequence.num_tokens - sequence.num_planned for sequence in prefilling]
        return sum(remaining) - max(remaining, default=0) + waiting.num_tokens

    def schedule_chunk(self, sequence: Sequence, builder: PlanBuilder, *, decoding: bool = False) -> None:
        """Plan known tokens within the budget. With the last of them the row starts to decode, or to finish if pooled.

        `decoding`: a beam computes the token that the host chose; it is charged for the token it generates, not for
        this one too.
        """
        state, row, request, num_tokens = self._state, sequence.row, sequence.request, len(sequence.tokens)
        assert row is not None, sequence
        start = sequence.num_planned
        length = min(builder.budget, num_tokens - start)
        builder.grant(row, state.kv.grow_to(row, start + length, request.id))
        sequence.num_planned = start + length
        builder.chunk(sequence, start, length, output_of(sequence, start, length))
        state.counters.recomputed_tokens += max(min(start + length, sequence.num_computed_before) - start, 0)
        num_blocks, tenant, pooled = state.kv.tables.lengths.item(row), request.tenant, request.sampling.pooled
        catches_up = sequence.num_planned == num_tokens
        state.billing.charge_chunk(tenant, 0 if decoding else length, int(catches_up and not pooled), num_blocks)
        if catches_up:
            state.remove_prefill(sequence)
            if pooled or request.beam is None:
                if request.sampling.masked:
                    state.masked_rows.add(row)
                capacity = num_blocks * state.kv.block_size
                state.calendar.start(row, builder.step + 1, num_tokens, sequence.last_position, capacity)
                state.billing.start(row, tenant, num_tokens)

    def shape(self, builder: PlanBuilder) -> StepShape:
        """The inputs of the cost model for this step."""
        shape = StepShape(builder.num_decoding, self._state.calendar.num_context(builder.step))
        return shape.with_chunks([(chunk.start, chunk.length) for chunk in builder.chunks]) if builder.chunks else shape
