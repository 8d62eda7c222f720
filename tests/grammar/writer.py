"""Writes answers under a mask: random tokens, the end as soon as it is allowed, seeded."""

import numpy as np
from numpy.typing import NDArray

from quire.core.sampling import Grammar
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import GrammarMatcher

_CLOSERS = ('"', "}", "]", ",", ":", '":', '",', "0", "1")  # taken half the time, so that strings and numbers close


def next_tokens(matcher: GrammarMatcher, compiler: GrammarCompiler) -> list[int]:
    return [int(token) for token in np.flatnonzero(_flags(matcher, compiler))]


def write(compiler: GrammarCompiler, grammar: Grammar, seed: int, max_tokens: int = 400) -> str | None:
    """A finished answer, or nothing if it became too long."""
    vocabulary = compiler.vocabulary
    closers = sorted({token for text in _CLOSERS for token in vocabulary.tokens.tokenize_str(text)})
    chance = np.random.default_rng(seed)
    matcher = compiler.compile(grammar).matcher()
    taken: list[int] = []
    for _ in range(max_tokens):
        flags = _flags(matcher, compiler)
        ends = [end for end in vocabulary.end_ids if flags[end]]
        assert bool(ends) == matcher.may_end
        if ends:
            assert matcher.advance(ends[0]) and matcher.stopped
            return vocabulary.tokens.decode_bytes(taken).decode("utf-8")
        closing = [token for token in closers if flags[token]]
        token = int(chance.choice(closing if closing and chance.random() < 0.5 else np.flatnonzero(flags)))
        assert matcher.advance(token), token
        taken.append(token)
    return None


def _flags(matcher: GrammarMatcher, compiler: GrammarCompiler) -> NDArray[np.uint8]:
    row = np.zeros(compiler.vocabulary.num_words, np.int32)
    assert matcher.fill_mask(row)
    return np.unpackbits(row.view(np.uint8), bitorder="little")
