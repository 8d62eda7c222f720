"""Turns grammars into matchers with llguidance, within its limits, and keeps what was compiled. Knows no rows.

Call `compile` on any thread but an event loop's: llguidance lets go of the interpreter lock while it compiles (the
longest gap seen by another thread was 14 ms during a compile of 14 s), and the checks before it keep what a
client can send under about a second.
"""

import threading
import time
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from quire.core.errors import InvalidGrammar
from quire.core.grammar import Grammar, GrammarKind
from quire.grammar import limits
from quire.grammar.cache import Cache
from quire.grammar.check import Source, lark_source
from quire.grammar.matcher import Matcher
from quire.grammar.tokens import Vocabulary

_SMALLER = "Use fewer optional and repeated parts beside one another, or a regular expression for them."


class Compiled:
    """One grammar, ready to be followed by any number of sequences.

    llguidance's copies share one lexer, which grows with every mask and fails for all of them once it is full. So
    a matcher that meets a full one asks for a fresh one, and only a grammar that fills it alone can fail.
    """

    __slots__ = ("_lock", "_prototype", "_source", "num_masks", "vocabulary")

    def __init__(self, source: Source, vocabulary: Vocabulary) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.vocabulary = vocabulary
        self.num_masks = 0  # counted without a lock: an estimate of growth, nothing else
        self._prototype = self._build()

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""
        return Matcher(self)

    @property
    def prototype(self) -> LLMatcher:
        """At the beginning, to be copied, never advanced."""
        return self._prototype

    def renew(self, full: LLMatcher) -> LLMatcher:
        """A prototype with an empty lexer, in place of one whose lexer is full."""
        with self._lock:
            if self._prototype is full:
                self._prototype = self._build()
                self.num_masks = 0
            return self._prototype

    @property
    def cost_bytes(self) -> int:
        grown = min(self.num_masks * limits.BYTES_PER_MASK, limits.LEXER_BYTES)
        return limits.BASE_BYTES + len(self._source.text) * limits.BYTES_PER_TEXT_BYTE + grown

    def _build(self) -> LLMatcher:
        allowed = _parser_limits(self._source.step_items)
        matcher = LLMatcher(self.vocabulary.tokens, self._source.text, log_level=0, limits=allowed)
        if matcher.is_error():
            raise InvalidGrammar(f"The grammar cannot be compiled: {_in_short(matcher.get_error())}")
        return matcher


class Compiler:
    """One for a model. Safe to use from many threads."""

    __slots__ = ("_cache", "_cpu_time", "vocabulary")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        cache_bytes: int = limits.CACHE_BYTES,
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self.vocabulary = vocabulary
        self._cpu_time = cpu_time
        self._cache: Cache[tuple[GrammarKind, str], Compiled] = Cache(cache_bytes)

    def compile(self, grammar: Grammar) -> Compiled:
        """What sequences follow. Raises InvalidGrammar, also if no text of these tokens fulfils the grammar."""
        key = (grammar.kind, grammar.text)
        known = self._cache.find(key)
        if known is not None:
            return known
        compiled = Compiled(lark_source(grammar), self.vocabulary)
        self._try(compiled.matcher())
        return self._cache.keep(key, compiled)

    def knows(self, grammar: Grammar) -> bool:
        """Whether it was compiled, and is kept."""
        return self._cache.find((grammar.kind, grammar.text)) is not None

    def _try(self, matcher: Matcher) -> None:
        """What fails at the first token, or takes too long over it, is refused before anybody follows it."""
        begun_s = self._cpu_time()
        follows = matcher.fill(np.zeros(self.vocabulary.num_words, np.int32))
        taken_s = self._cpu_time() - begun_s
        if not follows and not matcher.trouble:
            raise InvalidGrammar("The grammar allows no text at all that this model could write.")
        if not follows:
            raise InvalidGrammar(f"The grammar is too large to be followed: {_in_short(matcher.trouble)}. {_SMALLER}")
        if taken_s > limits.FIRST_MASK_CPU_S:
            raise InvalidGrammar(
                f"The grammar is too large to be followed: its first token took {taken_s * 1000:.0f} ms to prepare; "
                f"{limits.FIRST_MASK_CPU_S * 1000:.0f} are the most. {_SMALLER}"
            )

    @property
    def cached_bytes(self) -> int:
        """What the kept grammars take, estimated from above."""
        return self._cache.cost_bytes

    def __len__(self) -> int:
        return len(self._cache)


def _parser_limits(step_items: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=limits.ROW_ITEMS,
        initial_lexer_fuel=limits.INITIAL_LEXER_FUEL,
        step_lexer_fuel=limits.STEP_LEXER_FUEL,
        step_max_items=step_items,
        max_lexer_states=limits.LEXER_STATES,
        max_grammar_size=limits.GRAMMAR_SYMBOLS,
        verbose_errors=False,  # they would repeat the answer so far
    )


def _in_short(reason: str) -> str:
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= limits.REASON_CHARACTERS else text[: limits.REASON_CHARACTERS - 1] + "…"
