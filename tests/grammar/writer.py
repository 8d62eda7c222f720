"""Writes answers under a mask: random tokens, the end as soon as it is allowed, seeded."""

import numpy as np

from quire.core.grammar import Grammar
from quire.core.ids import IntArray
from quire.grammar.compiler import Compiler
from quire.grammar.matcher import Matcher

_CLOSERS = ('"', "}", "]", ",", ":", '":', '",', "0", "1")  # taken half the time, so that strings and numbers close


def allowed(mask_row: IntArray) -> IntArray:
    return np.flatnonzero(np.unpackbits(mask_row.view(np.uint8), bitorder="little")).astype(np.int32)


def next_tokens(matcher: Matcher, compiler: Compiler) -> IntArray:
    row = np.zeros(compiler.vocabulary.num_words, np.int32)
    assert matcher.fill(row)
    return allowed(row)


def write(compiler: Compiler, grammar: Grammar, seed: int, max_tokens: int = 1500) -> str | None:
    """A finished answer, or nothing if it became too long."""
    vocabulary = compiler.vocabulary
    closers = [token for text in _CLOSERS for token in vocabulary.tokens.tokenize_str(text)]
    chance = np.random.default_rng(seed)
    matcher = compiler.compile(grammar).matcher()
    taken: list[int] = []
    for _ in range(max_tokens):
        tokens = next_tokens(matcher, compiler)
        ends = [int(token) for token in tokens if int(token) in vocabulary.end_ids]
        assert bool(ends) == matcher.may_end
        if ends:
            assert matcher.advance(ends[0]) and matcher.stopped
            return vocabulary.tokens.decode_bytes(taken).decode("utf-8")
        closing = np.intersect1d(tokens, closers)
        choices = closing if len(closing) and chance.random() < 0.5 else tokens
        token = int(chance.choice(choices))
        assert matcher.advance(token), token
        taken.append(token)
    return None
