"""The engine in one process: a door, a scheduler, a runner and the loop between them. Knows ids, not text.

Turns what a step meant to the scheduler into what the front must hear: numbers and tokens, no families.

Whether a request left itself nothing to choose: what its parameters and its grammar forbid, taken together.

For a sequence that ended without a token; whoever still runs is never looked at.
"""

import random
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.core.errors import EngineFailed, InvalidParameter
from quire.core.fault_injection import FaultSite, trip
from quire.core.ids import IntArray, RequestId, SequenceId
from quire.core.request import RequestGroup, Sequence
from quire.core.sampling import MAX_SEED, Grammar
from quire.core.step import FinishReason, Runner
from quire.engine.messages import Accepted, AddRequest, FinishedSequence, FirstToken, StepOutput
from quire.engine.request_validator import RequestValidator
from quire.sched.explain import Explanation
from quire.sched.loop import Loop, Span
from quire.sched.scheduler import Absorbed, Scheduler

if TYPE_CHECKING:
    from quire.engine.grammar_masks import GrammarMasks
    from quire.grammar.matcher import GrammarMatcher


class OutputReporter:
    """Knows which continuations the front still waits for; each is reported as ended once."""

    __slots__ = ("_awaiting_first", "_heard")

    def __init__(self) -> None:
        self._heard: dict[SequenceId, Sequence] = {}
        self._awaiting_first: dict[SequenceId, RequestGroup] = {}

    def expect(self, group: RequestGroup) -> None:
        for member in group.answers:
            self._heard[member.id] = member
            self._awaiting_first[member.id] = group

    def forget(self, sequence: Sequence) -> None:
        """The front ended it itself."""
        self._heard.pop(sequence.id, None)
        self._awaiting_first.pop(sequence.id, None)

    def report(self, absorbed: Absorbed, cornered: Set[SequenceId] = frozenset()) -> StepOutput:
        """`cornered` are those to which their own requests left no token."""
        begun = self._begun(absorbed) if self._awaiting_first else ()
        heard = self._heard
        scores = {int(name): each for name, each in absorbed.prompt_logprobs.items() if name in heard}
        pooled = {int(name): total for name, total in absorbed.pooled.items() if name in heard}
        logprobs = {int(name): each for name, each in absorbed.logprobs.items()}
        ended = tuple(self._ended(absorbed, cornered))  # last: who has ended is not heard any more
        return StepOutput(absorbed.step, absorbed.sequences, absorbed.tokens, begun, ended, logprobs, scores, pooled)

    def _begun(self, absorbed: Absorbed) -> tuple[FirstToken, ...]:
        """Who has a first token now, or an embedding; of siblings, the first counts. Beams have none before the end."""
        begun: dict[int, FirstToken] = {}
        searched = [sequence.group for sequence in absorbed.finished if sequence.request.beam is not None]
        beams = [member.id for group in searched for member in group.answers]
        for number in (*absorbed.sequences.tolist(), *absorbed.pooled, *beams):
            group = self._awaiting_first.pop(SequenceId(number), None)
            if group is not None:
                begun[group.request.id] = FirstToken(group.request.id, group.seated_s, group.num_cached)
        return tuple(begun.values())

    def _ended(self, absorbed: Absorbed, cornered: Set[SequenceId]) -> list[FinishedSequence]:
        """Beams end together, those without a result too."""
        ended: list[FinishedSequence] = []
        for sequence in absorbed.finished:
            group = sequence.group
            for member in (sequence,) if group.request.beam is None else group.answers:
                if member.id in self._heard and member.finish_reason is not None:
                    over = _ended(member)
                    ended.append(over._replace(reason=FinishReason.NOTHING_LEFT) if member.id in cornered else over)
                    self.forget(member)
        return ended


def _ended(sequence: Sequence) -> FinishedSequence:
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


def is_cornered(sequence: Sequence, mask: IntArray | None, vocab_size: int) -> bool:
    """`mask` is what its grammar allows next, 32 tokens to a word; None if it follows none."""
    sampling, num_prompt = sequence.request.sampling, len(sequence.request.prompt)
    left = np.ones(vocab_size, dtype=np.bool_)
    if mask is not None:
        left &= np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
    if sampling.allowed_ids is not None:
        left &= np.isin(np.arange(vocab_size), sampling.allowed_ids)
    if len(sequence.tokens) - num_prompt < sampling.min_tokens:
        left[list(sampling.end_ids)] = False
    for *beginning, last in sampling.bad_words:
        if sequence.tokens[len(sequence.tokens) - len(beginning) :].tolist() == beginning:
            left[last] = False
    return not left.any()


MOST_REMEMBERED = 100  # finished requests that can still be explained


class PreparingRunner(Protocol):
    """Somebody who can use spare time to make later steps faster, a piece at a time."""

    @property
    def prepared(self) -> bool: ...

    def prepare(self) -> None: ...


