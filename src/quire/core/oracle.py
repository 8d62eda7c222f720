"""The exact oracle's arithmetic: a "model" whose next token is an integer function of all tokens before it.

next = (Σ mix(token_i, i) + index) mod V, where index is the sequence's number in its request: siblings diverge at the
end of their prompt, so a sequence that reads a sibling's blocks is detected. Both oracles (the numpy runner and the
integer model behind the real runner) write (token, position) into real KV slots and sum what they read back through the
block table, so any misrouted, stale, double-owned or early-freed slot changes a token at once. `mix` and `deficit` use
only + * %, and so serve numpy and torch alike.

Candidates follow from Σ alone, since a beam may continue in any row of its search: the j-th most probable token is
(Σ + j) mod V with log-probability -j * (24 + (Σ mod 2**16) / 1024). The first has all but 2**-34 of the probability, so
a float32 softmax has nothing to round: scores and their sums are exact on every runner. The cost of leaving the most
probable path (24 to 88) changes with every token, so beams are forked and dropped.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

from quire.core.ids import FloatArray, IntArray
from quire.core.step import Candidates

Integers = TypeVar("Integers")  # int, a numpy int64 array or a torch int64 tensor

MODULUS = 1_000_003  # a prime; the products below stay inside 63 bits for ids and positions under 2**24
DEFICITS_PER_UNIT = 1024  # scores are whole numbers of 1 / 1024: a float32 holds them exactly down to -16,384


def mix(tokens: Integers, positions: Integers) -> Integers:
    """Binds a token to its position: swapping two tokens, or shifting one, changes the sum."""
    bound: Integers = (tokens + 1) * (positions + 17) % MODULUS  # type: ignore[operator, assignment]
    return (bound * (bound + 7919) + tokens * 31) % MODULUS  # type: ignore[operator, return-value]


def continuation(prompt: IntArray, vocab_size: int, index: int = 0) -> Iterator[int]:
    """The closed form: the endless continuation of a prompt in the sequence with this index."""
    total = 0
    position = 0
    for token in prompt.tolist():
        total += mix(token, position)
        position += 1
    while True:
        token = (total + index) % vocab_size
        yield token
        total += mix(token, position)
        position += 1


def planted_drafts(tokens: IntArray, vocab_size: int, index: int, count: int) -> list[int]:
    """Up to `count` drafts after these tokens: right, wrong, or right up to some place; which, the tokens decide."""
    chance = total(tokens) + 31 * len(tokens)
    proposed = list(islice(continuation(tokens, vocab_size, index), count - chance % 3 // 2))
    wrong_from = chance // 3 % (count + 3)  # mostly behind the last: most are right
    return [(token + (place == wrong_from)) % vocab_size for place, token in enumerate(proposed)]


def total(tokens: IntArray) -> int:
    """Σ over these tokens from position 0: what a row that computed them reads back."""
    wide = tokens.astype(np.int64)
    return int(mix(wide, np.arange(len(wide))).sum())


def pooled(tokens: IntArray) -> float:
    """The sum of Σ after each of these tokens, that is of all hidden states, rounded once to float32."""
    wide = tokens.astype(np.int64)
    return float(np.float32(mix(wide, np.arange(len(wide))).cumsum().sum()))


def deficit(totals: Integers, ranks: Integers) -> Integers:
    """How far the token of this rank is below the most probable one, in units of 1 / DEFICITS_PER_UNIT."""
    return ranks * (totals % 2**16 + 24 * DEFICITS_PER_UNIT)  # type: ignore[operator, return-value]


def candidates(total: int, vocab_size: int, count: int) -> Candidates:
    """The closed form: the most probable tokens after this sum, in descending order."""
    ranks = np.arange(min(count, vocab_size))
    falls = deficit(np.full_like(ranks, total), ranks)
    logprobs: FloatArray = (-falls).astype(np.float32) / np.float32(DEFICITS_PER_UNIT)
    return Candidates(((total + ranks) % vocab_size).astype(np.int32), logprobs)
