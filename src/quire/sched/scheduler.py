"""Decides every step with integers: who sits, who computes, who must go.

One rule and no phases: a sequence catches up with its known tokens within a token budget. Cruising rows come
first, then unfinished prefills in chunks, then new work. Up to `depth` plans may be in flight (`sched/loop.py`);
three laws keep that safe:
(a) a row and its blocks go back only when the last step that touched them is absorbed;
(b) a row that is denied a block waits if blocks are already on their way back, and only otherwise preempts;
(c) a step in which a row was denied a block admits nobody.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quire.core.errors import Draining, DuplicateRequest, NeverFits, QueueFull
from quire.core.events import EventKind, RequestEvent, WaitCause
from quire.core.ids import FloatArray, RequestId, Row
from quire.core.request import Request, RequestGroup, Sequence, SequenceState
from quire.core.step import Candidates, ChunkOutput, FinishReason, PromptLogprobs, StepPlan, StepResult, TopLogprobs
from quire.core.step_output import FinishedSequence, FirstToken, StepOutput
from quire.kv.manager import KVManager
from quire.sched.admission import Admission
from quire.sched.batching import StepBatcher
from quire.sched.beam_search import BeamUpdate
from quire.sched.cost_model import UNMEASURED, CostTable, StepShape
from quire.sched.explain import Explanation, explain
from quire.sched.plan_builder import PlanBuilder
from quire.sched.policy import Policy
from quire.sched.preemption import Preemption
from quire.sched.reservation import most_blocks
from quire.sched.state import Counters, SchedulerState

_UNBOUNDED = 1 << 40  # tokens of a step, where a prompt may not be cut


class _StepInFlight(NamedTuple):
    """A planned step whose result has not come."""

    step: int
    chunks: tuple[tuple[Sequence, int], ...]  # whose chunk, and the position where it ends
    shape: StepShape
    planned_s: float
    moves: bool  # whether it copies blocks


class Scheduler:
    """All requests of one engine, from `add` to their last block."""

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
        self.cost = cost or CostTable(UNMEASURED)
        self.kv = kv
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self._state = SchedulerState(kv, self.policy, max_rows)
        pressure = Preemption(self._state)
        self._feeding = StepBatcher(self._state, pressure, self.cost)
        self._admission = Admission(self._state, pressure, self._feeding.take_chunk)
        self.draining = False
        self._in_flight: deque[_StepInFlight] = deque()
        self._reset = False  # the runner must forget all rows
        self._absorbed_s = 0.0
        self._next_sequence = 0

    # Requests come and go.

    def add(self, request: Request, now_s: float = 0.0) -> tuple[Sequence, ...]:
        """Queue a request that passed the door; its continuations, in order. A `QuireError` means: not accepted."""
        if request.id in self._state.groups:
            raise DuplicateRequest(request.id)
        if self.draining:
            raise Draining()
        needed, blocks = most_blocks(request, self.kv.block_size), self.kv.pool.num_in_service
        if needed > blocks or request.num_sequences > self.max_rows:
            raise NeverFits(request.max_length - 1, needed, blocks, self.kv.block_size)
        most, most_tokens = self.policy.max_waiting, self.policy.max_waiting_tokens
        if most is not None and self.num_waiting >= most:
            raise QueueFull(self.num_waiting, most, "requests")
        if most_tokens is not None:
            num_tokens = self.num_waiting_tokens
            if num_tokens and num_tokens + len(request.prompt) > most_tokens:
                raise QueueFull(num_tokens, most_tokens, "prompt tokens")
        group = RequestGroup(request, self._next_sequence, now_s)
        self._next_sequence += request.num_sequences
        self._state.enter(group)
        return group.sequences

    def abort(self, request_id: RequestId) -> tuple[Sequence, ...]:
        """End a request, whatever state it is in; those of its sequences that had not ended yet."""
        group = self._state.groups.get(request_id)
        sequences = () if group is None else group.sequences
        ended = {sequence.id for sequence in sequences if self._state.finish(sequence, FinishReason.ABORT)}
        return tuple(sequence for sequence in (() if group is None else group.returned) if sequence.id in ended)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End one sequence, whatever state it is in; False if it had ended already."""
        return self._state.finish(sequence, reason)

    def conclude(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence for a reason that no step has found; it is told with the next result."""
        if self._state.finish(sequence, reason):
            self._state.ended_early.append(sequence)

    def fail(self, group: RequestGroup) -> None:
        """End a request because of which a step failed; it is told with the next result."""
        self._state.fail(group)

    def drain(self) -> None:
        """Accept nobody any more; who is here is served to the end."""
        self.draining = True

    # One step.

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an absorption."""
        draft = self._begin(now_s)
        self._feeding.decoding(draft)
        self._feeding.fresh(draft)
        self._feeding.host_driven(draft)
        self._feeding.short_prefills(draft)
        self._admission.admit(draft)
        self._feeding.long_prefills(draft)
        return self._commit(draft)

    def absorb(self, result: StepResult, now_s: float = 0.0) -> StepOutput:
        """Take in the oldest step in flight; its output, by sequence."""
        flight = self._in_flight.popleft()
        assert result.step == flight.step == self._state.last_absorbed + 1, (result.step, flight.step)
        self._state.last_absorbed = result.step
        self._observe(flight, now_s)
        rows = self._state.rows
        rows.note(result)
        emitters, tokens = rows.named(result.rows), result.tokens
        heard = emitters >= 0
        if np.count_nonzero(heard) < len(heard):
            emitters, tokens = emitters[heard], tokens[heard]
        logprobs: dict[int, TopLogprobs] = {
            name: top for row, top in result.logprobs.items() if (name := rows.listener(row)) is not None
        }
        scores: dict[int, PromptLogprobs] = {
            name: s for s in result.prompt_logprobs if (name := rows.listener(s.row)) is not None
        }
        pooled: dict[int, FloatArray] = {
            name: total for row, total in result.pooled.items() if (name := rows.listener(row)) is not None
        }
        first = self._state.first_tokens = [
            rows.assigned[row].group for row in result.pooled if rows.listener(row) is not None
        ]
        failed = {row for row, reason in result.ended if reason is FinishReason.ERROR}
        for sequence, stop in flight.chunks:
            self._note_computed(sequence, stop, failed=sequence.row in failed)
        finished = self._finish_ended(result)
        for group in self._state.forks.take_failed():  # not before: a row of theirs may be among those that ended
            self._state.fail(group)
        finished += self._advance_beams(result.candidates)
        self._state.release_up_to(result.step)
        finished, self._state.ended_early = finished + self._state.ended_early, []
        ends = tuple([_finished_sequence(sequence) for sequence in finished])
        return StepOutput(result.step, emitters, tokens, _first_tokens(first, finished), ends, logprobs, scores, pooled)

    def overdue(self) -> StepOutput | None:
        """Sequences that finished without a step to report them with, if there are any."""
        if not self._state.ended_early:
            return None
        ended, self._state.ended_early = tuple(self._state.ended_early), []
        ends = tuple([_finished_sequence(sequence) for sequence in ended])
        return StepOutput(self._state.last_absorbed, first_tokens=_first_tokens([], ended), finished=ends)

    # Queries. Nothing outside `sched/` reads the state, so no change can bypass the journal.

    @property
    def idle(self) -> bool:
        """No request waits or runs, no step is in flight, and every finished sequence was reported."""
        return not self._state.groups and not self._in_flight and not self._state.ended_early

    @property
    def last_planned(self) -> int:
        """The number of the last step planned; -1 before the first."""
        return self._state.last_planned

    @property
    def last_absorbed(self) -> int:
        """The number of the last step absorbed or lost; -1 before the first."""
        return self._state.last_absorbed

    @property
    def num_running(self) -> int:
        """Request groups that hold rows."""
        return len(self._state.groups) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Request groups without a row: queued, waiting for an in-flight prefix, or set aside by a fault bisection."""
        return len(self._state.room) + self._state.leaders.num_followers + len(self._state.aside)

    @property
    def num_queued(self) -> int:
        """Those of them in the waiting queue."""
        return len(self._state.room)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the groups that are queued or wait for an in-flight prefix."""
        return self._state.room.num_tokens + self._state.leaders.num_waiting_tokens

    @property
    def wait_cause(self) -> WaitCause | None:
        """What kept the head of the queue out of the last plan."""
        return self._admission.cause

    @property
    def counters(self) -> Counters:
        """Totals since the start, as a copy."""
        return replace(self._state.counters)

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

    def is_queued(self, group: RequestGroup) -> bool:
        return group in self._state.room

    def row_sequence(self, row: Row) -> Sequence | None:
        """The sequence that holds a row, running or being released."""
        return self._state.rows.assigned.get(row)

    def row_sequences(self, rows: Iterable[Row]) -> list[Sequence]:
        """The same for rows that are assigned."""
        assigned = self._state.rows.assigned
        return [assigned[row] for row in rows]

    def forked_sequences(self) -> tuple[Sequence, ...]:
        """Siblings and beams that were forked and start with the next plan."""
        return tuple(self._state.fresh)

    def explain(self, group: RequestGroup) -> Explanation:
        """What a request waited for and what happened to it, up to the next step."""
        return explain(group, self._state.stalls, self._state.last_planned + 1)

    # Planning.

    def _begin(self, now_s: float) -> PlanBuilder:
        state = self._state
        state.now_s = now_s
        step = state.last_planned + 1
        self.kv.step = step
        for group in state.deadlines.expire(now_s):
            self._state.fail(group, FinishReason.EXPIRED)
        state.wake()
        self._admission.preempt_for_class(now_s)
        return PlanBuilder(step, now_s, self.max_step_tokens if self.policy.regime.chunked else _UNBOUNDED)

    def _commit(self, draft: PlanBuilder) -> StepPlan | None:
        state = self._state
        state.stalls.note(draft.step, self._admission.cause)
        if draft.empty:
            for row in draft.paused:  # the step is not taken: they ask again in the same one
                state.calendar.book_again(row, draft.step)
            for row in draft.held:
                state.calendar.let_go(row)
            assert not draft.starts and not draft.chunks, draft.starts
            return None
        for row in draft.paused:
            state.calendar.book_paused(row, draft.step)
        for sequence in state.fresh:
            assert sequence.row is not None, sequence
            state.rows.tell(sequence.row)
        state.fresh, state.appends = [], []
        state.last_planned = draft.step
        chunks = tuple([(s, chunk.start + chunk.length) for s, chunk in zip(draft.chunked, draft.chunks, strict=True)])
        moves = self.kv.take_moves()
        self._in_flight.append(_StepInFlight(draft.step, chunks, self._feeding.shape(draft), draft.now_s, bool(moves)))
        num_padding = self._padding(draft)
        counters = state.counters
        counters.computed_tokens += draft.num_decoding + sum(chunk.length for chunk in draft.chunks)
        counters.padding_tokens += num_padding
        counters.moved_blocks += len(moves)
        reset, self._reset = self._reset, False
        leaves, masked = state.rows.take_released(), self._masked(draft)
        return draft.build(moves, leaves, masked=masked, num_padding=num_padding, reset=reset)

    def _masked(self, draft: PlanBuilder) -> tuple[Row, ...]:
        """The masked rows that choose a token in this step."""
        masked, calendar = self._state.masked, self._state.calendar
        if not len(masked):
            return ()
        idle = {*draft.paused, *draft.held}
        choosing = {chunk.row for chunk in draft.chunks if ChunkOutput.SAMPLE in chunk.output}
        rows = [row for row in masked if row in choosing or (calendar.is_decoding(row) and row not in idle)]
        for row in rows:
            masked.note(row, draft.step)
        return tuple(rows)

    def _padding(self, draft: PlanBuilder) -> int:
        """What a padded batch computes for nothing: short prompts up to the longest, and members that have ended."""
        if not self.policy.regime.padded:
            return 0
        longest = max((chunk.length for chunk in draft.chunks), default=1)
        width = max(self._admission.batch_size, draft.num_decoding + len(draft.chunks))
        return width * longest - draft.num_decoding - sum(chunk.length for chunk in draft.chunks)

    def _observe(self, flight: _StepInFlight, now_s: float) -> None:
        """How long a step took: from its plan, or from the step before it if that came back later. Where no time
        passes, as in a bench that gives none, there is nothing to learn."""
        started_s = max(flight.planned_s, self._absorbed_s)
        self._absorbed_s = now_s
        if now_s > started_s:
            self.cost.observe(flight.shape, now_s - started_s)

    # Absorbing.

    def _note_computed(self, sequence: Sequence, stop: int, *, failed: bool) -> None:
        """A chunk's keys and values are written: others may find them, followers and siblings may begin."""
        state, row, request, num_tokens = self._state, sequence.row, sequence.request, len(sequence.tokens)
        assert row is not None, sequence
        sequence.num_computed = stop
        sequence.caught_up = stop == sequence.num_planned == num_tokens or sequence.caught_up
        speaks = request.beam is None and not request.sampling.pooled
        if not failed and stop == num_tokens == len(request.prompt) and speaks:
            state.note_first_token(sequence.group)
        if failed or sequence.state is not SequenceState.RUNNING:
            return
        self.kv.commit(row, sequence.group.owner, sequence.tokens[:stop])
        state.leaders.advance(sequence)
        if stop == num_tokens:
            state.leaders.end(sequence)
        siblings = state.forks.fork(sequence)
        if siblings:
            num_shared = min(sibling.num_computed for sibling in siblings)
            whom = f"{len(siblings)} siblings"
            sequence.group.note(RequestEvent(state.last_absorbed, EventKind.FORKED, num_shared, detail=whom))
        for sibling in siblings:
            state.counters.forks += 1
            state.fresh.append(sibling)
            state.catch_up(sibling)

    def _finish_ended(self, result: StepResult) -> list[Sequence]:
        finished = []
        ended = [(self._state.rows.assigned[row], reason) for row, reason in result.ended]
        for sequence, reason in ended:
            if sequence.request.beam is not None:  # a search that has lost a beam is no search
                self._state.fail(sequence.group, reason)
            elif self._state.finish(sequence, reason):
                finished.append(sequence)
        return finished

    def _advance_beams(self, candidates: dict[Row, Candidates]) -> list[Sequence]:
        finished: list[Sequence] = []
        for row, offered in candidates.items():
            sequence = self._state.rows.assigned.get(row)
            if sequence is None or sequence.state is not SequenceState.RUNNING:
                continue
            turn = self._state.beams.offer(sequence, offered)
            if turn is not None:
                finished.extend(self._follow_beams(sequence.group, turn))
        return finished

    def _follow_beams(self, group: RequestGroup, turn: BeamUpdate) -> list[Sequence]:
        state = self._state
        if turn.results is None:
            state.counters.forks += len(turn.assigned)
            if turn.assigned and group.events[-1].what is not EventKind.FORKED:  # of a row of forks, the first
                num_shared = turn.assigned[0].num_computed
                group.note(RequestEvent(state.last_absorbed, EventKind.FORKED, num_shared, detail="beams"))
            state.appends.extend(turn.appends)
            state.fresh.extend(turn.assigned)
            for beam in turn.live:
                state.catch_up(beam)
            return []
        for sequence, hypothesis in zip(group.sequences, turn.results, strict=False):
            sequence.tokens = np.concatenate([group.request.prompt, np.array(hypothesis.tokens, dtype=np.int32)])
            sequence.score = hypothesis.score
        for sequence in group.sequences:
            reason = turn.results[sequence.index].finish_reason if sequence.index < len(turn.results) else None
            self._state.finish(sequence, reason or FinishReason.ABORT)
        return list(group.returned)  # beams finish together, also those without a result

    # When something breaks.

    def lose_steps(self, *, keep_cache: bool) -> None:
        """The steps in flight gave nothing: everybody who sits will be seated again, with what was absorbed before.

        Nobody knows whether a lost step copied its blocks: if it had any to copy, the cache cannot be trusted.
        """
        state = self._state
        keep_cache = keep_cache and not any(flight.moves for flight in self._in_flight)
        self._in_flight.clear()
        state.counters.lost_steps += state.last_planned - state.last_absorbed
        state.rows.forget_steps(state.last_planned)
        state.last_absorbed = state.last_planned
        self._withdraw_all()
        state.release_up_to(state.last_absorbed)
        state.rows.forget_runner()
        state.fresh, state.appends = [], []
        self._reset = True
        if not keep_cache:
            self.kv.invalidate()

    def withdraw_all(self) -> None:
        """Everybody who sits gets up and will be seated again; what was absorbed stays in the cache."""
        self._withdraw_all()

    def _withdraw_all(self) -> None:
        for sequence in tuple(self._state.rows.assigned.values()):
            if sequence.state is SequenceState.RUNNING:
                self._state.withdraw(sequence.group, by=None)

    def admit_only(self, orders: frozenset[int] | None) -> None:
        """From now on only the families of these orders are admitted; None: all are."""
        self._state.start_only(orders)

    def fail_largest(self) -> None:
        """There was no memory for a step: the largest family that was seated ends, so that the others can go on."""
        here = [group for group in self._state.groups.values() if not group.finished]
        assigned = [group for group in here if group.was_assigned] or here
        largest = max(assigned, key=lambda group: (most_blocks(group.request, 1), group.order), default=None)
        if largest is not None:
            self._state.fail(largest, FinishReason.OUT_OF_MEMORY)

    def reset_cache(self) -> int:
        """Forget every cached prefix that nobody holds; the blocks that became free."""
        return self.kv.reset_cache()

    def shrink(self, num_blocks: int) -> int:
        """Take blocks out of service, as far as everyone who is here still fits; how many."""
        needs = [most_blocks(group.request, self.kv.block_size) for group in self._state.groups.values()]
        spare = self.kv.pool.num_in_service - max(needs, default=1)
        return self.kv.shrink(min(num_blocks, max(spare, 0)))


def _first_tokens(groups: Iterable[RequestGroup], finished: Iterable[Sequence]) -> tuple[FirstToken, ...]:
    """Of these requests, and of beam searches that finished: a beam search has no token before its end."""
    beams = [sequence.group for sequence in finished if sequence.request.beam is not None]
    first = {group.request.id: group for group in (*groups, *beams)}
    return tuple([FirstToken(group.request.id, group.admitted_s, group.num_cached) for group in first.values()])


def _finished_sequence(sequence: Sequence) -> FinishedSequence:
    assert sequence.finish_reason is not None, sequence
    group = sequence.group
    generated = sequence.tokens[len(group.request.prompt) :]
    stopped = sequence.finish_reason is FinishReason.STOP and len(generated) > 0
    return FinishedSequence(
        group.request.id,
        sequence.id,
        sequence.finish_reason,
        generated,
        sequence.score,
        group.num_preemptions,
        by_token=stopped and int(generated[-1]) in group.request.sampling.end_ids,
    )
