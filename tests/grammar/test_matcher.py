"""A matcher is a function of its tokens, and fails closed."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import UnsupportedModel
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import GrammarMatcher, MatcherPool
from quire.grammar.vocabulary import GrammarVocabulary
from quire.text.tokenizer import Tokenizer
from tests.grammar.writer import next_tokens

OBJECT = Grammar(GrammarKind.JSON_OBJECT, "")
FULL = Grammar(GrammarKind.REGEX, "(.*a.{60}b.{60}){50}")  # each mask adds hundreds of states to its lexer


def walk(compiler: GrammarCompiler, matcher: GrammarMatcher, num_tokens: int, seed: int) -> int:
    """Take random tokens, but the end; how many were taken before it failed or stopped."""
    chance = np.random.default_rng(seed)
    row = np.zeros(compiler.vocabulary.num_words, np.int32)
    for count in range(num_tokens):
        if not matcher.fill_mask(row):
            return count
        row &= ~compiler.vocabulary.ends
        tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(tokens) or not matcher.advance(int(chance.choice(tokens))):
            return count
    return num_tokens


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), taken=st.integers(0, 12), given_back=st.integers(0, 12))
def test_rewinding_is_never_having_taken(compiler: GrammarCompiler, seed: int, taken: int, given_back: int) -> None:
    compiled = compiler.compile(OBJECT)
    matcher = compiled.matcher()
    walk(compiler, matcher, taken, seed)
    tokens = list(matcher._tokens)
    given_back = min(given_back, len(tokens))
    matcher.rewind(given_back)
    fresh = compiled.matcher()
    assert all(fresh.advance(token) for token in tokens[: len(tokens) - given_back])
    assert next_tokens(matcher, compiler) == next_tokens(fresh, compiler)
    assert (matcher.may_end, matcher.stopped) == (fresh.may_end, fresh.stopped)


FIELDS = Grammar(GrammarKind.REGEX, "(red|blue) favourite_colour and postal_code: [0-9]+")


def test_forced_tokens_are_the_text_that_must_follow_as_it_is_tokenized(compiler: GrammarCompiler) -> None:
    """Whatever tokens write it: after each, the rest of the text is forced. Its last tokens are left out, since they
    may merge with what follows."""
    tokens, text = compiler.vocabulary.tokens, " favourite_colour and postal_code: "
    for spelled in (tokens.tokenize_str(text), [token for letter in text for token in tokens.tokenize_str(letter)]):
        matcher = compiler.compile(FIELDS).matcher()
        assert not len(matcher.forced_tokens()), "two texts may follow"
        assert matcher.advance(tokens.tokenize_str("blue")[0])
        rest = text
        for token in spelled:
            forced = matcher.forced_tokens().tolist()
            said = tokens.decode_bytes(forced).decode()
            assert rest.startswith(said) and forced == tokens.tokenize_str(rest)[: len(forced)], rest
            assert len(rest) - len(said) <= len(": ") or len(said) > 20, (rest, said)
            assert matcher.fork().forced_tokens().tolist() == forced
            assert matcher.advance(token)
            rest = rest[len(tokens.decode_bytes([token]).decode()) :]
        assert not rest and not len(matcher.forced_tokens())
        matcher.rewind(len(spelled))
        whole = matcher.forced_tokens().tolist()
        assert matcher.advance(spelled[0])
        matcher.rewind(1)
        assert matcher.forced_tokens().tolist() == whole
        assert tokens.decode_bytes(matcher.forced_tokens().tolist()).decode().startswith(" favourite")


def test_the_end_is_given_back_like_any_token(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.CHOICE, '["yes", "yes, but"]')).matcher()
    (end,) = compiler.vocabulary.end_ids
    assert not compiler.compile(OBJECT).matcher().advance(end)
    for token in [*compiler.vocabulary.tokens.tokenize_str("yes"), end]:
        assert matcher.advance(token)
    assert matcher.ended and matcher.stopped and next_tokens(matcher, compiler) == [end]
    matcher.rewind(1)
    assert not matcher.ended and matcher.may_end and not matcher.stopped
    assert all(matcher.advance(token) for token in compiler.vocabulary.tokens.tokenize_str(", but"))


def test_forks_go_their_own_ways(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "(ax|by)c")).matcher()
    twin = matcher.fork()
    a, b = (compiler.vocabulary.tokens.tokenize_str(letter)[0] for letter in "ab")
    assert matcher.advance(a) and twin.advance(b)
    assert next_tokens(matcher, compiler) != next_tokens(twin, compiler)


def test_a_token_that_is_not_allowed_fails_and_leaves_nothing_allowed(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(OBJECT).matcher()
    (wrong,) = compiler.vocabulary.tokens.tokenize_str("x")
    row = np.full(compiler.vocabulary.num_words, -1, np.int32)
    assert not matcher.advance(wrong) and matcher.failed and not matcher.may_end
    assert not matcher.fill_mask(row) and not row.any()
    assert not matcher.advance(next(iter(compiler.vocabulary.end_ids)))


def test_a_lexer_that_others_filled_is_renewed(byte_level: Tokenizer) -> None:
    """llguidance's copies share a lexer; alone, each of these answers is short enough to be followed."""
    compiler = GrammarCompiler(GrammarVocabulary(byte_level, byte_level.end_ids, byte_level.vocab_size))
    compiled = compiler.compile(FULL)
    first_prototype = compiled.prototype
    lengths = [walk(compiler, compiled.matcher(), 40, seed) for seed in range(6)]
    assert lengths == [40] * 6
    assert compiled.prototype is not first_prototype


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_rows_at_once_are_the_rows_one_by_one(compiler: GrammarCompiler, num_threads: int) -> None:
    compiled = compiler.compile(OBJECT)
    matchers = [compiled.matcher() for _ in range(6)]
    for place, matcher in enumerate(matchers):
        walk(compiler, matcher, place, place)
    matchers[4].advance(compiler.vocabulary.width - 1)
    expected = np.zeros((6, compiler.vocabulary.num_words), np.int32)
    answers = [matcher.fork().fill_mask(row) for matcher, row in zip(matchers[:4], expected[:4], strict=True)]
    answers += [matcher.fill_mask(row) for matcher, row in zip(matchers[4:], expected[4:], strict=True)]
    rows = np.full_like(expected, -1)
    pool = MatcherPool(num_threads, clock=map(float, itertools.count()).__next__)
    for _ in range(2):  # one after the other, which takes long by this clock, then in threads, if there are any
        rows[:] = -1
        assert pool.fill(matchers, rows) == answers and not answers[4]
        assert (rows == expected).all()
    assert (pool._executor is not None) == (num_threads > 1)
    assert pool.fill([], rows[:0]) == []


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_tokens_at_once_are_the_tokens_one_by_one(
    compiler: GrammarCompiler, byte_level: Tokenizer, num_threads: int
) -> None:
    """Text, an end token where the text may end, tokens that are not allowed, and matchers that ended or failed."""
    end = next(iter(compiler.vocabulary.end_ids))
    compiled = compiler.compile(Grammar(GrammarKind.REGEX, "[ab]*"))
    pool, seen = MatcherPool(num_threads, clock=map(float, itertools.count()).__next__), []
    together = [compiled.matcher() for _ in range(5)]
    rows = np.zeros((5, compiler.vocabulary.num_words), np.int32)
    assert all(pool.fill(together, rows)), "takes long by this clock: what follows is in threads, if there are any"
    alone = [compiled.matcher() for _ in range(5)]
    (letter,) = byte_level.encode("a")
    for tokens in ([letter] * 5, [letter, end, compiler.vocabulary.width - 1, letter, end], [letter] * 5):
        right = [matcher.advance(token) for matcher, token in zip(alone, tokens, strict=True)]
        assert pool.advance(together, tokens) == right
        seen += right
        for ours, theirs in zip(together, alone, strict=True):
            assert (ours.failed, ours.violated, ours.ended, ours.stopped, ours._tokens) == (
                theirs.failed, theirs.violated, theirs.ended, theirs.stopped, theirs._tokens
            )  # fmt: skip
    assert not all(seen) and any(seen)
    assert (pool._executor is not None) == (num_threads > 1)
    together[0].restore()
    row = np.zeros((2, compiler.vocabulary.num_words), np.int32)
    assert together[0].fill_mask(row[0]) == alone[0].fill_mask(row[1]) and (row[0] == row[1]).all()


