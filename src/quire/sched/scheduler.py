"""The scheduler: plans every step with integers, and absorbs its result.

There is one rule and no phases: a sequence computes its known tokens within a token budget. Decoding rows come first,
then unfinished prefills in chunks, then newly admitted requests. Up to `depth` plans may be in flight
(`sched/loop.py`). Three invariants keep run-ahead safe:
(a) a row and its blocks are released only after the last step that touched them is absorbed;
(b) a row that is denied a block waits if blocks are already being released, and only otherwise preempts;
(c) a step in which a row was denied a block admits no request.
"""

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Draining, DuplicateRequest, NeverFits, QueueFull
from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import (
    BlockOwner,
    Request,
    RequestGroup,
    Sequence,
    SequenceState,
    WaitCause,
)
from quire.core.step import (
    ChunkOutput,
    FinishReason,
    ForcedTokens,
    StepPlan,
    StepResult,
)
from quire.core.step_output import StepOutput
from quire.kv.manager import KVManager
from quire.kv.prefix_holds import HeldPrefix
from quire.sched.admission import Admission
from quire.sched.batching import StepBatcher
from quire.sched.cost_model import UNMEASURED, CostTable
from quire.sched.explain import Explanation, explain
from quire.sched.lookup_hits import LookupHits
from quire.sched.plan_builder import PlanBuilder
from quire.sched.policy import Policy
from quire.sched.preemption import Preemption
from quire.sched.reservation import most_blocks
from quire.sched.result_processor import ResultProcessor
from quire.sched.rows import NO_SEQUENCE
from quire.sched.speculation import SpeculationPolicy
from quire.sched.state import Counters, SchedulerState
from quire.sched.steady_decode import SteadyDecode, StepInFlight

_UNBOUNDED = 1 << 40  # token budget of a step without chunked prefill


