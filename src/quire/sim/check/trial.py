"""One random scenario, run to its end: the shipped loop, scheduler and cache against the closed form."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import BinaryIO

import numpy as np

from quire.core.errors import Draining, DuplicateRequest, NeverFits, QueueFull
from quire.core.ids import IntArray, RequestId, SequenceId
from quire.core.request import EventKind, Request, RequestGroup, Sequence, SequenceState, WaitCause
from quire.core.step import FinishReason, Masks, Runner, StepLost
from quire.core.step_output import StepOutput
from quire.sched.audit import audit, audit_rest
from quire.sched.journal.recorder import JournaledScheduler
from quire.sched.loop import Loop
from quire.sched.policy import SchedulerSpec
from quire.sched.queue import Lane, lane
from quire.sched.reference_checks import add_reference_checks, service_totals
from quire.sched.reservation import most_blocks
from quire.sched.scheduler import Scheduler
from quire.sched.state import Counters
from quire.sim.check.expected import ExpectedOutput, expect, grammar_goes_on, mask_after
from quire.sim.check.faulty_runner import FaultyRunner
from quire.sim.check.invariants import CounterCheck, audit_contents
from quire.sim.check.prefix_transfers import PrefixTransfers
from quire.sim.check.scenario import VOCAB_SIZE, Scenario, ScenarioEvent, draw_request

RunnerFactory = Callable[[Scenario], Runner]
_MAX_BROKEN = 20  # lost steps of one scenario: with more, a long prompt would never be computed
_CONTENTS_EVERY = 16  # steps between two checks of every cached token


class CheckRun:
    """Draws random events, runs the loop, and checks every invariant after every step."""

    def __init__(
        self, scenario: Scenario, rng: random.Random, make_runner: RunnerFactory, journal: BinaryIO | None = None
    ) -> None:
        self.scenario = scenario
        self.events: list[ScenarioEvent] = []  # in order
        self.steps = 0
        self._rng = rng
        self._now_s = 0.0
        self.scheduler = _build(scenario, lambda start, stop: rng.random() < 0.8, journal)
        add_reference_checks(self.scheduler)
        self._recounted = CounterCheck(self.scheduler)
        losses = random.Random(int(scenario.shared_prefix.sum()))  # of its own: old seeds keep their scenarios
        self._faulty = FaultyRunner(lambda: make_runner(scenario), self.scheduler, scenario, self._recounted, losses)
        watch = self._faulty.watch
        self._transfers = PrefixTransfers(self.scheduler, scenario, watch, losses) if scenario.transfers else None
        self._loop = Loop(self.scheduler, self._faulty, scenario.depth, lambda: self._now_s, self._masks, self._receive)
        self._expected: dict[SequenceId, ExpectedOutput] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._live: dict[RequestId, tuple[Sequence, ...]] = {}
        self._begun: set[RequestId] = set()  # requests whose first output was reported
        self._past: list[IntArray] = []
        self._num_arrived = 0
        self._num_moved = 0
        self._num_broken = 0
        self._groups: list[RequestGroup] = []
        self._tree_seen = (0, 0, -1)
        self._quiet_turns = 0
        self._latest_s = 0.0
        chances = scenario.chances
        self._losses = (
            (ScenarioEvent.LOSE, chances.lose),
            (ScenarioEvent.DIE, chances.die),
            (ScenarioEvent.STARVE, chances.starve),
        )

    def run(self) -> None:
        """Raise AssertionError at the first violation."""
        turns, counters = 0, self.scheduler.counters
        while self._num_arrived < self.scenario.num_requests or not self.scheduler.idle:
            self._now_s += 0.01
            num_lost = counters.lost_steps
            before = (self._faulty.num_launched, num_lost, len(self.events))
            self._trigger_events()
            if self._transfers is not None:
                self._transfers.turn(self._faulty.runner, self._past, hurry=self._quiet_turns > 0)
            self._latest_s = max(self._latest_s, self._now_s)
            busy = bool(self._live)
            self._faulty.num_preemptions, self._faulty.now_s = counters.preemptions, self._now_s
            self._recounted.begin()
            absorbed = self._step()
            counters = self.scheduler.counters
            self._recounted.end(self._groups, counters.preemptions)
            self._note_consequences(counters)
            stirred = (self._faulty.num_launched, counters.lost_steps, len(self.events))
            if stirred != before or absorbed is not None:
                changed = self._tree_changed() or turns % _CONTENTS_EVERY == 0
                audit(self.scheduler, tree=changed)
                if changed:
                    self._faulty.watch.audit_partitions(self.scheduler.kv)  # I5
            lost = counters.lost_steps > num_lost
            if lost or turns % _CONTENTS_EVERY == 0:
                audit_contents(self.scheduler.kv, self._faulty.runner)  # I5, I16
            turns += 1
            if absorbed is not None:
                self.steps += 1
            advanced = absorbed is not None or lost or not busy
            self._quiet_turns = 0 if advanced else self._quiet_turns + 1
            window = 200 if self.scenario.policy.regime.window_s else 0  # the clock may jump back
            patience = self.scenario.depth + 2 + window
            assert self._quiet_turns <= patience, "requests wait and nothing advances"  # I13
        if self._transfers is not None:
            self._transfers.end_all()
        audit_rest(self.scheduler)
        self._recount()
        for sequence, expected in self._expected.items():
            assert expected.num_terminal == 1, f"sequence {sequence} ended {expected.num_terminal} times"  # I12

    def _step(self) -> StepOutput | None:
        try:
            return self._loop.step()
        finally:
            if self._faulty.violation is not None:
                raise self._faulty.violation

    def _tree_changed(self) -> bool:
        """Whether the prefix tree, or what rows hold of it, changed since the last call."""
        kv = self.scheduler.kv
        seen = (kv.pool.num_evictable, kv.pool.num_cached, 0 if kv.tree is None else kv.tree.generation)
        changed, self._tree_seen = seen != self._tree_seen, seen
        return changed

    def _recount(self) -> None:
        """Counters equal a recount, and every sequence is finished (I10, I18)."""
        counters, faulty, recounted = self.scheduler.counters, self._faulty, self._recounted
        assert counters.recomputed_tokens == recounted.recomputed_tokens, "recomputed tokens are miscounted"
        assert counters.forks == recounted.forks, "forks are miscounted"
        assert counters.drafted_tokens == recounted.drafted_tokens, "drafts are miscounted"
        assert counters.accepted_tokens == recounted.accepted_tokens, "accepted drafts are miscounted"
        assert counters.accepted_at == recounted.accepted_at, "accepted drafts are miscounted by their numbers"
        assert counters.class_preemptions == recounted.class_preemptions, "preemptions for a class are miscounted"
        assert counters.share_preemptions == recounted.share_preemptions, "preemptions for a share are miscounted"
        assert counters.computed_tokens == faulty.num_tokens, "computed tokens are miscounted"
        assert counters.moved_blocks == faulty.num_moves, "copies are miscounted"
        assert counters.padding_tokens == faulty.num_padding, "padding is miscounted"
        assert counters.lost_steps == faulty.num_launched - faulty.num_absorbed, "lost steps are miscounted"
        assert counters.preemptions == sum(f.num_preemptions for f in self._groups), "preemptions are miscounted"
        assigned = [group for group in self._groups if group.was_assigned]
        assert counters.prompt_tokens == sum(len(f.request.prompt) for f in assigned), "prompt tokens are miscounted"
        cached = sum(f.num_cached for f in assigned)
        assert counters.cached_tokens == recounted.cached_tokens == cached, "cached tokens are miscounted"
        if not recounted.service_of_beams:
            charged = service_totals(self.scheduler, self.scenario.tenants)
            right = [recounted.service[tenant] for tenant in self.scenario.tenants]
            assert np.allclose(charged, right), f"tenants were charged {charged}, not {right}"
        for group in self._groups:
            policy = self.scenario.policy
            if not policy.order.fair or len(self.scenario.tenants) < 2:  # else only for a share, judged at each search
                assert group.num_preemptions <= policy.max_preemptions, f"{group} was preempted too often"
            assert all(m.state is SequenceState.FINISHED and m.row is None for m in group.sequences), group

    def _masks(self, sequences: Many[Sequence], drafts: Many[IntArray]) -> Masks:
        """Grammar masks, from the tokens that were received and the drafts behind them."""
        rows: list[int] = []
        masks: list[IntArray] = []
        starts: list[int] = []
        going_on = [(s, self._expected[s.id].received, d.tolist()) for s, d in zip(sequences, drafts, strict=True)]
        while going_on:
            starts.append(len(rows))
            following = []
            for sequence, known, ahead in going_on:
                assert sequence.row is not None, sequence
                rows.append(sequence.row)
                masks.append(mask_after(known, VOCAB_SIZE))
                if ahead and grammar_goes_on(known, ahead[0]):
                    following.append((sequence, [*known, ahead[0]], ahead[1:]))
            going_on = following
        bits = np.array(masks, dtype=np.int32).reshape(-1, -(-VOCAB_SIZE // 32))
        return Masks(np.array(rows, dtype=np.int32), bits, tuple(starts[1:]))

    def _expect_forced(self, absorbed: StepOutput) -> None:
        """Forced tokens of sequences under a grammar: right, wrong, right up to some place, or none."""
        for number in dict.fromkeys(absorbed.sequences.tolist()):
            sequence, expected = self._sequences[SequenceId(number)], self._expected[SequenceId(number)]
            if sequence.request.sampling.masked and not sequence.finished:
                known = len(expected.received)
                start, coming = len(sequence.request.prompt) + known, expected.tokens[known : known + 6]
                chance = sum(expected.received) + known
                wrong_from = chance // 3 % 9  # mostly behind the last
                forced = [(token + (place == wrong_from)) % VOCAB_SIZE for place, token in enumerate(coming)]
                self.scheduler.expect(sequence, start, np.array(forced[: chance % 7], dtype=np.int32))

    # Events.

    def _trigger_events(self) -> None:
        rng, chances = self._rng, self.scenario.chances
        arrives = self.scheduler.idle or rng.random() < self.scenario.arrival_chance
        if arrives and self._num_arrived < self.scenario.num_requests:
            self._arrive()
        if self._live and rng.random() < chances.abort:
            self._abort(rng.choice(list(self._live)))
        if self._live and rng.random() < chances.stop:
            self._stop(rng.choice(list(self._live)))
        if self._live and rng.random() < chances.duplicate:
            self._duplicate(rng.choice(list(self._live)))
        if rng.random() < chances.delay:
            self._now_s += rng.choice((0.05, 0.5, 3.0))
            self.events.append(ScenarioEvent.DELAY)
        if rng.random() < chances.jump:
            self._now_s += rng.choice((1e6, -5.0, 60.0))
            self.events.append(ScenarioEvent.JUMP)
        if rng.random() < chances.reset:
            self.scheduler.reset_cache()
            self.events.append(ScenarioEvent.RESET)
        if rng.random() < chances.shrink and self.scheduler.shrink(rng.randint(1, 4)):
            self.events.append(ScenarioEvent.SHRINK)
        self._trigger_faults()

    def _trigger_faults(self) -> None:
        rng, chances, faulty = self._rng, self.scenario.chances, self._faulty
        if rng.random() < chances.poison:
            faulty.poisons = True
        for event, chance in self._losses:
            if self._live and self._num_broken < _MAX_BROKEN and rng.random() < chance:
                self._num_broken += 1
                faulty.loses = StepLost(
                    event.value,
                    cache_intact=event is not ScenarioEvent.DIE,
                    too_large=event is ScenarioEvent.STARVE,
                )
                faulty.loses_early = rng.random() < 0.5
                self.events.append(event)

    def _arrive(self) -> None:
        scenario, rng = self.scenario, self._rng
        past = rng.choice(self._past) if self._past and rng.random() < 0.3 else None
        request = draw_request(rng, scenario, self._num_arrived, self._now_s, past)
        self._num_arrived += 1
        if scenario.drains and self._num_arrived == scenario.num_requests:
            self.scheduler.drain()
            self.events.append(ScenarioEvent.DRAIN)
        if request.sampling.pooled:
            self.events.append(ScenarioEvent.ARRIVE_POOLED)
        elif request.beam is not None:
            self.events.append(ScenarioEvent.ARRIVE_BEAMS)
        elif request.sampling.masked:
            self.events.append(ScenarioEvent.ARRIVE_MASKED)
        elif request.num_sequences > 1:
            self.events.append(ScenarioEvent.ARRIVE_FAMILY)
        else:
            self.events.append(ScenarioEvent.ARRIVE if past is None else ScenarioEvent.ARRIVE_FOLLOWUP)
        full = self._is_full(request)
        try:
            sequences = self.scheduler.add(request, self._now_s)
        except (QueueFull, Draining, NeverFits) as refused:
            assert isinstance(refused, Draining) == self.scheduler.draining, refused
            assert full or not isinstance(refused, QueueFull), refused
            shrunk = self.scheduler.kv.pool.num_in_service < scenario.num_blocks
            assert shrunk or not isinstance(refused, NeverFits), refused
            self.events.append(ScenarioEvent.OVERFLOW)
            return
        assert not full and not self.scheduler.draining, f"{request.id} was accepted by a full or draining engine"
        self._groups.append(sequences[0].group)
        self._live[request.id] = sequences
        outcomes = expect(request, VOCAB_SIZE)
        for sequence, expected in zip(sequences, outcomes, strict=False):
            self._expected[sequence.id] = expected
            self._sequences[sequence.id] = sequence

    def _is_full(self, request: Request) -> bool:
        """Whether the queue has no place for one more request, or not for its prompt."""
        policy = self.scenario.policy
        waiting = [g for g in self.scheduler.groups() if all(s.row is None for s in g.sequences)]
        if policy.max_waiting is not None and len(waiting) >= policy.max_waiting:
            return True
        num_tokens = sum(len(group.request.prompt) for group in waiting)
        most = policy.max_waiting_tokens
        return most is not None and num_tokens > 0 and num_tokens + len(request.prompt) > most

    def _abort(self, request_id: RequestId) -> None:
        self.events.append(ScenarioEvent.ABORT)
        sequences = self._live[request_id]
        returned = tuple(sequence for sequence in sequences[0].group.returned if not sequence.finished)
        ended = self.scheduler.abort(request_id)
        assert ended == returned, f"request {request_id} was aborted: {ended} ended, not {returned}"
        self._end(ended, FinishReason.ABORT)
        assert self.scheduler.abort(request_id) == (), "an abort is not idempotent"
        assert all(sequence.finished for sequence in sequences), f"request {request_id} was aborted and goes on"

    def _stop(self, request_id: RequestId) -> None:
        """The front end stops one sequence, perhaps late: when it is preempted, or waits again."""
        going_on = [s for s in self._live[request_id] if not s.finished and s.request.beam is None]
        if going_on:
            self.events.append(ScenarioEvent.STOP)
            sequence = self._rng.choice(going_on)
            if sequence.id % 3 == 0:  # a grammar ends it, perhaps twice: reported once, with the next output
                self._expected[sequence.id].cut(FinishReason.STOP)
                for _ in range(2):
                    self.scheduler.conclude(sequence, FinishReason.STOP)
                self._forget_finished()
                return
            assert self.scheduler.finish(sequence, FinishReason.STOP), sequence
            self._end((sequence,), FinishReason.STOP)

    def _end(self, sequences: tuple[Sequence, ...], reason: FinishReason) -> None:
        for sequence in sequences:
            expected = self._expected.get(sequence.id)
            if expected is not None:
                expected.cut(reason)
                self._terminate(sequence)
        self._forget_finished()

    def _duplicate(self, request_id: RequestId) -> None:
        """The id of a request that is in the engine; also of each that has ended and still holds rows."""
        self.events.append(ScenarioEvent.DUPLICATE)
        for group in self.scheduler.groups():
            if group.request.id == request_id or group.finished:
                try:
                    self.scheduler.add(group.request, self._now_s)
                except DuplicateRequest:
                    continue
                raise AssertionError(f"request {group.request.id} was accepted twice")

    def _note_consequences(self, counters: Counters) -> None:
        if counters.preemptions > self._faulty.num_preemptions:
            self.events.append(ScenarioEvent.PREEMPT)
        if counters.moved_blocks > self._num_moved:
            self._num_moved = counters.moved_blocks
            self.events.append(ScenarioEvent.DEMOTE)
        self._check_overtaking()

    def _check_overtaking(self) -> None:
        """Among short prompts of one class and tenant, none is admitted before an earlier one that is queued (I14).
        Of long ones the queue is checked (`sched/reference_checks.py`)."""
        fresh, self._faulty.fresh = self._faulty.fresh, []
        if not fresh:
            return
        groups = self.scheduler.groups()
        waiting = [f for f in groups if self.scheduler.is_queued(f) and not _admitted_or_followed(f)]
        for group in fresh:
            for other in waiting:
                assert other.order > group.order or not self._alike(group, other), f"{group} overtook {other}"

    def _alike(self, one: RequestGroup, other: RequestGroup) -> bool:
        long_prompt = self.scenario.policy.order.long_prompt

        def key(group: RequestGroup) -> tuple[object, ...]:
            request = group.request
            return (request.priority, request.tenant, lane(group.num_uncached, long_prompt), request.deadline_s)

        return key(one) == key(other) and lane(one.num_uncached, long_prompt) is Lane.SHORT

    # Outputs.

    def _receive(self, absorbed: StepOutput) -> StepOutput:
        self._recounted.absorb()
        self._note_first_tokens(absorbed)
        for number, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
            expected = self._expected[SequenceId(number)]
            assert expected.num_terminal == 0, f"sequence {number} emitted after its end"  # I11
            expected.received.append(token)
            right = expected.tokens[: len(expected.received)]
            assert expected.received == right, f"sequence {number}: {expected.received} is not {right}"
        for name, total in absorbed.pooled.items():
            expected = self._expected[SequenceId(name)]
            assert expected.received_pooled is None, f"sequence {name} was pooled twice"
            expected.received_pooled = float(total[0])
        for over in absorbed.finished:
            sequence = self._sequences.get(SequenceId(over.sequence))
            if sequence is None:  # a beam without a result
                assert over.reason is FinishReason.ABORT and over.score is None, over
                continue
            assert over.tokens.tolist() == sequence.tokens[len(sequence.request.prompt) :].tolist(), over
            self._expect_trouble(sequence, self._expected[sequence.id])
            self._terminate(sequence)
        if absorbed.finished:
            self._forget_finished()
        self._expect_forced(absorbed)
        return absorbed

    def _note_first_tokens(self, absorbed: StepOutput) -> None:
        """The first output of a request is reported once, with the step that brings it."""
        for first in absorbed.first_tokens:
            assert first.number not in self._begun, f"the first token of request {first.number} is reported twice"
            self._begun.add(RequestId(first.number))
        for number in [*absorbed.sequences.tolist(), *absorbed.pooled]:
            request_id = self._sequences[SequenceId(number)].request.id
            assert request_id in self._begun, f"the first token of request {request_id} is not reported"

    def _expect_trouble(self, sequence: Sequence, expected: ExpectedOutput) -> None:
        """A sequence may end otherwise than by the closed form if a fault hit it."""
        reason = sequence.finish_reason
        if reason is FinishReason.EXPIRED:
            deadline_s = sequence.request.deadline_s
            assert deadline_s is not None and deadline_s <= self._latest_s and not expected.received, sequence
            self.events.append(ScenarioEvent.EXPIRE)
        elif reason is FinishReason.ERROR:
            assert self.scenario.chances.poison, sequence
            self.events.append(ScenarioEvent.POISON)
        elif reason is FinishReason.OUT_OF_MEMORY:
            assert self.scenario.chances.starve, sequence
            self._check_largest(sequence.group)
        else:
            return
        expected.cut(reason)

    def _check_largest(self, ended: RequestGroup) -> None:
        """Out of memory ends the largest of the requests that were admitted."""
        size = (most_blocks(ended.request, 1), ended.order)
        for group in self.scheduler.groups():
            smaller = (most_blocks(group.request, 1), group.order) <= size
            assert smaller or group.finished or (ended.was_assigned and not group.was_assigned), (
                f"out of memory ended {ended}, and {group} is larger"
            )

    def _terminate(self, sequence: Sequence) -> None:
        expected = self._expected[sequence.id]
        expected.num_terminal += 1
        assert sequence.finish_reason is expected.reason, f"{sequence} ended by {sequence.finish_reason}"
        kept = sequence.tokens[len(sequence.request.prompt) :].tolist()
        if expected.streamed:
            assert kept == expected.received, f"{sequence} kept {kept}, but {expected.received} was received"
        elif expected.reason in (FinishReason.STOP, FinishReason.LENGTH):
            expected.received = kept
        assert expected.received == expected.tokens, f"{sequence}: {expected.received} is not {expected.tokens}"
        pooled = expected.received_pooled
        assert pooled == expected.pooled, f"{sequence} was pooled to {pooled}, not {expected.pooled}"
        self._past.append(sequence.tokens)

    def _forget_finished(self) -> None:
        for request_id, sequences in tuple(self._live.items()):
            if all(sequence.finished for sequence in sequences):
                del self._live[request_id]


def _build(scenario: Scenario, worth_keeping: Callable[[int, int], bool], journal: BinaryIO | None) -> Scheduler:
    """The scheduler of a scenario; with a file, one that records its inputs."""
    spec = SchedulerSpec(
        scenario.num_blocks,
        scenario.block_size,
        scenario.max_rows,
        scenario.max_step_tokens,
        num_host_blocks=scenario.num_host_blocks,
        policy=scenario.policy,
        resident_limit=scenario.resident_limit,
    )
    if journal is not None:
        return JournaledScheduler(spec, journal, worth_keeping)
    return Scheduler(
        spec.kv(worth_keeping),
        max_rows=scenario.max_rows,
        max_step_tokens=scenario.max_step_tokens,
        policy=scenario.policy,
    )


def _admitted_or_followed(group: RequestGroup) -> bool:
    """Whether it was admitted before, or waits for another request's prefix."""
    return any(event.what is EventKind.ADMITTED or event.cause is WaitCause.PREFIX for event in group.events)
