"""Decides every step with integers: who sits, who computes, who must go.

One rule and no phases: a sequence catches up with its known tokens within a token budget. Cruising rows come
first, then unfinished prefills in chunks, then new work. Up to `depth` plans may be in flight (`sched/loop.py`);
three laws keep that safe:
(a) a row and its blocks go back only when the last step that touched them is absorbed;
(b) a row that is denied a block waits if blocks are already on their way back, and only otherwise preempts;
(c) a step in which a row was denied a block admits nobody.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import BlockId, IntArray, RequestId, SequenceId
from quire.core.request import Request, Sequence, State
from quire.core.step import (
    Chunk,
    FinishReason,
    Grant,
    Output,
    PromptLogprobs,
    Seat,
    StepPlan,
    StepResult,
    TopLogprobs,
)
from quire.kv.manager import KVManager, count_blocks
from quire.sched.calendar import Calendar
from quire.sched.queue import WaitingQueue
from quire.sched.seating import Seating

# A sequence preempted so often comes back only with its whole length promised, and is then never a victim.
MAX_PREEMPTIONS = 3


class Absorbed(NamedTuple):
    """What a step means to the world: sequence `sequences[i]` gained `tokens[i]`."""

    step: int
    sequences: NDArray[np.int64]
    tokens: IntArray
    finished: tuple[Sequence, ...]
    logprobs: dict[SequenceId, TopLogprobs]
    prompt_logprobs: dict[SequenceId, PromptLogprobs]


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    step: int
    budget: int
    pressure: bool = False
    num_cruising: int = 0
    seats: list[Seat] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)


class Scheduler:
    """All requests of one engine, from `add` to their last block."""

    def __init__(self, kv: KVManager, *, max_rows: int, max_step_tokens: int) -> None:
        assert 0 < max_rows <= max_step_tokens, (max_rows, max_step_tokens)
        self.kv = kv
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self.num_preemptions = 0
        self.last_planned = -1
        self.last_absorbed = -1
        self.queue = WaitingQueue()
        self.seating = Seating(max_rows)
        self.sequences_of: dict[RequestId, list[Sequence]] = {}
        self.prefilling: list[Sequence] = []  # in order of arrival
        self.num_cruising = 0
        self.num_coasting = 0  # rows whose last step is in flight: they end by length when it is absorbed
        self._calendar = Calendar()
        self._next_sequence = 0

    # Requests come and go.

    def add(self, request: Request) -> tuple[Sequence, ...]:
        """Queue a request that passed the door; its continuations, in order."""
        assert request.id not in self.sequences_of, request.id
        siblings = []
        for index in range(request.num_sequences):
            sequence = Sequence(request, SequenceId(self._next_sequence), index)
            self._next_sequence += 1
            self.queue.push(sequence)
            siblings.append(sequence)
        self.sequences_of[request.id] = siblings
        return tuple(siblings)

    def abort(self, request_id: RequestId) -> tuple[Sequence, ...]:
        """End a request, whatever state it is in; those of its sequences that had not ended yet."""
        siblings = tuple(self.sequences_of.get(request_id, ()))
        return tuple(sequence for sequence in siblings if self.finish(sequence, FinishReason.ABORT))

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End one sequence, whatever state it is in; False if it had ended already."""
        if sequence.finished:
            return False
        if sequence.state is State.RUNNING:
            self._depart(sequence, reason)
            return True
        self.seating.settle(sequence)
        self.queue.discard(sequence)
        sequence.finish(reason)
        if sequence.state is State.FINISHED:
            self._forget(sequence)
        return True

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an absorption."""
        draft = _Draft(self.last_planned + 1, self.max_step_tokens)
        self._feed_cruising(draft)
        for sequence in tuple(self.prefilling):
            if draft.budget > 0:
                self._take_chunk(sequence, draft)
        if not draft.pressure:  # law (c)
            self._admit(draft)
        return self._commit(draft)

    def absorb(self, result: StepResult) -> Absorbed:
        """Take in the oldest step in flight."""
        assert result.step == self.last_absorbed + 1 <= self.last_planned, (result.step, self.last_absorbed)
        self.last_absorbed = result.step
        self.seating.note(result)
        named = self.seating.row_sequence
        emitters, tokens = named[result.rows], result.tokens
        heard = emitters >= 0
        if not heard.all():
            emitters, tokens = emitters[heard], tokens[heard]
        logprobs = {SequenceId(int(named[row])): top for row, top in result.logprobs.items() if named[row] >= 0}
        scores = {SequenceId(int(named[s.row])): s for s in result.prompt_logprobs if named[s.row] >= 0}
        ended = [(self.seating.seated[row], reason) for row, reason in result.ended]
        finished = tuple(sequence for sequence, reason in ended if self.finish(sequence, reason))
        self._release_up_to(result.step)
        return Absorbed(result.step, emitters, tokens, finished, logprobs, scores)

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_running(self) -> int:
        return len(self.seating.seated) - len(self.seating.leaving)

    @property
    def idle(self) -> bool:
        """Nothing waits, sits or is in flight."""
        return not self.sequences_of and self.last_planned == self.last_absorbed

    # Planning: cruising rows first.

    def _feed_cruising(self, draft: _Draft) -> None:
        for sequence in self._calendar.due(draft.step):
            if sequence.state is not State.RUNNING:  # an older one has just taken its place
                continue
            if sequence.position_at(draft.step) > sequence.last_position:
                self._coast(sequence)
                continue
            block = self._find_block(sequence, draft)
            if block is not None:
                assert sequence.row is not None, sequence
                draft.grants.append(Grant(sequence.row, block))
                self._book(sequence)
            elif sequence.state is State.RUNNING:
                draft.paused.append(sequence)
        draft.num_cruising = self.num_cruising - len(draft.paused)
        draft.budget -= draft.num_cruising

    def _find_block(self, sequence: Sequence, draft: _Draft) -> BlockId | None:
        while True:
            block = self.kv.grow(sequence.id)
            if block is not None:
                return block
            draft.pressure = True
            if self.seating.leaving or self.num_coasting:  # law (b)
                return None
            victim = self._choose_victim()
            self.num_preemptions += 1
            self._depart(victim, None)
            if victim is sequence:
                return None

    def _choose_victim(self) -> Sequence:
        """The youngest that may still be preempted, so that the oldest always advances."""
        seated = self.seating.seated.values()
        return max((s for s in seated if s.num_preemptions < MAX_PREEMPTIONS), key=lambda sequence: sequence.id)

    def _book(self, sequence: Sequence) -> None:
        """Come back when it needs a block, or when it has no more to compute."""
        needs_block = sequence.step_of(self.kv.capacity(sequence.id))
        has_ended = sequence.step_of(sequence.last_position + 1)
        self._calendar.book(sequence, min(needs_block, has_ended))

    def _coast(self, sequence: Sequence) -> None:
        self._calendar.cancel(sequence)
        self.num_cruising -= 1
        self.num_coasting += 1

    # Planning: then what must catch up.

    def _take_chunk(self, sequence: Sequence, draft: _Draft) -> None:
        """As much of its known tokens as the budget holds; with the last of them, it starts to cruise."""
        assert sequence.row is not None, sequence
        start = sequence.num_planned
        length = min(draft.budget, sequence.num_tokens - start)
        blocks = self.kv.grow_to(sequence.id, start + length)
        draft.grants.extend(Grant(sequence.row, block) for block in blocks)
        draft.budget -= length
        sequence.num_planned += length
        output = Output.NONE
        if sequence.request.sampling.num_prompt_logprobs is not None and start < len(sequence.request.prompt):
            output |= Output.PROMPT_LOGPROBS
        if sequence.num_planned == sequence.num_tokens:
            output |= Output.SAMPLE
            self.prefilling.remove(sequence)
            self._start_cruising(sequence, draft.step + 1)
        draft.chunks.append(Chunk(sequence.row, start, length, output))

    def _start_cruising(self, sequence: Sequence, step: int) -> None:
        sequence.cruise_step = step
        sequence.cruise_length = sequence.num_tokens
        if sequence.num_tokens > sequence.last_position:
            self.num_coasting += 1
        else:
            self.num_cruising += 1
            self._book(sequence)

    # Planning: then new work.

    def _admit(self, draft: _Draft) -> None:
        while draft.budget > 0 and self.seating.num_free:
            sequence = self.queue.first()
            if sequence is None or not self.kv.open(sequence.id, self._blocks_to_reserve(sequence)):
                return
            self.queue.pop()
            row = self.seating.sit(sequence, draft.step)
            insort(self.prefilling, sequence, key=lambda waiting: waiting.id)
            request = sequence.request
            draft.seats.append(
                Seat(
                    row=row,
                    sequence=sequence.id,
                    index=sequence.index,
                    tokens=sequence.tokens,
                    num_prompt=len(request.prompt),
                    max_length=request.max_length,
                    sampling=request.sampling,
                )
            )
            self._take_chunk(sequence, draft)

    def _blocks_to_reserve(self, sequence: Sequence) -> int:
        """Known tokens and one more; after too many preemptions, everything it can ever need."""
        num_positions = sequence.last_position + 1
        if sequence.num_preemptions < MAX_PREEMPTIONS:
            num_positions = min(num_positions, sequence.num_tokens + 1)
        return count_blocks(num_positions, self.kv.block_size)

    def _commit(self, draft: _Draft) -> StepPlan | None:
        if draft.num_cruising == 0 and not draft.chunks:
            for sequence in draft.paused:  # the step is not taken: they ask again in the same one
                self._calendar.book(sequence, draft.step)
            return None
        for sequence in draft.paused:
            assert sequence.cruise_step is not None, sequence
            sequence.cruise_step += 1
            self._calendar.book(sequence, draft.step + 1)
        self.last_planned = draft.step
        return StepPlan(
            step=draft.step,
            leaves=self.seating.take_leaves(),
            seats=tuple(draft.seats),
            grants=tuple(draft.grants),
            chunks=tuple(draft.chunks),
            pauses=tuple(sequence.row for sequence in draft.paused if sequence.row is not None),
            num_cruising=draft.num_cruising,
        )

    # Leaving.

    def _depart(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Get up from the row: finished for a reason, or preempted for none."""
        if not sequence.cruising:
            self.prefilling.remove(sequence)
        elif sequence.due_step >= 0:
            self._calendar.cancel(sequence)
            self.num_cruising -= 1
        else:
            self.num_coasting -= 1
        self.seating.rise(sequence, reason, self.last_planned)
        self._release_up_to(self.last_absorbed)

    def _release_up_to(self, step: int) -> None:
        for sequence in self.seating.release_up_to(step):
            self.kv.close(sequence.id)
            if sequence.state is State.WAITING:
                self.queue.push(sequence)
            else:
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        siblings = self.sequences_of[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.sequences_of[sequence.request.id]
