"""The engine: request validator, scheduler, runner and the loop between them, in one process. Works on token ids."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.core.errors import EngineFailed, InvalidParameter
from quire.core.fault_injection import FaultSite, trip
from quire.core.ids import IntArray, RequestId
from quire.core.request import EventKind, RequestEvent, RequestGroup, Sequence
from quire.core.sampling import MAX_SEED, Grammar
from quire.core.shared_blocks import BlockAddress, SharedBlocks
from quire.core.step import FinishReason, Runner
from quire.core.step_output import FinishedSequence, StepOutput
from quire.engine.messages import Accepted, AddRequest
from quire.engine.prefix_transfer import COPY_BYTES, BlockSource, PrefixExports, PrefixImports
from quire.engine.request_validator import RequestValidator
from quire.runner.graph_shapes import LaunchCounts
from quire.sched.explain import Explanation, SlowSteps
from quire.sched.loop import Loop, Progress, Span
from quire.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.engine.grammar_masks import GrammarMasks
    from quire.grammar.matcher import GrammarMatcher


def is_nothing_left(sequence: Sequence, mask: IntArray | None, vocab_size: int) -> bool:
    """Whether a request's own parameters and grammar, together, allow no token; for a sequence that ended without one.
    `mask` is what its grammar allows next, 32 tokens to a word; None if it follows none."""
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


MAX_REMEMBERED = 100  # latest finished requests, which can still be explained


class PreparingRunner(Protocol):
    """A runner that can use idle time to make later steps faster, a piece at a time."""

    @property
    def launches(self) -> LaunchCounts: ...

    @property
    def prepared(self) -> bool: ...

    def prepare(self) -> None: ...


class Engine:
    """`submit` queues requests; each `step` runs the loop once and returns the output of a finished step."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        validator: RequestValidator,
        *,
        depth: int,
        seed: int,
        clock: Callable[[], float],
        grammars: "GrammarMasks | None" = None,
        preparing: PreparingRunner | None = None,
        span: Span | None = None,
    ) -> None:
        self.validator = validator
        self.scheduler = scheduler
        self.clock = clock
        self.grammars = grammars
        masks = None if grammars is None else grammars.masks
        self._loop = Loop(scheduler, runner, depth, clock, masks, self._receive, span)
        self._seeds = random.Random(seed)
        self._groups: dict[RequestId, RequestGroup] = {}  # those in the scheduler and the latest that were, by arrival
        self._failure: str | None = None
        self._preparing = preparing
        self.exports: PrefixExports | None = None  # of a prefill engine
        self.imports: PrefixImports | None = None  # of a decode engine
        self.num_sampled = 0  # tokens of continuations; those of beams when their search ends

    def submit(self, message: AddRequest) -> Accepted:
        """Queue a request. A `QuireError` means that nothing happened."""
        self._check_alive()
        trip(FaultSite.ADD, message.number)
        now_s = self.clock()
        grammar = message.params.grammar
        if grammar is not None:
            self._prepare(grammar)
        request = self.validator.admit(message, self._seeds.randint(0, MAX_SEED), now_s)
        matchers: list[GrammarMatcher] = []  # made before `add`: this may raise, and nothing is registered yet
        if grammar is not None and self.grammars is not None:
            matchers = self.grammars.matchers(grammar, request.num_sequences)
        group = self.scheduler.add(request, now_s)[0].group
        if matchers and self.grammars is not None:
            self.grammars.begin(group, matchers)
        step = self.scheduler.last_planned + 1
        if message.routing:
            group.note(RequestEvent(step, EventKind.ROUTED, detail=message.routing))
        if message.transfer is not None:
            num_copied, why = message.transfer.num_tokens, message.transfer.text
            group.note(RequestEvent(step, EventKind.TRANSFERRED, num_copied, detail=why))
        self._groups[request.id] = group
        if len(self._groups) > MAX_REMEMBERED + self.scheduler.num_running + self.scheduler.num_waiting:
            oldest = next(name for name in self._groups if self.scheduler.group(name) is None)
            self._groups.pop(oldest).forget_sequences()
        return Accepted(message.number, group.sequences[0].id, self.scheduler.last_absorbed + 1)

    def _prepare(self, grammar: Grammar) -> None:
        if self.grammars is None:
            raise InvalidParameter(
                'Structured output needs a model with a tokenizer and llguidance (pip install "quire[serve]").',
                param="grammar",
            )
        self.grammars.prepare(grammar)

    def export_prefixes(self, layout: str, shared: SharedBlocks, settle: Callable[[], None] | None = None) -> None:
        """Lease prefixes in these blocks to other engines. `settle`: see `PrefixExports`."""
        self.exports = PrefixExports(self.scheduler, shared, layout, self.clock, settle)

    def import_prefixes(
        self,
        layout: str,
        open_source: Callable[[BlockAddress], BlockSource],
        note_imported: Callable[[IntArray], None] | None = None,
        close_ended: Callable[[], None] | None = None,
        copy_bytes: int = COPY_BYTES,
    ) -> None:
        """Copy prefixes of other engines. The parameters are those of `PrefixImports`."""
        self.imports = PrefixImports(
            self.scheduler, layout, open_source, self.clock, copy_bytes, note_imported, close_ended
        )

    def explain(self, request_id: RequestId) -> Explanation:
        """What happened to a request that is open, or among the latest finished ones."""
        group = self._groups.get(request_id)
        if group is None:
            raise InvalidParameter(
                f"Request {request_id} is unknown; only open and the {MAX_REMEMBERED} latest requests are kept.",
                param="request_id",
            )
        explanation = self.scheduler.explain(group)
        steps = explanation.running_steps(self.scheduler.last_absorbed + 1)
        slow = self.launches.slow_between(steps.start, steps.stop)
        return replace(explanation, slow_steps=SlowSteps(len(slow), sum(slow)))

    def abort(self, number: int) -> None:
        """Legal in every state, and twice."""
        self.scheduler.abort(RequestId(number))

    def stop(self, number: int, index: int) -> None:
        """A stop string matched in the text of this sequence, which may have finished already."""
        group = self.scheduler.group(RequestId(number))
        if group is not None:
            self.scheduler.finish(group.sequences[index], FinishReason.STOP)

    def number_of(self, sequence: int) -> int | None:
        """The request of a sequence, if it is remembered."""
        groups = (group for group in self._groups.values() for member in group.sequences if member.id == sequence)
        group = next(groups, None)
        return None if group is None else group.request.id

    def step(self) -> StepOutput | None:
        """One iteration of the loop; None if no step was absorbed."""
        if self._failure is not None:
            self._check_alive()
        try:
            return self._loop.step()
        except BaseException as error:  # a step was planned and not absorbed: scheduler and runner disagree
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _receive(self, output: StepOutput) -> StepOutput:
        """An output, as soon as the loop has it: the masks of the next step depend on its tokens."""
        if output.finished:
            if any(over.reason is FinishReason.ERROR for over in output.finished):  # before the grammars advance
                output = output._replace(finished=tuple(self._with_cause(over) for over in output.finished))
            self.num_sampled += sum(len(over.tokens) for over in output.finished if over.score is not None)  # beams
        if self.grammars is not None:
            self.grammars.advance(output, self.scheduler)
        self.num_sampled += len(output.tokens)
        return output

    def _with_cause(self, over: FinishedSequence) -> FinishedSequence:
        """GRAMMAR_FAILED or NOTHING_LEFT in place of ERROR, where the request itself left no token to choose. A beam
        search ends with the first beam that has none."""
        group = self._groups.get(RequestId(over.number))
        if over.reason is not FinishReason.ERROR or group is None:
            return over
        sequence = group.sequences[over.sequence - group.sequences[0].id]
        if self.grammars is not None and self.grammars.has_failed(sequence):
            return over._replace(reason=FinishReason.GRAMMAR_FAILED)
        mask = None if self.grammars is None else self.grammars.mask(sequence)
        candidates = (sequence,) if group.request.beam is None else group.sequences
        is_own_doing = any(is_nothing_left(each, mask, self.validator.vocab_size) for each in candidates)
        return over._replace(reason=FinishReason.NOTHING_LEFT) if is_own_doing else over

    def prepare(self) -> None:
        """With nothing else to do: a piece of work that makes later steps faster, if any is left."""
        if self._preparing is not None and not self._preparing.prepared:
            self._preparing.prepare()

    @property
    def prepared(self) -> bool:
        return self._preparing is None or self._preparing.prepared

    @property
    def launches(self) -> LaunchCounts:
        """How steps were launched."""
        return LaunchCounts() if self._preparing is None else self._preparing.launches

    @property
    def progress(self) -> Progress:
        """What the loop does now, and since when. May be read on another thread."""
        return self._loop.progress

    def note_progress(self) -> None:
        """Something other than a step is done: the loop continues."""
        self._loop.note_progress()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"This engine failed in an earlier step ({self._failure}); load the model again.")

    @property
    def idle(self) -> bool:
        return self.scheduler.idle