def test_ids_that_are_no_tokens_are_never_allowed(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    padded = Grammar(GrammarKind.LARK, f'start: <[{byte_level.vocab_size + 3}]> | "a"')
    tokens = next_tokens(compiler.compile(padded).matcher(), compiler)
    assert tokens and max(tokens) < byte_level.vocab_size
    anything = next_tokens(compiler.compile(Grammar(GrammarKind.REGEX, "(?s:.)*")).matcher(), compiler)
    assert max(anything) < byte_level.vocab_size
    assert byte_level.special_ids & set(anything) == compiler.vocabulary.end_ids


def test_logits_may_be_narrower_than_the_tokenizer(
    byte_fallback: Tokenizer, fallback_compiler: GrammarCompiler
) -> None:
    """As in Gemma 3, whose tokenizer has one token more than the text model."""
    width = byte_fallback.vocab_size - 5
    narrow = GrammarCompiler(GrammarVocabulary(byte_fallback, byte_fallback.end_ids, width))
    wide = next_tokens(fallback_compiler.compile(OBJECT).matcher(), fallback_compiler)
    assert next_tokens(narrow.compile(OBJECT).matcher(), narrow) == [token for token in wide if token < width]
    rows = np.zeros((1, narrow.vocabulary.num_words), np.int32)
    assert MatcherPool(1).fill([narrow.compile(OBJECT).matcher()], rows) == [True] and rows.any()


def test_every_end_is_an_end(byte_fallback: Tokenizer, fallback_compiler: GrammarCompiler) -> None:
    assert fallback_compiler.vocabulary.end_ids == {2, 3}
    letter = byte_fallback.token_to_id("a")
    assert letter is not None
    for end in (2, 3):
        matcher = fallback_compiler.compile(Grammar(GrammarKind.CHOICE, '["a"]')).matcher()
        assert matcher.advance(letter)
        assert next_tokens(matcher, fallback_compiler) == [2, 3] and matcher.advance(end)


def test_bytes_of_tokens_are_the_texts_they_decode_to(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    for token in range(17, byte_level.vocab_size, 97):
        assert compiler.vocabulary.tokens.decode_bytes([token]) == byte_level.piece_bytes(token)


def test_a_model_without_an_end_is_refused(byte_fallback: Tokenizer) -> None:
    with pytest.raises(UnsupportedModel):
        GrammarVocabulary(byte_fallback, (), byte_fallback.vocab_size)