class Scheduler:
    """All requests of one engine, from `add` until their last block is released."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_rows: int,
        max_step_tokens: int,
        policy: Policy | None = None,
        cost: CostTable | None = None,
    ) -> None:
        assert 0 < max_rows <= max_step_tokens, (max_rows, max_step_tokens)
        self.policy = policy or Policy()
        self._cost = cost or CostTable(UNMEASURED)
        self.kv = kv
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self._state = SchedulerState(kv, self.policy, max_rows, self._cost)
        preemption = Preemption(self._state)
        self._batcher = StepBatcher(self._state, preemption, self._cost, max_rows)
        self._admission = Admission(self._state, preemption, self._batcher.schedule_chunk)
        self._steady = SteadyDecode(self._state, self._cost)
        self._results = ResultProcessor(self._state, self._cost)
        self.draining = False
        self._in_flight: deque[StepInFlight] = deque()
        self._planned_s: deque[float] = deque()  # when each of them was planned
        self._reset = False  # the runner must drop all rows
        self._absorbed_s = 0.0
        self._next_sequence = 0

    # Requests.

    def add(self, request: Request, now_s: float = 0.0) -> tuple[Sequence, ...]:
        """Queue a validated request; its sequences, in order. A `QuireError` means: not accepted."""
        if request.id in self._state.groups:
            raise DuplicateRequest(request.id)
        if self.draining:
            raise Draining()
        needed, blocks = most_blocks(request, self.kv.block_size), self.kv.pool.num_in_service
        if needed > blocks or request.num_sequences > self.max_rows:
            raise NeverFits(request.max_length - 1, needed, blocks, self.kv.block_size)
        limit, token_limit = self.policy.max_waiting, self.policy.max_waiting_tokens
        if limit is not None and self.num_waiting >= limit:
            raise QueueFull(self.num_waiting, limit, "requests")
        if token_limit is not None:
            num_tokens = self.num_waiting_tokens
            if num_tokens and num_tokens + len(request.prompt) > token_limit:
                raise QueueFull(num_tokens, token_limit, "prompt tokens")
        group = RequestGroup(request, self._next_sequence, now_s)
        self._next_sequence += request.num_sequences
        self._state.add(group)
        return group.sequences

    def abort(self, request_id: RequestId) -> tuple[Sequence, ...]:
        """End a request in any state; its sequences that had not ended yet."""
        group = self._state.groups.get(request_id)
        sequences = () if group is None else group.sequences
        ended = {sequence.id for sequence in sequences if self._state.finish(sequence, FinishReason.ABORT)}
        return tuple(sequence for sequence in (() if group is None else group.returned) if sequence.id in ended)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End one sequence in any state; False if it had ended already."""
        return self._state.finish(sequence, reason)

    def conclude(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence for a reason found outside a step; it is reported with the next result."""
        if self._state.finish(sequence, reason):
            self._state.unreported.append(sequence)

    def expect(self, sequence: Sequence, start: int, tokens: IntArray) -> None:
        """The grammar of a sequence forces these tokens from position `start` on; none: nothing is known. Its drafts,
        until the next call."""
        if sequence.state is SequenceState.RUNNING and sequence.row is not None:
            self._state.forced.pop(sequence.row, None)
            if len(tokens):
                self._state.forced[sequence.row] = ForcedTokens(sequence.row, start, tokens)

    def fail(self, group: RequestGroup) -> None:
        """End a request that made a step fail; it is reported with the next result."""
        self._state.fail(group)

    def drain(self) -> None:
        """Accept no new requests; finish those accepted."""
        self.draining = True

    # Prefixes that are copied from or to another engine.

    def hold_prefix(self, owner: BlockOwner, tokens: IntArray, *, with_room: bool) -> HeldPrefix | None:
        """Hold the cached blocks of some tokens, and with room for the others, until `release_prefix`."""
        return self.kv.holds.hold(self.kv, owner, tokens, with_room=with_room)

    def release_prefix(self, number: int, *, written: bool) -> None:
        """End a hold, unless a failure has ended it. `written`: its room is filled, and cached from now on."""
        if number in self.kv.holds.held:
            self.kv.holds.release(self.kv, number, written=written)

    # One step.

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step is absorbed."""
        steady = self._steady.plan(now_s)
        if steady is not None:
            self._in_flight.append(steady.flight)
            self._planned_s.append(now_s)
            return steady.plan
        self._steady.end()
        builder = self._begin(now_s)
        self._batcher.schedule_decodes(builder)
        self._batcher.start_forked(builder)
        self._batcher.schedule_host_driven(builder)
        self._batcher.schedule_short_prefills(builder)
        self._admission.admit(builder)
        self._batcher.schedule_long_prefills(builder)
        self._admission.admit_deferred(builder)
        self._batcher.schedule_drafts(builder)
        return self._commit(builder)

    def absorb(self, result: StepResult, now_s: float = 0.0) -> StepOutput:
        """Apply the result of the oldest step in flight; its output, by sequence."""
        flight, planned_s = self._in_flight.popleft(), self._planned_s.popleft()
        assert result.step == flight.step == self._state.last_absorbed + 1, (result.step, flight.step)
        self._state.last_absorbed = result.step
        started_s = max(planned_s, self._absorbed_s)
        seconds, self._absorbed_s = now_s - started_s, now_s  # 0 without a clock, as in some benchmarks
        steady = self._steady.absorb(flight, result, seconds)
        if steady is not None:
            return steady
        return self._results.process(flight, result, seconds)

    def overdue(self) -> StepOutput | None:
        """Sequences that finished without a step to report them with, if there are any."""
        return self._results.take_unreported()

    # Queries. Nothing outside `sched/` reads the state, so no change can bypass the journal.

    @property
    def idle(self) -> bool:
        """No request waits or runs, no step is in flight, and every finished sequence was reported."""
        return not self._state.groups and not self._in_flight and not self._state.unreported

    @property
    def cost(self) -> CostTable:
        """What steps take, with all that was measured so far."""
        self._steady.note_deferred()
        return self._cost

    @property
    def last_planned(self) -> int:
        """The number of the last step planned; -1 before the first."""
        return self._state.last_planned

    @property
    def last_absorbed(self) -> int:
        """The number of the last step absorbed or lost; -1 before the first."""
        return self._state.last_absorbed

    @property
    def expected_s(self) -> float:
        """Predicted time of the steps in flight."""
        in_flight = self._in_flight
        return in_flight[0].expected_s if len(in_flight) == 1 else sum([flight.expected_s for flight in in_flight])

    @property
    def has_masked(self) -> bool:
        """Whether any request is under a grammar."""
        return self._state.num_masked > 0

    @property
    def num_running(self) -> int:
        """Request groups that hold rows."""
        return len(self._state.groups) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Request groups without a row: queued, waiting for an in-flight prefix, or set aside by a fault bisection."""
        return len(self._state.waiting) + self._state.inflight_prefixes.num_followers + len(self._state.excluded)

    @property
    def num_queued(self) -> int:
        """Request groups in the waiting queue."""
        return len(self._state.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the groups that are queued or wait for an in-flight prefix."""
        return self._state.waiting.num_tokens + self._state.inflight_prefixes.num_waiting_tokens

    @property
    def wait_cause(self) -> WaitCause | None:
        """Why the queue head was not admitted by the last plan."""
        return self._admission.cause

    @property
    def counters(self) -> Counters:
        """Totals since the start, as a copy."""
        return deepcopy(self._state.counters)

    @property
    def num_preemptions(self) -> int:
        """Since the start; without a copy of all counters."""
        return self._state.counters.preemptions

    def group(self, request_id: RequestId) -> RequestGroup | None:
        return self._state.groups.get(request_id)

    def groups(self) -> tuple[RequestGroup, ...]:
        """All requests that wait, run or are being released, in order of arrival."""
        return tuple(self._state.groups.values())

    def running_groups(self) -> list[RequestGroup]:
        """Those with a running sequence, in order of arrival."""
        assigned = self._state.rows.assigned.values()
        running = {s.group.order: s.group for s in assigned if s.state is SequenceState.RUNNING}
        return [running[order] for order in sorted(running)]

    def running_sequences(self) -> list[Sequence]:
        """Those that hold a row and compute, in the order of their assignment."""
        return [each for each in self._state.rows.assigned.values() if each.state is SequenceState.RUNNING]

    def running_rows(self) -> NDArray[np.bool_]:
        """By row, whether a sequence computes in it: those of `running_sequences`, and preempted ones in flight."""
        running: NDArray[np.bool_] = self._state.rows.emitter_ids != NO_SEQUENCE
        return running

    def assigned_after(self, step: int) -> list[Sequence]:
        """Running sequences that got their rows in a later step. Work in proportion to their number."""
        latest = takewhile(lambda each: each.assigned_step > step, reversed(self._state.rows.assigned.values()))
        return [each for each in latest if each.state is SequenceState.RUNNING][::-1]

    def is_queued(self, group: RequestGroup) -> bool:
        return group in self._state.waiting

    def row_sequence(self, row: Row) -> Sequence | None:
        """The sequence that holds a row, running or being released."""
        return self._state.rows.assigned.get(row)

    def row_sequences(self, rows: Iterable[Row]) -> list[Sequence]:
        """The sequences that hold these rows; all are assigned."""
        assigned = self._state.rows.assigned
        return [assigned[row] for row in rows]

    def forked_sequences(self) -> tuple[Sequence, ...]:
        """Siblings and beams that were forked and start with the next plan."""
        return tuple(self._state.forked)

    def explain(self, group: RequestGroup) -> Explanation:
        """What a request waited for and what happened to it, up to the next step."""
        return explain(group, self._state.wait_history, self._state.last_planned + 1)

    # Planning.

    def _begin(self, now_s: float) -> PlanBuilder:
        state = self._state
        state.now_s = now_s
        step = state.last_planned + 1
        self.kv.step = step
        for group in state.deadlines.expire(now_s):
            self._state.fail(group, FinishReason.EXPIRED)
        state.requeue_ready()
        self._admission.preempt_for_waiting(now_s)
        return PlanBuilder(step, now_s, self.max_step_tokens if self.policy.regime.chunked else _UNBOUNDED)

    def _commit(self, builder: PlanBuilder) -> StepPlan | None:
        state = self._state
        state.wait_history.note(builder.step, self._admission.cause)
        bound = None if builder.pace is None or builder.budget > 0 else builder.pace.bound  # else prompts ran out
        state.wait_history.note_bound(builder.step, bound)
        if builder.empty:
            for row in builder.paused:  # the step is not taken
                state.calendar.book_again(row, builder.step)
            assert not builder.starts and not builder.chunks, builder.starts
            return None
        self._batcher.note_step(builder)
        for row in builder.paused:
            state.calendar.book_paused(row)
        self._batcher.book_drafts(builder)
        for sequence in state.forked:
            assert sequence.row is not None, sequence
            state.rows.mark_started(sequence.row)
        state.forked, state.appends = [], []
        state.last_planned = builder.step
        chunks = tuple(
            [(s, chunk.start + chunk.length) for s, chunk in zip(builder.chunk_sequences, builder.chunks, strict=True)]
        )
        moves = self.kv.take_moves()
        shape = self._batcher.shape(builder)
        expected_s = self._cost.predict_s(shape)
        if builder.num_decoding:
            pace = builder.pace
            if pace is None:
                state.late_steps.note()
            else:
                state.late_steps.note(expected_s / builder.itl_s, long=pace.long and bool(builder.chunks))
        self._in_flight.append(
            StepInFlight(builder.step, shape, expected_s, chunks, bool(moves), builder.drafts, builder.forced)
        )
        self._planned_s.append(builder.now_s)
        num_padding = self._padding(builder)
        counters = state.counters
        counters.computed_tokens += builder.num_tokens + shape.num_drafts
        counters.padding_tokens += num_padding
        counters.moved_blocks += len(moves)
        if bound is not None:
            counters.paced_steps[bound] = counters.paced_steps.get(bound, 0) + 1
        reset, self._reset = self._reset, False
        leaves, masked = state.rows.take_released(), self._masked(builder)
        plan = builder.build(moves, leaves, masked=masked, num_padding=num_padding, reset=reset)
        self._steady.begin(plan, expected_s)
        return plan

    def _masked(self, builder: PlanBuilder) -> tuple[Row, ...]:
        """The grammar rows that sample a token in this step."""
        masked, calendar = self._state.masked_rows, self._state.calendar
        if not masked:
            return ()
        choosing = {chunk.row for chunk in builder.chunks if ChunkOutput.SAMPLE in chunk.output}
        decoding = [row for row in masked if calendar.is_decoding(row) and row not in builder.paused]
        return tuple(sorted(choosing.intersection(masked).union(decoding)))

    def _padding(self, builder: PlanBuilder) -> int:
        """Padding tokens of a padded batch: short prompts up to the longest, and rows that have ended."""
        if not self.policy.regime.padded:
            return 0
        longest = max((chunk.length for chunk in builder.chunks), default=1)
        width = max(self._admission.batch_size, builder.num_decoding + len(builder.chunks))
        return width * longest - builder.num_tokens

    # For measurements and journals.

    def replace_speculation(self, policy: SpeculationPolicy, *, forget: bool) -> None:
        """For measurements: plan drafts by another policy from now on; forget what was accepted before."""
        self._state.governor.replace_policy(policy, forget=forget)
        self._steady.end()

    def replace_lookup_hits(self, hits: LookupHits) -> None:
        """For journals, before the first request: record what prompt lookup would have drafted, or read it."""
        self._state.governor.replace_hits(hits)

    # Failures.

    def lose_steps(self, *, keep_cache: bool) -> None:
        """The steps in flight gave no result: all rows are released, and their groups are admitted again.

        A lost step may or may not have copied its blocks: if it had any to copy, the cache is dropped.
        """
        state = self._state
        keep_cache = keep_cache and not any(flight.moves for flight in self._in_flight)
        self._steady.end()
        self._planned_s.clear()
        self._in_flight.clear()
        state.counters.lost_steps += state.last_planned - state.last_absorbed
        state.last_absorbed = state.last_planned
        Scheduler.withdraw_all(self)  # a journal records the lost steps, not this
        state.release_up_to(state.last_absorbed)
        state.rows.forget_runner()
        state.forked, state.appends = [], []
        self._reset = True
        if not keep_cache:
            self.kv.invalidate()

    def withdraw_all(self) -> None:
        """Release all rows; their groups are admitted again. Absorbed tokens stay in the cache."""
        for sequence in tuple(self._state.rows.assigned.values()):
            if sequence.state is SequenceState.RUNNING:
                self._state.withdraw(sequence.group, by=None)

    def admit_only(self, orders: frozenset[int] | None) -> None:
        """Admit only the groups of these orders from now on; None: all."""
        self._state.admit_only(orders)

    def fail_largest(self) -> None:
        """A step ran out of device memory: end the largest admitted group, so that the others can continue."""
        here = [group for group in self._state.groups.values() if not group.finished]
        assigned = [group for group in here if group.was_assigned] or here
        largest = max(assigned, key=lambda group: (most_blocks(group.request, 1), group.order), default=None)
        if largest is not None:
            self._state.fail(largest, FinishReason.OUT_OF_MEMORY)

    def reset_cache(self) -> int:
        """Evict every cached prefix that no row holds; the number of blocks freed."""
        return self.kv.reset_cache()

    def shrink(self, num_blocks: int) -> int:
        """Take blocks out of service while every accepted request still fits; how many."""
        needs = [most_blocks(group.request, self.kv.block_size) for group in self._state.groups.values()]
        spare = self.kv.pool.num_in_service - max(needs, default=1)
        return self.kv.shrink(min(num_blocks, max(spare, 0)))