class Engine:
    """Submit, turn, and listen to what each turn absorbed."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        door: RequestValidator,
        *,
        depth: int,
        seed: int,
        clock: Callable[[], float],
        grammars: "GrammarMasks | None" = None,
        preparing: PreparingRunner | None = None,
        span: Span | None = None,
    ) -> None:
        self.door = door
        self.scheduler = scheduler
        self.clock = clock
        self.grammars = grammars
        self._loop = Loop(scheduler, runner, depth, clock, None if grammars is None else grammars.masks, span)
        self._seeds = random.Random(seed)
        self._reporter = OutputReporter()
        self._latest: dict[RequestId, RequestGroup] = {}
        self._failure: str | None = None
        self._preparing = preparing
        self.num_sampled = 0  # tokens of continuations; those of beams when their search ends

    def submit(self, order: AddRequest) -> Accepted:
        """Queue a request. A `QuireError` means that nothing happened."""
        self._check_alive()
        trip(FaultSite.ADD, order.number)
        now_s = self.clock()
        grammar = order.params.grammar
        if grammar is not None:
            self._prepare(grammar)
        request = self.door.admit(order, self._seeds.randint(0, MAX_SEED), now_s)
        matchers: list[GrammarMatcher] = []  # made before `add`: this may raise, and nothing is registered yet
        if grammar is not None and self.grammars is not None:
            matchers = self.grammars.matchers(grammar, request.num_sequences)
        group = self.scheduler.add(request, now_s)[0].group
        if matchers and self.grammars is not None:
            self.grammars.begin(group, matchers)
        self._reporter.expect(group)
        self._latest[request.id] = group
        if len(self._latest) > MOST_REMEMBERED:
            del self._latest[next(iter(self._latest))]
        return Accepted(order.number, group.sequences[0].id, self.scheduler.last_absorbed + 1)

    def _prepare(self, grammar: Grammar) -> None:
        if self.grammars is None:
            raise InvalidParameter(
                "This engine follows no grammars: that needs a model with a tokenizer, and llguidance "
                '(pip install "quire[serve]").',
                param="grammar",
            )
        self.grammars.prepare(grammar)

    def explain(self, request_id: RequestId) -> Explanation:
        """The story of a request that is here, or is among the latest that were."""
        group = self.scheduler.group(request_id) or self._latest.get(request_id)
        if group is None:
            raise InvalidParameter(
                f"Request {request_id} is not remembered; the {MOST_REMEMBERED} latest are.", param="request_id"
            )
        return self.scheduler.explain(group)

    def abort(self, number: int) -> None:
        """Legal in every state, and twice."""
        for sequence in self.scheduler.abort(RequestId(number)):
            self._reporter.forget(sequence)

    def stop(self, number: int, index: int) -> None:
        """A stop string came in the text of this continuation. It may be over already."""
        group = self.scheduler.group(RequestId(number))
        if group is not None:
            self.scheduler.finish(group.sequences[index], FinishReason.STOP)
            self._reporter.forget(group.sequences[index])

    def number_of(self, sequence: int) -> int | None:
        """Whose continuation this is, if it is not forgotten."""
        groups = [*self.scheduler.groups(), *self._latest.values()]
        named = (group for group in groups for member in group.sequences if member.id == sequence)
        group = next(named, None)
        return None if group is None else group.request.id

    def turn(self) -> StepOutput | None:
        """One turn of the loop; None if no step was absorbed."""
        self._check_alive()
        try:
            absorbed = self._loop.turn()
        except BaseException as error:  # a step was planned and not taken in: scheduler and runner are at odds
            self._failure = f"{type(error).__name__}: {error}"
            raise
        if absorbed is None:
            return None
        cornered = self._cornered(absorbed)
        if self.grammars is not None:
            self.grammars.advance(absorbed, self.scheduler)
        progress = self._reporter.report(absorbed, cornered)
        self.num_sampled += len(absorbed.tokens) + sum(
            len(sequence.tokens) - len(sequence.request.prompt)
            for sequence in absorbed.finished
            if sequence.request.beam is not None
        )
        return progress

    def _cornered(self, absorbed: Absorbed) -> set[SequenceId]:
        """Who could not go on by its request's own doing. A beam search ends with the first beam that cannot."""
        names = set()
        for sequence in absorbed.finished:
            if sequence.finish_reason is FinishReason.ERROR:
                mask = None if self.grammars is None else self.grammars.mask(sequence)
                suspects = (sequence,) if sequence.request.beam is None else sequence.group.sequences
                if any(is_cornered(each, mask, self.door.vocab_size) for each in suspects):
                    names.add(sequence.id)
        return names

    def prepare(self) -> None:
        """With nothing else to do: a piece of work that makes later steps faster, if any is left."""
        if self._preparing is not None and not self._preparing.prepared:
            self._preparing.prepare()

    @property
    def prepared(self) -> bool:
        return self._preparing is None or self._preparing.prepared

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"This engine failed in an earlier step ({self._failure}); load the model again.")

    @property
    def idle(self) -> bool:
        return self.scheduler.idle
