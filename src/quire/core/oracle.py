"""The exact oracle's arithmetic: a "model" whose next token is an integer function of all tokens before it.

next = Σ mix(token_i, i) mod V. Both oracles (the numpy runner and the integer model behind the real runner) put
(token, position) into real KV slots and sum what they read back through the block table, so that any misrouted,
stale, double-owned or early-freed slot changes a token at once. `mix` uses only + * %, and so serves numpy and
torch alike.
"""

from collections.abc import Iterator
from typing import TypeVar

from quire.core.ids import IntArray

Integers = TypeVar("Integers")  # int, a numpy int64 array or a torch int64 tensor

MODULUS = 1_000_003  # a prime; the products below stay inside 63 bits for ids and positions under 2**24


def mix(tokens: Integers, positions: Integers) -> Integers:
    """Ties a token to its place: swapping two tokens, or shifting one, changes the sum."""
    bound: Integers = (tokens + 1) * (positions + 17) % MODULUS  # type: ignore[operator, assignment]
    return (bound * (bound + 7919) + tokens * 31) % MODULUS  # type: ignore[operator, return-value]


def continuation(prompt: IntArray, vocab_size: int) -> Iterator[int]:
    """The closed form: the tokens that follow a prompt, for ever."""
    total = 0
    position = 0
    for token in prompt.tolist():
        total += mix(token, position)
        position += 1
    while True:
        token = total % vocab_size
        yield token
        total += mix(token, position)
        position += 1
