"""Batching: which rows decode and which prompts prefill in a step, within its token budget and its time target.

Decoding rows come first, then known tokens in chunks (chunked prefill). Chunk sizes follow the cost table, so that a
step with decoding rows keeps the inter-token latency target.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IndexArray, Row
from quire.core.request import Sequence, SequenceState
from quire.core.step import Drafts
from quire.kv.manager import count_blocks
from quire.sched.cost_model import CostTable, StepShape
from quire.sched.pacing import (
    MANY_STRETCH,
    MAX_STRETCH,
    MIN_PREFILL_TOKENS,
    QUEUE_STRETCH,
    Demand,
    Targets,
    choose_pace,
    largest_next_chunk,
    long_limit_s,
)
from quire.sched.pipelining import MicroBatches
from quire.sched.plan_builder import PlanBuilder, output_of
from quire.sched.preemption import Preemption
from quire.sched.queue import aged_class
from quire.sched.state import SchedulerState

MAX_STEP_S = 0.5  # default of `Policy.max_step_s` on a CPU, where a step of the whole token budget may take a minute
SHORT_BY_LONGEST = 16  # a prompt with less than this part of the work of the longest in progress does not wait for it
_NO_ROWS: IndexArray = np.empty(0, dtype=np.intp)
_PER_SMALLEST = 2  # or this factor times the step with the smallest chunk: most of a long step is not for its tokens


class StepBatcher:
    """Grants blocks and assigns chunks."""

    __slots__ = ("_cost", "_micro_batches", "_preemption", "_state")

    def __init__(self, state: SchedulerState, preemption: Preemption, cost: CostTable, max_rows: int) -> None:
        self._state = state
        self._preemption = preemption
        self._cost = cost
        self._micro_batches = MicroBatches(max_rows, state.policy.num_stages)

    # Decoding rows.

    def schedule_decodes(self, builder: PlanBuilder) -> None:
        calendar = self._state.calendar
        rows = calendar.due(builder.step)
        if self._micro_batches.active:
            self._divide_decodes(rows, builder)
        else:
            self._grant_blocks(rows, builder)
        builder.num_decoding = calendar.num_decoding - len(builder.paused)
        builder.budget -= builder.num_decoding

    def _divide_decodes(self, rows: IndexArray, builder: PlanBuilder) -> None:
        """The share of a step in a pipeline. If all of it is denied blocks, which the other rows may hold or will
        release, these come instead: a step that computes nothing releases nothing."""
        calendar = self._state.calendar
        in_flight, deferred = self._micro_batches.divide(calendar.decoding_rows(), self._state.last_absorbed)
        builder.paused = [Row(row) for row in (*in_flight.tolist(), *deferred.tolist())]
        self._grant_blocks(rows[~np.isin(rows, builder.paused)], builder)
        if len(builder.paused) == calendar.num_decoding and len(deferred):
            others = [row for row in deferred.tolist() if calendar.is_decoding(row)]
            builder.paused = [row for row in builder.paused if row not in others]
            self._grant_blocks(rows[np.isin(rows, others)], builder)

    def _grant_blocks(self, rows: IndexArray, builder: PlanBuilder) -> None:
        """Rows that need one more block for this step."""
        calendar, kv = self._state.calendar, self._state.kv
        drafting = calendar.short(builder.step, kv.tables.lengths) if calendar.has_drafting else _NO_ROWS
        if len(drafting):
            self._grant_one_by_one(np.concatenate([rows, drafting]), builder)
        elif len(rows):
            blocks = kv.grow_each(rows)
            if blocks is None:
                self._grant_one_by_one(rows, builder)
            else:
                builder.grant_each(rows, blocks)
                calendar.book_granted(rows, builder.step)
                self._bill(rows, builder.step)

    def _grant_one_by_one(self, rows: IndexArray, builder: PlanBuilder) -> None:
        """There are not blocks for all rows, or some draft: grant in order of precedence, and preempt where needed."""
        state, calendar = self._state, self._state.calendar
        granted_list: list[Row] = []  # with bookings
        drafting = [(row, state.kv.tables.lengths.item(row)) for row in rows.tolist() if calendar.is_drafting(row)]
        for sequence in state.by_precedence(rows.tolist()):
            row = sequence.row
            if sequence.state is not SequenceState.RUNNING or row is None:  # preempted for an earlier one
                continue
            while not (granted := self._grow(row, sequence, builder.step)):
                builder.pressure = True
                if (
                    calendar.is_ahead(row)  # it may need none: the next result says where it is
                    or not self._preemption.preempt_for_block(sequence.request.id)
                    or sequence.state is not SequenceState.RUNNING
                ):
                    break
            if not granted:
                builder.paused.append(row)
            elif not calendar.is_drafting(row):
                granted_list.append(row)
        granted_list = [row for row in granted_list if calendar.is_decoding(row)]  # some were preempted after all
        builder.paused = [row for row in builder.paused if calendar.is_decoding(row)]
        granted_rows = np.array(granted_list, dtype=np.intp)
        builder.grant_each(granted_rows, np.array([state.kv.tables.last(row) for row in granted_list], dtype=np.int32))
        calendar.book_granted(granted_rows, builder.step)
        self._bill(granted_rows, builder.step)
        for row, num_before in drafting:
            if calendar.is_drafting(row):
                builder.grant(row, state.kv.tables.of(row)[num_before:].copy())

    def _grow(self, row: Row, sequence: Sequence, step: int) -> bool:
        """Allocate what a row lacks for this step: one block, or as many as it may reach with the drafts in flight."""
        state = self._state
        if not state.calendar.is_drafting(row):
            return state.kv.grow(row, sequence.request.id)
        num_needed = count_blocks(state.calendar.reach(row, step) + 1, state.kv.block_size)
        while state.kv.tables.lengths.item(row) < num_needed:
            if not state.kv.grow(row, sequence.request.id):
                return False
        return True

    def _bill(self, rows: IndexArray, step: int) -> None:
        """Each row was granted a block: charge for the tokens and blocks since its last grant."""
        state = self._state
        if state.governor.active:
            positions = state.calendar.positions_reached(rows, step)
            state.billing.charge_positions(rows, positions, state.kv.block_size)
            return
        state.billing.charge_rows(rows, state.calendar.positions_at(rows, step), state.kv.tables.lengths[rows] - 1)

    # Known tokens. From here on no row is preempted.

    def start_forked(self, builder: PlanBuilder) -> None:
        """Siblings and beams that were forked since the last plan."""
        builder.appends.extend(self._state.appends)
        for sequence in self._state.forked:
            assert sequence.row is not None, sequence
            continuation = self._state.continuation(sequence)
            builder.assign(sequence, self._state.kv.tables.of(sequence.row).copy(), continuation)

    def schedule_host_driven(self, builder: PlanBuilder) -> None:
        for sequence in tuple(self._state.host_driven):
            if builder.budget > 0:
                self.schedule_chunk(sequence, builder, decoding=True)

    def schedule_short_prefills(self, builder: PlanBuilder) -> None:
        """Unfinished prompts; half of the remaining budget is kept for long ones, if there are any."""
        builder.budget = self._prefill_budget(builder)
        if self._state.policy.regime.chunked:
            self._note_long(builder)
        if builder.long_prefills:
            builder.kept_budget = builder.budget // 2
            builder.budget -= builder.kept_budget
        for sequence in tuple(self._state.prefilling):
            if builder.budget <= 0:
                break
            if sequence not in builder.long_prefills:
                self.schedule_chunk(sequence, builder)

    def schedule_long_prefills(self, builder: PlanBuilder) -> None:
        """Long prompts, after the admission of short ones: their half, and what is left."""
        builder.budget += builder.kept_budget
        for sequence in (*builder.long_prefills, *self._state.prefilling):
            if builder.budget <= 0:
                break
            if sequence not in builder.chunk_sequences and sequence.num_planned < sequence.num_tokens:
                self.schedule_chunk(sequence, builder)

    def _note_long(self, builder: PlanBuilder) -> None:
        """Long prompts in progress: by class, least-served tenant, and as they were admitted. A prompt that was found
        in the cache but for a short end is a short one; so is one that is short by the longest."""
        state, order = self._state, self._state.policy.order
        work = {each: each.num_tokens - each.group.num_cached for each in state.prefilling}
        builder.least_long = max(order.long_prompt, max(work.values(), default=0) // SHORT_BY_LONGEST)
        long = [each for each in state.prefilling if work[each] >= builder.least_long]
        if len(long) > 1:
            long.sort(key=lambda each: self._precedence(each, builder.now_s))
        builder.long_prefills = long

    def _precedence(self, sequence: Sequence, now_s: float) -> tuple[int, float, int, int]:
        """Of a long prompt in progress, the smallest first."""
        request, order = sequence.request, self._state.policy.order
        aged = aged_class(request.priority, now_s - sequence.group.arrived_s, order.ageing_s)
        service = self._state.shares.service(request.tenant) if order.fair else 0.0
        return aged, service, sequence.assigned_step, sequence.id

    def _prefill_budget(self, builder: PlanBuilder) -> int:
        """Tokens for prompts: the remaining budget, or fewer if the step is limited in time or has time targets."""
        state, policy = self._state, self._state.policy
        if not (state.prefilling or state.waiting) or not policy.regime.chunked:
            return builder.budget
        if policy.max_step_s is not None:
            builder.budget = self._limited_in_time(builder, policy.max_step_s)
        if policy.itl_target_s is None or (builder.num_decoding == 0 and policy.ttft_target_s is None):
            return builder.budget
        start = state.prefilling[0].num_planned if state.prefilling else 0
        shape, sizes = self.shape(builder), policy.captured_beside(builder.num_decoding)
        itl_s = max(policy.itl_target_s, policy.itl_per_decode * self._cost.predict_s(shape))
        limit_s, queue_limit_s = (
            max(stretch * policy.itl_target_s, MANY_STRETCH * itl_s) for stretch in (MAX_STRETCH, QUEUE_STRETCH)
        )
        builder.itl_s = itl_s
        long_s = long_limit_s(state.late_steps.usual * itl_s, itl_s, builder.num_decoding)
        targets = Targets(itl_s, policy.ttft_target_s, limit_s, queue_limit_s, long_s)
        builder.pace = choose_pace(
            self._cost, shape, start, builder.budget, sizes, targets, self._demand(builder.now_s)
        )
        return builder.pace.num_tokens

    def _limited_in_time(self, builder: PlanBuilder, max_step_s: float) -> int:
        """As many tokens as are predicted to take `max_step_s`, or twice as long as the fewest."""
        shape, fewest = self.shape(builder), min(builder.budget, MIN_PREFILL_TOKENS)
        start = max([sequence.num_planned for sequence in self._state.prefilling], default=0)
        limit_s = max(max_step_s, _PER_SMALLEST * self._cost.predict_s(shape.with_chunk(start, fewest)))
        return max(fewest, largest_next_chunk(self._cost, shape, start, builder.budget, limit_s))

    def _demand(self, now_s: float) -> Demand:
        """The backlog is without the longest prefill, for which no other prompt need wait."""
        state = self._state
        tokens_per_s, num_prompts = state.load.tokens_per_s(now_s), len(state.prefilling) + len(state.waiting)
        remaining = [sequence.num_tokens - sequence.num_planned for sequence in state.prefilling]
        waiting = int(state.load.missed_share * state.waiting.num_tokens)
        total = sum(remaining) + waiting
        backlog = total - max(remaining, default=0) if num_prompts > 1 else 0
        return Demand(tokens_per_s, backlog, total if state.late_steps.allowed else 0)

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
                speculation = state.policy.speculation
                if state.governor.active and speculation.allows(request.sampling):
                    reads_text = speculation.reads_text(request.sampling)
                    state.governor.start(row, builder.step + 1, num_tokens=num_tokens, reads_text=reads_text)
                    if reads_text:
                        state.governor.read_text(row, sequence.tokens, state.continuation(sequence))

    # Drafts.

    def schedule_drafts(self, builder: PlanBuilder) -> None:
        """Drafts come last, with the budget and the blocks that are left. They never pause or preempt a row."""
        state, governor, calendar = self._state, self._state.governor, self._state.calendar
        budget = builder.max_tokens - builder.num_tokens
        max_verified = state.policy.speculation.max_verified
        if max_verified:
            if builder.chunks:
                return
            budget = min(budget, max_verified - builder.num_tokens)
        if not governor.active or builder.pressure or budget <= 0 or state.policy.regime.padded:
            return
        rows = governor.candidates(builder.step)
        if not len(rows):
            return
        limits, forced = calendar.num_left(rows, builder.step), self._num_forced(rows, builder.step)
        counts = governor.choose(builder.step, rows, limits, self.shape(builder), budget, forced)
        drafting = counts > 0
        if np.count_nonzero(drafting):
            self._grant_for_drafts(rows[drafting], counts[drafting], builder)

    def _num_forced(self, rows: IndexArray, step: int) -> NDArray[np.int64]:
        """How many tokens the grammar of each row forces after the one that it computes in this step."""
        num_known: NDArray[np.int64] = np.zeros(len(rows), dtype=np.int64)
        state = self._state
        if state.forced:
            spans = [state.forced.get(Row(row)) for row in rows.tolist()]
            num_known += [0 if span is None else span.start + len(span.tokens) for span in spans]
            num_known -= state.calendar.positions_at(rows, step) + 1
        return num_known.clip(min=0)

    def _grant_for_drafts(self, rows: IndexArray, counts: NDArray[np.int64], builder: PlanBuilder) -> None:
        """Blocks for the drafts of rows, or fewer drafts."""
        state, tables, block_size = self._state, self._state.kv.tables, self._state.kv.block_size
        reach = state.calendar.reaches(rows, builder.step)
        for place in np.flatnonzero(reach + counts >= tables.lengths[rows] * block_size).tolist():
            row, last = Row(int(rows[place])), int(reach[place] + counts[place])
            num_before, request = tables.lengths.item(row), state.rows.assigned[row].request
            while tables.lengths.item(row) * block_size <= last and state.kv.grow(row, request.id):
                pass
            builder.grant(row, tables.of(row)[num_before:].copy())
            counts[place] = min(counts[place], tables.lengths.item(row) * block_size - 1 - reach[place])
        kept = counts > 0
        builder.drafts = Drafts(rows[kept].astype(np.int32), counts[kept].astype(np.int32))
        forced = rows[kept & (self._num_forced(rows, builder.step) > 0)]
        builder.forced = tuple([state.forced[Row(row)] for row in forced.tolist()])

    def note_step(self, builder: PlanBuilder) -> None:
        """The step is taken: note who is in it, before the calendar moves those that pause."""
        if self._micro_batches.active:
            self._micro_batches.note(builder, self._state.calendar.decoding_rows())

    def book_drafts(self, builder: PlanBuilder) -> None:
        """The step is taken: enter its drafts in the calendar."""
        state, drafts = self._state, builder.drafts
        if len(drafts) or state.calendar.has_drafting:
            state.calendar.book_drafts(drafts.rows.astype(np.intp), drafts.counts, state.kv.tables.lengths)

    def shape(self, builder: PlanBuilder) -> StepShape:
        """The inputs of the cost model for this step."""
        calendar = self._state.calendar
        num_context = calendar.num_context(builder.step)
        if self._micro_batches.active:  # of the rows in this step, about
            num_context = num_context * builder.num_decoding // max(calendar.num_decoding, 1)
        shape = StepShape(builder.num_decoding, num_context)
        if len(builder.drafts):
            shape = shape.with_drafts(int(builder.drafts.counts.sum()), int(builder.drafts.counts.max()))
        return shape.with_chunks([(chunk.start, chunk.length) for chunk in builder.chunks]) if builder.chunks else shape
