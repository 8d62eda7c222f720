"""What was compiled is kept, within its bytes, whoever asks."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from quire.core.sampling import Grammar, GrammarKind
from quire.grammar import limits
from quire.grammar.compiler import GrammarCompiler


def regex(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, f"a{{{number}}}")


def small(compiler: GrammarCompiler, num_grammars: int) -> GrammarCompiler:
    one = GrammarCompiler(compiler.vocabulary).compile(regex(1)).cost_bytes
    return GrammarCompiler(compiler.vocabulary, cache_bytes=one * num_grammars + one // 2)


def test_the_same_grammar_is_compiled_once(fallback_compiler: GrammarCompiler) -> None:
    compiler = small(fallback_compiler, 4)
    assert compiler.compile(regex(1)) is compiler.compile(regex(1))
    assert compiler.compile(Grammar(GrammarKind.REGEX, '["a"]')) is not compiler.compile(
        Grammar(GrammarKind.CHOICE, '["a"]')
    )


def test_the_least_recently_used_is_given_up_first(fallback_compiler: GrammarCompiler) -> None:
    compiler = small(fallback_compiler, 3)
    kept = [compiler.compile(regex(number)) for number in (1, 2, 3)]
    assert compiler.compile(regex(1)) is kept[0]
    compiler.compile(regex(4))
    assert compiler.compile(regex(1)) is kept[0]
    assert compiler.compile(regex(2)) is not kept[1]


def test_any_number_of_grammars_stays_within_the_bytes(fallback_compiler: GrammarCompiler) -> None:
    compiler = small(fallback_compiler, 5)
    for number in range(1, 200):
        compiler.compile(regex(number))
        assert compiler.cached_bytes <= limits.CACHE_BYTES and len(compiler) <= 5


def test_a_grammar_is_charged_for_the_masks_it_filled(fallback_compiler: GrammarCompiler) -> None:
    compiler = small(fallback_compiler, 3)
    used = compiler.compile(regex(1))
    before = used.cost_bytes
    row = np.zeros(compiler.vocabulary.num_words, np.int32)
    for _ in range(5):
        used.matcher().fill_mask(row)
    assert used.cost_bytes == before + 5 * limits.BYTES_PER_MASK
    compiler.compile(regex(2))
    assert compiler.compile(regex(1)) is not used


def test_many_threads_get_grammars_that_work(fallback_compiler: GrammarCompiler) -> None:
    compiler = small(fallback_compiler, 3)

    def first_mask(number: int) -> bytes:
        row = np.zeros(compiler.vocabulary.num_words, np.int32)
        assert compiler.compile(regex(number % 5 + 1)).matcher().fill_mask(row)
        return row.tobytes()

    alone = [first_mask(number) for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(first_mask, range(40))) == alone
