"""Follows one sequence through its grammar: which tokens may come next, and what was taken. Knows no compiler.

Fails closed. llguidance offers the end token when it gives up, which would look like a finished answer; here a
matcher that failed allows nothing and says so.
"""

from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher

from quire.core.ids import IntArray
from quire.grammar.vocabulary import GrammarVocabulary

_TOKENS_BETWEEN_RENEWALS = 256  # a grammar that fills a fresh lexer sooner is itself too large to follow


class MatcherSource(Protocol):
    """What a matcher is made from; `Compiled` is."""

    num_masks: int

    @property
    def vocabulary(self) -> GrammarVocabulary: ...
    @property
    def prototype(self) -> LLMatcher: ...
    def renew(self, full: LLMatcher) -> LLMatcher: ...


class GrammarMatcher:
    """One sequence's place in its grammar: a function of the tokens it took. Used by one thread at a time."""

    __slots__ = ("_ended", "_inner", "_origin", "_renewed_at", "_tokens", "failed", "pattern", "trouble")

    def __init__(self, pattern: MatcherSource) -> None:
        self.pattern = pattern
        self._origin = pattern.prototype
        self._inner = self._origin.deep_copy()
        self._tokens: list[int] = []  # without the end token, which llguidance never sees
        self._renewed_at = -_TOKENS_BETWEEN_RENEWALS
        self._ended = False
        self.failed = False  # nothing is allowed any more: the sequence must end with an error
        self.trouble = ""  # llguidance's own words for why it gave up over a mask; none if nothing was left to allow

    def fill(self, mask_row: IntArray) -> bool:
        """Set the bits of the tokens that may come next. False: it failed, and no bit is set."""
        vocabulary = self.pattern.vocabulary
        assert mask_row.shape == (vocabulary.num_words,) and mask_row.dtype == np.int32, mask_row.shape
        assert mask_row.flags.c_contiguous
        if not self.failed and not self._ended:
            self._write(mask_row)
            self.pattern.num_masks += 1
        return self._finish(mask_row)

    def advance(self, token: int) -> bool:
        """Take the token that was sampled. False: it was not allowed, or the grammar failed; nothing may follow."""
        if self.failed or self._ended:
            return False
        if token in self.pattern.vocabulary.end_ids and self.may_end:
            self._ended = True
            return True
        if self._inner.consume_token(token):
            self._tokens.append(token)
            return True
        if self._renew() and self._inner.consume_token(token):
            self._tokens.append(token)
            return True
        self.failed = True
        return False

    @property
    def may_end(self) -> bool:
        """The text so far fulfils the grammar."""
        return self._ended or (not self.failed and not self._inner.is_error() and self._inner.is_accepting())

    @property
    def stopped(self) -> bool:
        """Nothing may follow but the end."""
        return self._ended or (self.may_end and self._inner.is_stopped())

    @property
    def ended(self) -> bool:
        """The end token was taken."""
        return self._ended

    def rewind(self, num_tokens: int) -> None:
        """Give back the last tokens taken, the end token counted."""
        assert not self.failed and 0 <= num_tokens <= len(self._tokens) + self._ended, num_tokens
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            del self._tokens[-num_tokens:]
            rolled = self._inner.rollback(num_tokens)
            assert rolled, self._inner.get_error()

    def fork(self) -> "GrammarMatcher":
        """A second matcher at the same place."""
        assert not self.failed
        twin = GrammarMatcher(self.pattern)
        twin._origin = self._origin
        twin._inner = self._inner.deep_copy()
        twin._tokens = list(self._tokens)
        twin._renewed_at = self._renewed_at
        twin._ended = self._ended
        return twin

    def _write(self, mask_row: IntArray) -> None:
        vocabulary = self.pattern.vocabulary
        if vocabulary.exact:
            self._inner.unsafe_compute_mask_ptr(mask_row.ctypes.data, mask_row.nbytes)
        else:
            mask_row[:] = np.frombuffer(self._inner.compute_bitmask(), np.int32)[: vocabulary.num_words]

    def _finish(self, mask_row: IntArray) -> bool:
        """After a mask was written: renewed if the lexer was full, and only tokens that exist."""
        if self._ended:
            mask_row[:] = self.pattern.vocabulary.ends
            return True
        if not self.failed and self._inner.is_error() and self._renew():
            self._write(mask_row)
        if not self.failed and not self._inner.is_error():
            mask_row &= self.pattern.vocabulary.known
            if mask_row.any():
                return True
        if not self.failed and self._inner.is_error():
            self.trouble = self._inner.get_error()
        self.failed = True
        mask_row[:] = 0
        return False

    def _renew(self) -> bool:
        """Follow the same tokens with a lexer that others have not filled."""
        if len(self._tokens) - self._renewed_at < _TOKENS_BETWEEN_RENEWALS:
            return False
        self._renewed_at = len(self._tokens)
        self._origin = self.pattern.renew(self._origin)
        self._inner = self._origin.deep_copy()
        return not self._tokens or self._inner.consume_tokens(self._tokens)


class MaskPool:
    """Fills many rows at once, on threads of its own."""

    __slots__ = ("_executor",)

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)

    def fill(self, matchers: list[GrammarMatcher], mask_rows: IntArray) -> list[bool]:
        """`Matcher.fill` for each matcher into the row of its place: the same bits, the same answers.

        All matchers are of one vocabulary.
        """
        assert len(matchers) == len(mask_rows) and mask_rows.flags.c_contiguous and mask_rows.dtype == np.int32
        if not matchers or not matchers[0].pattern.vocabulary.exact:
            return [matcher.fill(row) for matcher, row in zip(matchers, mask_rows, strict=True)]
        open_ones = [(place, one) for place, one in enumerate(matchers) if not one.failed and not one.ended]
        if open_ones:
            work = [(one._inner, place) for place, one in open_ones]
            self._executor.unsafe_compute_mask_ptr(work, mask_rows.ctypes.data, mask_rows.strides[0], len(mask_rows))
        for _, one in open_ones:
            one.pattern.num_masks += 1
        return [one._finish(row) for one, row in zip(matchers, mask_rows, strict=True)]
