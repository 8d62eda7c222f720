"""Grammar state of one sequence: masks the next token and consumes sampled ones. Does not depend on the compiler.

Fails closed. llguidance allows the end token after an internal error, which would look like a complete output; here
a failed matcher allows no token and reports the failure.
"""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher

from quire.core.ids import IntArray
from quire.grammar.vocabulary import GrammarVocabulary

_TOKENS_BETWEEN_RENEWALS = 256  # a grammar that fills a new lexer sooner is itself too large
_MAX_FORCED_BYTES = 64  # of forced text that is tokenized at a time: more than a step can draft


_NOTHING: IntArray = np.empty(0, dtype=np.int32)


class MatcherSource(Protocol):
    """What a matcher is built from; `CompiledGrammar` implements it."""

    num_masks: int
    jumps: bool  # whether its matchers look for forced text

    @property
    def vocabulary(self) -> GrammarVocabulary: ...
    @property
    def prototype(self) -> LLMatcher: ...
    def renew(self, full: LLMatcher) -> LLMatcher: ...


class GrammarMatcher:
    """One sequence's state in its grammar: a function of the consumed tokens. Not thread-safe."""

    __slots__ = (
        "_ended", "_forced", "_inner", "_origin", "_renewed_at", "_tokens", "failed", "pattern", "trouble", "violated",
    )  # fmt: skip

    def __init__(self, pattern: MatcherSource) -> None:
        self.pattern = pattern
        self._origin = pattern.prototype
        self._inner = self._origin.deep_copy()
        self._tokens: list[int] = []  # without the end token, which is never passed to llguidance
        self._renewed_at = -_TOKENS_BETWEEN_RENEWALS
        self._forced = b""  # known text that must follow
        self._ended = False
        self.failed = False  # no token is allowed any more: the sequence must end with an error
        self.violated = False  # it failed because a token was consumed that no mask had allowed
        self.trouble = ""  # llguidance's error message of a failed mask; empty if the mask was merely empty

    def fill_mask(self, mask_row: IntArray) -> bool:
        """Set the bits of the allowed next tokens. False: it failed, and no bit is set."""
        vocabulary = self.pattern.vocabulary
        assert mask_row.shape == (vocabulary.num_words,) and mask_row.dtype == np.int32, mask_row.shape
        assert mask_row.flags.c_contiguous
        if not self.failed and not self._ended:
            self._write(mask_row)
            self.pattern.num_masks += 1
        return self._finish(mask_row)

    def advance(self, token: int) -> bool:
        """Consume a sampled token. False: it was not allowed, or the grammar failed; no token may follow."""
        if not self._is_text(token):
            return self._end()
        return self._note(token, self._inner.consume_token(token))

    def _is_text(self, token: int) -> bool:
        """Whether llguidance consumes the token: it goes on, and this does not end it."""
        ends = token in self.pattern.vocabulary.end_ids and self.may_end
        return not self.failed and not self._ended and not ends

    def _end(self) -> bool:
        """Consume what is not text; False if it had ended or failed before."""
        goes_on = not self.failed and not self._ended
        self._ended = self._ended or goes_on
        return goes_on

    def _note(self, token: int, taken: bool) -> bool:
        """A token was passed to llguidance, which took it or not. Where its lexer was full it is passed again."""
        if taken or (self._renew() and self._inner.consume_token(token)):
            self._tokens.append(token)
            if self._forced:
                said = self.pattern.vocabulary.tokens.decode_bytes([token])
                self._forced = self._forced[len(said) :] if self._forced.startswith(said) else b""
            return True
        self.failed = True
        self.trouble = self._inner.get_error()
        self.violated = not self._allows(token)
        return False

    @property
    def may_end(self) -> bool:
        """The text so far matches the grammar."""
        return self._ended or (not self.failed and not self._inner.is_error() and self._inner.is_accepting())

    @property
    def stopped(self) -> bool:
        """Only the end token may follow."""
        return self._ended or (self._inner.is_stopped() and self.may_end)

    @property
    def ended(self) -> bool:
        """The end token was consumed."""
        return self._ended

    @property
    def num_tokens(self) -> int:
        """Tokens consumed, without the end token."""
        return len(self._tokens)

    def forced_tokens(self) -> IntArray:
        """The text that must follow as the tokenizer writes it, from its beginning, but for the last tokens, which may
        be others where more text follows. Any other tokens of the same text are allowed, too."""
        vocabulary = self.pattern.vocabulary
        if self.failed or self._ended or not vocabulary.canonical or not self.pattern.jumps:
            return _NOTHING
        if not self._forced:
            self._forced = self._inner.compute_ff_bytes()
        if not self._forced:
            return _NOTHING
        tokens, _ = vocabulary.tokens.tokenize_partial(self._forced[:_MAX_FORCED_BYTES])
        return np.array(tokens, dtype=np.int32)

    def rewind(self, num_tokens: int) -> None:
        """Roll back the last tokens, the end token included."""
        assert not self.failed and 0 <= num_tokens <= len(self._tokens) + self._ended, num_tokens
        self._forced = b""
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            del self._tokens[-num_tokens:]
            rolled = self._inner.rollback(num_tokens)
            assert rolled, self._inner.get_error()

    def restore(self) -> None:
        """Forget a call of llguidance that was interrupted: the state after the tokens consumed before it."""
        self._inner = self._origin.deep_copy()
        if self._tokens and not self._inner.consume_tokens(self._tokens):
            self.failed = True

    def fork(self) -> "GrammarMatcher":
        """A second matcher in the same state."""
        assert not self.failed
        twin = GrammarMatcher(self.pattern)
        twin._origin = self._origin
        twin._inner = self._inner.deep_copy()
        twin._tokens = list(self._tokens)
        twin._renewed_at = self._renewed_at
        twin._forced = self._forced
        twin._ended = self._ended
        return twin

    def _write(self, mask_row: IntArray) -> None:
        vocabulary = self.pattern.vocabulary
        if vocabulary.exact:
            self._inner.unsafe_compute_mask_ptr(mask_row.ctypes.data, mask_row.nbytes)
        else:
            mask_row[:] = np.frombuffer(self._inner.compute_bitmask(), np.int32)[: vocabulary.num_words]

    def _finish(self, mask_row: IntArray) -> bool:
        """After a mask was written: retry if the lexer was full, and clear the bits of unknown ids."""
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

    def _allows(self, token: int) -> bool:
        """Whether the last mask allowed a token, or would have exceeded a limit. Slow: replays the output."""
        replayed = self._origin.deep_copy()
        if self._tokens and not replayed.consume_tokens(self._tokens):
            return True
        mask = np.frombuffer(replayed.compute_bitmask(), np.int32)
        return replayed.is_error() or bool(mask[token >> 5] >> (token & 31) & 1)

    def _renew(self) -> bool:
        """Replay the same tokens with a new lexer."""
        if len(self._tokens) - self._renewed_at < _TOKENS_BETWEEN_RENEWALS:
            return False
        self._renewed_at = len(self._tokens)
        self._origin = self.pattern.renew(self._origin)
        self._inner = self._origin.deep_copy()
        return not self._tokens or self._inner.consume_tokens(self._tokens)


