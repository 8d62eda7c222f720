"""Grammar matchers of running sequences, and their masks for the next step.

A sequence with drafts has a mask after each of them. Where its grammar forces the text that comes next, it is
passed to the scheduler, and the sequence drafts it (jump forward).

Fails closed: a failed matcher masks every token, so only its row ends, with an error. So does every sequence of a
grammar that takes too long: all other rows wait for it.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import accumulate

import numpy as np

from quire.core.fault_injection import FaultSite, trip
from quire.core.ids import IntArray, SequenceId
from quire.core.request import RequestGroup, Sequence
from quire.core.sampling import Grammar
from quire.core.step import FinishReason, Masks
from quire.core.step_output import StepOutput
from quire.engine.open_model import OpenedModel
from quire.grammar import limits
from quire.grammar.compiler import CompiledGrammar, GrammarCompiler
from quire.grammar.matcher import GrammarMatcher, MatcherPool
from quire.grammar.vocabulary import GrammarVocabulary
from quire.sched.scheduler import Scheduler

_log = logging.getLogger(__name__)


def _pass_interrupt(error: BaseException) -> None:
    """Re-raise what ends the process. All else fails one request; a panic of llguidance is no `Exception`."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error


class GrammarMasks:
    """Starts with a request group, advances with its tokens, drops finished sequences."""

    __slots__ = (
        "_bits", "_compiler", "_cpu_time", "_forcing", "_lock", "_matchers", "_num_singly", "_num_threads",
        "_num_words", "_pool", "_vocabulary", "_wall_time",
    )  # fmt: skip

    def __init__(
        self,
        opened: OpenedModel,
        vocab_size: int,
        cpu_time: Callable[[], float] = time.thread_time,
        wall_time: Callable[[], float] = time.perf_counter,
        num_threads: int = 1,
    ) -> None:
        self._cpu_time = cpu_time
        self._wall_time = wall_time
        self._num_threads = num_threads
        self._pool: MatcherPool | None = None
        self._num_singly = 0  # calls in which each matcher is timed alone: the last one took long
        self._vocabulary = (opened, vocab_size)  # the tokenizer is read with it
        self._num_words = -(-vocab_size // 32)
        self._bits: IntArray = np.zeros((0, self._num_words), dtype=np.int32)
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._matchers: dict[SequenceId, tuple[Sequence, GrammarMatcher]] = {}
        self._forcing: set[SequenceId] = set()  # those whose grammar forced something, when it was last asked

    def prepare(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, or return from the cache. Raises InvalidGrammar. Thread-safe."""
        return self.load_vocabulary().compile(grammar)

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is compiled, and cached."""
        return self._compiler is not None and self._compiler.knows(grammar)

    def load_vocabulary(self) -> GrammarCompiler:
        """The compiler. Reading a vocabulary takes about a second; the first call does it."""
        with self._lock:
            if self._compiler is None:
                opened, vocab_size = self._vocabulary
                assert opened.tokenizer is not None
                self._compiler = GrammarCompiler(GrammarVocabulary(opened.tokenizer, opened.end_ids, vocab_size))
            return self._compiler

    def matchers(self, grammar: Grammar, count: int) -> list[GrammarMatcher]:
        """One per sequence of a request; none is kept before `begin`."""
        compiled = self.prepare(grammar)
        return [compiled.matcher() for _ in range(count)]

    def begin(self, group: RequestGroup, matchers: Many[GrammarMatcher]) -> None:
        for sequence, matcher in zip(group.sequences, matchers, strict=True):
            self._matchers[sequence.id] = (sequence, matcher)

    def masks(self, sequences: Many[Sequence], drafts: Many[IntArray]) -> Masks:
        """The masks of allowed tokens of each sequence, for its next token and after each of its drafts, until the next
        call."""
        if len(sequences) > len(self._bits):
            self._bits = np.zeros((2 * len(sequences), self._num_words), dtype=np.int32)
        bits = self._bits[: len(sequences)]
        if not self._fill_together(sequences, bits):
            for sequence, row in zip(sequences, bits, strict=True):
                self._fill(sequence, row)
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int32)
        passes = [(rows, bits)]
        places = [place for place, tokens in enumerate(drafts) if len(tokens)]
        further = {place: self._after_drafts(sequences[place], bits[place], drafts[place]) for place in places}
        for number in range(max(map(len, further.values()), default=0)):
            longer = [place for place in places if number < len(further[place])]
            passes.append((rows[longer], np.stack([further[place][number] for place in longer])))
        if len(passes) == 1:
            return Masks(rows, bits)
        starts = tuple(accumulate(len(each) for each, _ in passes[:-1]))
        return Masks(np.concatenate([each for each, _ in passes]), np.concatenate([each for _, each in passes]), starts)

    def _after_drafts(self, sequence: Sequence, first: IntArray, drafts: IntArray) -> list[IntArray]:
        """The masks after each draft of a sequence, up to the first that is not allowed or completes the text. In a
        copy of its matcher: what fails there leaves fewer masks, and the sequence as it is."""
        masks = [first]
        try:
            _, matcher = self._matchers[sequence.id]
            started_s = self._cpu_time()
            ahead = None if matcher.failed else matcher.fork()
            for token in drafts.tolist():
                bits = np.zeros(self._num_words, dtype=np.int32)
                is_allowed = bool(masks[-1][token >> 5] >> (token & 31) & 1)
                if ahead is None or not is_allowed or not ahead.advance(token) or ahead.stopped:
                    break
                if not ahead.fill_mask(bits) or self._is_slow(ahead, started_s):
                    break
                masks.append(bits)
        except BaseException as error:
            _pass_interrupt(error)
            _log.exception("the grammar of request %s failed behind drafts", sequence.request.id)
        return masks[1:]

    def _fill_together(self, sequences: Many[Sequence], bits: IntArray) -> bool:
        """All masks at once, in threads; False: each must be filled alone."""
        if not self._may_work_together(len(sequences)):
            return False
        started_s = self._wall_time()
        matchers = [self._matchers[sequence.id][1] for sequence in sequences if sequence.id in self._matchers]
        try:
            for sequence in sequences:
                trip(FaultSite.GRAMMAR_MASK, sequence.id)
            filled = self._threads().fill(matchers, bits)
        except BaseException as error:  # of one of them, which fails again when it is filled alone
            _pass_interrupt(error)
            for matcher in matchers:
                matcher.restore()
            return False
        for sequence, is_filled in zip(sequences, filled, strict=True):
            if not is_filled:
                _log.error("the grammar matcher of request %s failed", sequence.request.id)
        self._note_wall_time(started_s)
        return True

    def _may_work_together(self, count: int) -> bool:
        self._num_singly = max(self._num_singly - 1, 0)
        return count > 1 and not self._num_singly

    def _threads(self) -> MatcherPool:
        if self._pool is None:
            self._pool = MatcherPool(self._num_threads, self._wall_time)
        return self._pool

    def _note_wall_time(self, started_s: float) -> None:
        """In threads no CPU time is known: where a call takes long, those of the next step are timed one by one."""
        if self._wall_time() - started_s > limits.FAILING_CPU_S:
            self._num_singly = 3

    def has_failed(self, sequence: Sequence) -> bool:
        """Whether its grammar exceeded a limit."""
        entry = self._matchers.get(sequence.id)
        return entry is not None and entry[1].failed

    def mask(self, sequence: Sequence) -> IntArray | None:
        """The mask of a sequence that ended without a token, after all before it; None without a working grammar."""
        entry = self._matchers.get(sequence.id)
        if entry is None:
            return None
        bits = np.zeros(self._num_words, dtype=np.int32)
        try:
            matcher = entry[1]
            for token in sequence.tokens[len(sequence.request.prompt) + matcher.num_tokens :].tolist():
                matcher.advance(token)  # of the same step
            return bits if matcher.fill_mask(bits) else None
        except BaseException as error:
            _pass_interrupt(error)
            _log.exception("the grammar of request %s failed", sequence.request.id)
            return None

    def _fill(self, sequence: Sequence, row: IntArray) -> None:
        try:
            trip(FaultSite.GRAMMAR_MASK, sequence.id)
            _, matcher = self._matchers[sequence.id]
            started_s = self._cpu_time()
            matcher.fill_mask(row)
            if self._is_slow(matcher, started_s):
                row[:] = 0
            if matcher.failed:
                _log.error("the grammar matcher of request %s failed", sequence.request.id)
        except BaseException as error:  # of this row only: no token is allowed, and it ends
            _pass_interrupt(error)
            row[:] = 0
            _log.exception("the grammar of request %s failed", sequence.request.id)

    def advance(self, output: StepOutput, scheduler: Scheduler) -> None:
        """Advance with the step's tokens. A sequence that can continue no further is finished, end token or not."""
        if not self._matchers:
            return
        passes: list[list[tuple[Sequence, GrammarMatcher, int]]] = []
        num_seen: Counter[int] = Counter()
        for name, token in zip(output.sequences.tolist(), output.tokens.tolist(), strict=True):
            entry = self._matchers.get(SequenceId(name))
            if entry is not None:
                if num_seen[name] == len(passes):
                    passes.append([])
                passes[num_seen[name]].append((*entry, token))
                num_seen[name] += 1
        for sampled in passes:
            going_on = [each for each in sampled if not each[0].finished]
            if not self._advance_together(going_on, scheduler):
                for sequence, matcher, token in going_on:
                    self._conclude(sequence, self._advance_one(matcher, sequence.id, token), scheduler)
        if passes and scheduler.policy.speculation.jumps:
            for sequence, matcher, _ in passes[0]:
                if not sequence.finished:
                    self._expect_forced(sequence, matcher, scheduler)
        for name in [name for name, (sequence, _) in self._matchers.items() if sequence.finished]:
            del self._matchers[name]
            self._forcing.discard(name)

    def _expect_forced(self, sequence: Sequence, matcher: GrammarMatcher, scheduler: Scheduler) -> None:
        """Name what the grammar forces next, to be drafted; also that it is nothing, if it was something before."""
        tokens: IntArray = np.empty(0, dtype=np.int32)
        try:
            started_s = self._cpu_time()
            tokens = matcher.forced_tokens()
            if self._cpu_time() - started_s > limits.FAILING_CPU_S:  # a very long text: not worth a delay of all rows
                matcher.pattern.jumps = False
        except BaseException as error:
            _pass_interrupt(error)
            _log.exception("the forced text of a grammar failed")
        if len(tokens) or sequence.id in self._forcing:
            scheduler.expect(sequence, len(sequence.request.prompt) + matcher.num_tokens, tokens)
            (self._forcing.add if len(tokens) else self._forcing.discard)(sequence.id)

    def _advance_together(self, sampled: list[tuple[Sequence, GrammarMatcher, int]], scheduler: Scheduler) -> bool:
        """All at once, in threads; False: each must be advanced alone."""
        if not self._may_work_together(len(sampled)):
            return False
        started_s = self._wall_time()
        matchers = [matcher for _, matcher, _ in sampled]
        try:
            for sequence, _, _ in sampled:
                trip(FaultSite.GRAMMAR_ADVANCE, sequence.id)
            taken = self._threads().advance(matchers, [token for _, _, token in sampled])
        except BaseException as error:  # of one of them, which fails again when it is advanced alone
            _pass_interrupt(error)
            for matcher in matchers:
                matcher.restore()
            return False
        self._note_wall_time(started_s)
        for (sequence, matcher, _), is_taken in zip(sampled, taken, strict=True):
            self._conclude(sequence, self._reason(matcher, sequence.id, taken=is_taken), scheduler)
        return True

    def _conclude(self, sequence: Sequence, reason: FinishReason | None, scheduler: Scheduler) -> None:
        if reason is not None:
            scheduler.conclude(sequence, reason)

    def _reason(self, matcher: GrammarMatcher, name: int, *, taken: bool) -> FinishReason | None:
        """Why a sequence ends with the token that its matcher consumed; None: it goes on."""
        if not taken:
            _log.error("the grammar matcher of sequence %s failed: %.200s", name, matcher.trouble)
            return FinishReason.FAILED if matcher.violated else FinishReason.GRAMMAR_FAILED
        return FinishReason.STOP if matcher.stopped else None

    def _advance_one(self, matcher: GrammarMatcher, name: int, token: int) -> FinishReason | None:
        try:
            trip(FaultSite.GRAMMAR_ADVANCE, name)
            started_s = self._cpu_time()
            taken = matcher.advance(token)
            is_slow = self._is_slow(matcher, started_s)
            return self._reason(matcher, name, taken=taken and not is_slow)
        except BaseException as error:
            _pass_interrupt(error)
            _log.exception("a grammar failed to consume a token")
            return FinishReason.FAILED

    def _is_slow(self, matcher: GrammarMatcher, started_s: float) -> bool:
        """Whether it took too long. All its sequences fail: each of them would take as long again."""
        taken_s = self._cpu_time() - started_s
        limit_s = limits.FAILING_CPU_S if matcher.failed else limits.FOLLOWING_CPU_S
        if taken_s <= limit_s:
            return False
        _log.error("a grammar took %.0f ms for a token; the limit is %.0f ms", taken_s * 1e3, limit_s * 1e3)
        for _, other in self._matchers.values():
            if other.pattern is matcher.pattern:
                other.failed = True
        return True

    @property
    def num_sequences(self) -> int:
        return len(self._matchers)
