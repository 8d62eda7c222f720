"""The engine in one process: a door, a scheduler, a runner and the loop between them. Knows ids, not text."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.core.errors import EngineFailed, InvalidParameter
from quire.core.faults import Site, trip
from quire.core.grammar import Grammar
from quire.core.ids import RequestId, SequenceId
from quire.core.request import Family
from quire.core.sampling import MAX_SEED
from quire.core.step import FinishReason, Runner
from quire.engine.cornered import is_cornered
from quire.engine.door import Door
from quire.engine.messages import Accepted, Order, Progress
from quire.engine.reporter import Reporter
from quire.sched.explain import Explanation, explain
from quire.sched.loop import Loop, Span
from quire.sched.scheduler import Absorbed, Scheduler

if TYPE_CHECKING:  # llguidance is needed by those who follow grammars alone
    from quire.engine.grammars import Grammars
    from quire.grammar.matcher import Matcher

MOST_REMEMBERED = 100  # finished requests that can still be explained


class Preparing(Protocol):
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
        door: Door,
        *,
        depth: int,
        seed: int,
        clock: Callable[[], float],
        grammars: "Grammars | None" = None,
        preparing: Preparing | None = None,
        span: Span | None = None,
    ) -> None:
        self.door = door
        self.scheduler = scheduler
        self.clock = clock
        self.grammars = grammars
        self._loop = Loop(scheduler, runner, depth, clock, None if grammars is None else grammars.masks, span)
        self._seeds = random.Random(seed)
        self._reporter = Reporter()
        self._latest: dict[RequestId, Family] = {}
        self._failure: str | None = None
        self._preparing = preparing
        self.num_sampled = 0  # tokens of continuations; those of beams when their search ends

    def submit(self, order: Order) -> Accepted:
        """Queue a request. A `QuireError` means that nothing happened."""
        self._check_alive()
        trip(Site.ADD, order.number)
        now_s = self.clock()
        grammar = order.params.grammar
        if grammar is not None:
            self._prepare(grammar)
        request = self.door.admit(order, self._seeds.randint(0, MAX_SEED), now_s)
        matchers: list[Matcher] = []  # made before `add`: this may raise, and nothing is registered yet
        if grammar is not None and self.grammars is not None:
            matchers = self.grammars.matchers(grammar, request.num_sequences)
        family = self.scheduler.add(request, now_s)[0].family
        if matchers and self.grammars is not None:
            self.grammars.begin(family, matchers)
        self._reporter.expect(family)
        self._latest[request.id] = family
        if len(self._latest) > MOST_REMEMBERED:
            del self._latest[next(iter(self._latest))]
        return Accepted(order.number, family.members[0].id, self.scheduler.books.last_absorbed + 1)

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
        books = self.scheduler.books
        family = books.families.get(request_id) or self._latest.get(request_id)
        if family is None:
            raise InvalidParameter(
                f"Request {request_id} is not remembered; the {MOST_REMEMBERED} latest are.", param="request_id"
            )
        return explain(family, books.stalls, books.last_planned + 1)

    def abort(self, number: int) -> None:
        """Legal in every state, and twice."""
        for sequence in self.scheduler.abort(RequestId(number)):
            self._reporter.forget(sequence)

    def stop(self, number: int, index: int) -> None:
        """A stop string came in the text of this continuation. It may be over already."""
        family = self.scheduler.books.families.get(RequestId(number))
        if family is not None:
            self.scheduler.finish(family.members[index], FinishReason.STOP)
            self._reporter.forget(family.members[index])

    def number_of(self, sequence: int) -> int | None:
        """Whose continuation this is, if it is not forgotten."""
        families = [*self.scheduler.books.families.values(), *self._latest.values()]
        named = (family for family in families for member in family.members if member.id == sequence)
        family = next(named, None)
        return None if family is None else family.request.id

    def turn(self) -> Progress | None:
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
                suspects = (sequence,) if sequence.request.beam is None else sequence.family.members
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
