"""Compiles grammars with llguidance, within limits, and caches them (LRU, bounded by bytes). Does not depend on rows.

Do not call `compile` on an event loop's thread. llguidance releases the GIL while it compiles: the longest pause of
another thread was 14 ms during a compilation of 14 s. The validation before it keeps a client's grammar under about
one second.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from quire.core.errors import InvalidGrammar
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar import limits
from quire.grammar.lark_source import GrammarSource, lark_source
from quire.grammar.matcher import GrammarMatcher
from quire.grammar.vocabulary import GrammarVocabulary


class Sized(Protocol):
    @property
    def cost_bytes(self) -> int:
        """Its size now; may grow while it is cached."""
        ...


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Sized)


class SizedCache(Generic[Key, Value]):
    """LRU cache bounded by bytes. Thread-safe."""

    __slots__ = ("_entries", "_lock", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Key) -> Value | None:
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                self._trim()
            return value

    def keep(self, key: Key, value: Value) -> Value:
        """Insert, and return the cached value: another thread's, if it was first."""
        with self._lock:
            kept = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            self._trim()
            return kept

    @property
    def cost_bytes(self) -> int:
        with self._lock:
            return self._total()

    def __len__(self) -> int:
        return len(self._entries)

    def _total(self) -> int:
        return sum(value.cost_bytes for value in self._entries.values())

    def _trim(self) -> None:
        total = self._total()
        while total > self.max_bytes and self._entries:
            _, given_up = self._entries.popitem(last=False)
            total -= given_up.cost_bytes


_SMALLER = "Use fewer optional and repeated parts beside one another, or a regular expression for them."


class CompiledGrammar:
    """One compiled grammar; makes any number of matchers.

    llguidance's copies share one lexer. It grows with every mask, and once it is full it fails for all of them. A
    matcher that finds it full gets a new one, so only a grammar that fills a lexer alone can fail.
    """

    __slots__ = ("_lock", "_prototype", "_source", "jumps", "num_masks", "vocabulary")

    def __init__(self, source: GrammarSource, vocabulary: GrammarVocabulary) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.vocabulary = vocabulary
        self.num_masks = 0  # counted without a lock: only an estimate of the lexer's growth
        self.jumps = True
        self._prototype = self._build()

    def matcher(self) -> GrammarMatcher:
        """A matcher at the start of an output."""
        return GrammarMatcher(self)

    @property
    def prototype(self) -> LLMatcher:
        """A matcher at the start. Copy it, never advance it."""
        return self._prototype

    def renew(self, full: LLMatcher) -> LLMatcher:
        """Replace a prototype whose lexer is full by one with an empty lexer."""
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


class GrammarCompiler:
    """One per model. Thread-safe."""

    __slots__ = ("_cache", "_cpu_time", "vocabulary")

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        cache_bytes: int = limits.CACHE_BYTES,
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self.vocabulary = vocabulary
        self._cpu_time = cpu_time
        self._cache: SizedCache[tuple[GrammarKind, str], CompiledGrammar] = SizedCache(cache_bytes)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, or return from the cache. Raises InvalidGrammar, also if the vocabulary cannot match the grammar."""
        key = (grammar.kind, grammar.text)
        known = self._cache.find(key)
        if known is not None:
            return known
        source = lark_source(grammar)
        for _ in range(limits.FIRST_MASK_TRIES):  # a machine that was busy elsewhere is given another chance
            compiled = CompiledGrammar(source, self.vocabulary)
            taken_s = self._first_mask(compiled.matcher())
            if taken_s <= limits.FIRST_MASK_CPU_S:
                return self._cache.keep(key, compiled)
        raise InvalidGrammar(
            f"The grammar is too large: its first token took {taken_s * 1000:.0f} ms to prepare; "
            f"the limit is {limits.FIRST_MASK_CPU_S * 1000:.0f} ms. {_SMALLER}"
        )

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is in the cache."""
        return self._cache.find((grammar.kind, grammar.text)) is not None

    def _first_mask(self, matcher: GrammarMatcher) -> float:
        """CPU seconds of the first mask. A grammar for which it fails is rejected before a request uses it."""
        begun_s = self._cpu_time()
        follows = matcher.fill_mask(np.zeros(self.vocabulary.num_words, np.int32))
        taken_s = self._cpu_time() - begun_s
        if not follows and not matcher.trouble:
            raise InvalidGrammar("The grammar allows no text that this model can generate.")
        if not follows:
            raise InvalidGrammar(f"The grammar is too large: {_in_short(matcher.trouble)}. {_SMALLER}")
        return taken_s

    @property
    def cached_bytes(self) -> int:
        """The size of the cached grammars, an upper bound."""
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
        verbose_errors=False,  # they would repeat the output so far
    )


def _in_short(reason: str) -> str:
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= limits.REASON_CHARACTERS else text[: limits.REASON_CHARACTERS - 1] + "…"
