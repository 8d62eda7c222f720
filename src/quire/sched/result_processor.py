"""The results of steps, applied to the scheduler's state: what rows gained, what was written, and who has ended.

`Scheduler.absorb` calls it once for each step, in order, unless the step was steady (`sched/steady_decode.py`).
"""

from collections.abc import Iterable, Mapping

import numpy as np

from quire.core.ids import FloatArray, Row
from quire.core.request import EventKind, RequestEvent, RequestGroup, Sequence, SequenceState
from quire.core.speculative import DRAFTERS
from quire.core.step import Candidates, FinishReason, PromptLogprobs, StepResult, TopLogprobs, Verified
from quire.core.step_output import DraftCounts, FinishedSequence, FirstToken, StepOutput
from quire.sched.beam_search import BeamUpdate
from quire.sched.cost_model import CostTable
from quire.sched.state import SchedulerState
from quire.sched.steady_decode import StepInFlight


class ResultProcessor:
    """Applies results to the state; the output of each, by sequence."""

    __slots__ = ("_cost", "_state")

    def __init__(self, state: SchedulerState, cost: CostTable) -> None:
        self._state = state
        self._cost = cost

    def process(self, flight: StepInFlight, result: StepResult, seconds: float) -> StepOutput:
        """The output of the oldest step in flight, which took so long; 0 s without a clock, as in some benchmarks."""
        drafts: dict[int, DraftCounts] = {}
        if len(flight.drafts):
            drafts = self._absorb_drafts(flight, result.verified)
            drafted = result.verified.drafted
            shape = flight.shape.with_drafts(int(drafted.sum()), int(drafted.max(initial=0)))
            flight = flight._replace(shape=shape)
        if seconds > 0:
            self._cost.observe(flight.shape, seconds)
        rows = self._state.rows
        rows.note(result)
        self._state.governor.note_tokens(result, flight.drafts.rows)
        emitters, tokens = rows.sequence_ids(result.rows), result.tokens
        kept = emitters >= 0
        if np.count_nonzero(kept) < len(kept):
            emitters, tokens = emitters[kept], tokens[kept]
        logprobs: dict[int, tuple[TopLogprobs, ...]] = {
            name: top for row, top in result.logprobs.items() if (name := rows.sequence_id(row)) is not None
        }
        scores: dict[int, PromptLogprobs] = {
            name: s for s in result.prompt_logprobs if (name := rows.sequence_id(s.row)) is not None
        }
        pooled: dict[int, FloatArray] = {
            name: total for row, total in result.pooled.items() if (name := rows.sequence_id(row)) is not None
        }
        first = self._state.first_tokens = [
            rows.assigned[row].group for row in result.pooled if rows.sequence_id(row) is not None
        ]
        failed = {row for row, reason in result.ended if reason is FinishReason.ERROR}
        for sequence, stop in flight.chunks:
            self._note_computed(sequence, stop, failed=sequence.row in failed)
        finished = self._finish_ended(result)
        for group in self._state.forks.take_failed():  # not before: their rows may be among those that ended
            self._state.fail(group)
        finished += self._advance_beams(result.candidates)
        self._state.release_up_to(result.step)
        finished, self._state.unreported = finished + self._state.unreported, []
        ends = tuple([_finished_sequence(sequence) for sequence in finished])
        first_tokens = _first_tokens(first, finished)
        return StepOutput(result.step, emitters, tokens, first_tokens, ends, logprobs, scores, pooled, drafts)

    def take_unreported(self) -> StepOutput | None:
        """Sequences that finished without a step to report them with, if there are any."""
        if not self._state.unreported:
            return None
        ended, self._state.unreported = tuple(self._state.unreported), []
        ends = tuple([_finished_sequence(sequence) for sequence in ended])
        return StepOutput(self._state.last_absorbed, first_tokens=_first_tokens([], ended), finished=ends)

    def _absorb_drafts(self, flight: StepInFlight, verified: Verified) -> dict[int, DraftCounts]:
        """Correct the positions of rows by what they gained; the drafts of each sequence."""
        state, drafts, accepted = self._state, flight.drafts, verified.accepted
        assert len(verified) == len(drafts), (len(verified), len(drafts))
        state.calendar.absorb_drafts(drafts.rows.astype(np.intp), drafts.counts, accepted)
        forced = np.isin(drafts.rows, [span.row for span in flight.forced]) if flight.forced else None
        state.governor.note(drafts.rows, verified.drafted, accepted, forced)
        counts: dict[int, DraftCounts] = {}
        sources = verified.sources.tolist() or [DRAFTERS.index("unknown")] * len(drafts)
        for row, drafted, gained, source in zip(
            drafts.rows.tolist(), verified.drafted.tolist(), accepted.tolist(), sources, strict=True
        ):
            sequence = state.rows.assigned.get(row)
            state.counters.drafted_by[source] += drafted
            state.counters.accepted_by[source] += gained
            if drafted and sequence is not None and not sequence.finished:
                counts[sequence.id] = DraftCounts(drafted, gained)
                sequence.group.note_drafts(DRAFTERS[source], drafted, gained)
        state.counters.drafted_tokens += int(verified.drafted.sum())
        state.counters.accepted_tokens += int(accepted.sum())
        for number, count in enumerate(np.bincount(accepted)[1:].tolist(), 1):
            for place in range(number):
                state.counters.accepted_at[place] += count
        return counts

    def _note_computed(self, sequence: Sequence, stop: int, *, failed: bool) -> None:
        """A chunk is written: commit its blocks to the tree, requeue followers and fork siblings."""
        state, row, request, num_tokens = self._state, sequence.row, sequence.request, len(sequence.tokens)
        assert row is not None, sequence
        sequence.num_computed = stop
        if stop == sequence.num_planned == num_tokens and not sequence.caught_up:
            sequence.caught_up = True
            state.note_caught_up(sequence.group)
        samples = request.beam is None and not request.sampling.pooled
        if not failed and stop == num_tokens == len(request.prompt) and samples:
            state.note_first_token(sequence.group)
        if failed or sequence.state is not SequenceState.RUNNING:
            return
        state.kv.commit(row, sequence.group.owner, sequence.tokens[:stop])
        state.inflight_prefixes.advance(sequence)
        if stop == num_tokens:
            state.inflight_prefixes.end(sequence)
        siblings = state.forks.fork(sequence)
        if siblings:
            num_shared = min(sibling.num_computed for sibling in siblings)
            whom = f"{len(siblings)} siblings"
            sequence.group.note(RequestEvent(state.last_absorbed, EventKind.FORKED, num_shared, detail=whom))
        for sibling in siblings:
            state.counters.forks += 1
            state.forked.append(sibling)
            state.add_known_tokens(sibling)

    def _finish_ended(self, result: StepResult) -> list[Sequence]:
        finished = []
        ended = [(self._state.rows.assigned[row], reason) for row, reason in result.ended]
        for sequence, reason in ended:
            if sequence.request.beam is not None:  # a beam search cannot continue without one of its beams
                self._state.fail(sequence.group, reason)
            elif self._state.finish(sequence, reason):
                finished.append(sequence)
        return finished

    def _advance_beams(self, candidates: Mapping[Row, Candidates]) -> list[Sequence]:
        finished: list[Sequence] = []
        for row, offered in candidates.items():
            sequence = self._state.rows.assigned.get(row)
            if sequence is None or sequence.state is not SequenceState.RUNNING:
                continue
            update = self._state.beams.add_candidates(sequence, offered)
            if update is not None:
                finished.extend(self._follow_beams(sequence.group, update))
        return finished

    def _follow_beams(self, group: RequestGroup, update: BeamUpdate) -> list[Sequence]:
        state = self._state
        if update.results is None:
            state.counters.forks += len(update.assigned)
            if update.assigned and group.events[-1].what is not EventKind.FORKED:  # only the first of consecutive forks
                num_shared = update.assigned[0].num_computed
                group.note(RequestEvent(state.last_absorbed, EventKind.FORKED, num_shared, detail="beams"))
            state.appends.extend(update.appends)
            state.forked.extend(update.assigned)
            for beam in update.live:
                state.add_known_tokens(beam)
            return []
        for sequence, hypothesis in zip(group.sequences, update.results, strict=False):
            sequence.tokens = np.concatenate([group.request.prompt, np.array(hypothesis.tokens, dtype=np.int32)])
            sequence.score = hypothesis.score
        for sequence in group.sequences:
            reason = update.results[sequence.index].finish_reason if sequence.index < len(update.results) else None
            self._state.finish(sequence, reason or FinishReason.ABORT)
        return list(group.returned)  # beams finish together, also those without a result


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