_IN_THREADS_S = 2e-3  # masks that take longer one after the other are computed in threads
_CALLS_IN_THREADS = 64  # until they are tried one after the other again
_SOME_WORDS = 64  # every so many words of a mask are looked at first


class MatcherPool:
    """Many matchers of one vocabulary at once: one after the other, or in threads of llguidance where that takes long.

    Usual masks take some microseconds each, and threads longer than that to wake: 64 of a JSON schema took 0.43 ms by
    one thread, 0.56 by eight. An error may leave any matcher halfway: see `GrammarMatcher.restore`.
    """

    __slots__ = ("_clock", "_executor", "_num_in_threads", "_num_threads")

    def __init__(self, num_threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._num_threads = num_threads
        self._clock = clock
        self._executor: LLExecutor | None = None
        self._num_in_threads = 0  # calls that use threads before one does without

    def fill(self, matchers: list[GrammarMatcher], mask_rows: IntArray) -> list[bool]:
        """`GrammarMatcher.fill_mask` for each matcher into the mask row of its index: same bits, same return values."""
        assert len(matchers) == len(mask_rows) and mask_rows.flags.c_contiguous and mask_rows.dtype == np.int32
        if not matchers or not matchers[0].pattern.vocabulary.exact:
            return [matcher.fill_mask(row) for matcher, row in zip(matchers, mask_rows, strict=True)]
        open_ones = [(one._inner, place) for place, one in enumerate(matchers) if not one.failed and not one.ended]
        self._compute(open_ones, mask_rows)
        vocabulary = matchers[0].pattern.vocabulary
        mask_rows[:, vocabulary.partial] &= vocabulary.known[vocabulary.partial]
        some: list[bool] = (np.bitwise_or.reduce(mask_rows[:, ::_SOME_WORDS], axis=1) != 0).tolist()
        filled = [found or bool(mask_rows[place].any()) for place, found in enumerate(some)]
        for place, one in enumerate(matchers):
            if one.failed or one.ended or not filled[place] or one._inner.is_error():
                filled[place] = one._finish(mask_rows[place])
            one.pattern.num_masks += 1
        return filled

    def _compute(self, open_ones: list[tuple[LLMatcher, int]], mask_rows: IntArray) -> None:
        at, stride = mask_rows.ctypes.data, mask_rows.strides[0]
        if self._num_in_threads:
            self._num_in_threads -= 1
            self._threads().unsafe_compute_mask_ptr(open_ones, at, stride, len(mask_rows))
            return
        begun_s = self._clock()
        for inner, place in open_ones:
            inner.unsafe_compute_mask_ptr(at + place * stride, stride)
        if self._num_threads > 1 and self._clock() - begun_s > _IN_THREADS_S:
            self._num_in_threads = _CALLS_IN_THREADS

    def advance(self, matchers: list[GrammarMatcher], tokens: list[int]) -> list[bool]:
        """`GrammarMatcher.advance` of each matcher with the token of its index."""
        if not self._num_in_threads:
            return [one.advance(token) for one, token in zip(matchers, tokens, strict=True)]
        text = [place for place, one in enumerate(matchers) if one._is_text(tokens[place])]
        consumed = self._threads().consume_token_par([(matchers[place]._inner, tokens[place]) for place in text])
        took = dict(zip(text, consumed, strict=True))
        return [
            one._note(token, took[place]) if place in took else one._end()
            for place, (one, token) in enumerate(zip(matchers, tokens, strict=True))
        ]

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        return self._executor
