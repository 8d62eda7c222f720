"""A model's vocabulary for masks: bytes of each id, end tokens, unknown ids. Does not depend on grammars."""

from typing import Protocol

import numpy as np
from llguidance import LLTokenizer

from quire.core.errors import UnsupportedModel, shown
from quire.core.ids import IntArray

_WORD_BITS = 32


class TokenSpelling(Protocol):
    """The part of a tokenizer that masks need; `Tokenizer` implements it."""

    @property
    def vocab_size(self) -> int: ...
    def id_to_piece(self, token_id: int) -> str | None: ...
    def to_json(self) -> str: ...


class GrammarVocabulary:
    """One per model. Immutable, shared by all threads.

    `width` is the width of the model's logits, which may differ from the tokenizer's vocabulary size.
    """

    __slots__ = ("end_ids", "ends", "known", "num_words", "partial", "tokens", "tokens_wide", "width")

    def __init__(self, spelling: TokenSpelling, end_ids: tuple[int, ...], width: int) -> None:
        ends = tuple(token_id for token_id in end_ids if token_id < width)
        if not ends:
            raise UnsupportedModel("This model names no end token, so that nothing could end a constrained answer.")
        self.end_ids = frozenset(ends)
        self.width = width
        self.num_words = -(-width // _WORD_BITS)  # 32-bit words in a mask
        self.tokens_wide = max(width, spelling.vocab_size)
        self.tokens = _compiled(spelling, self.tokens_wide, ends)
        known = [token_id for token_id in range(width) if spelling.id_to_piece(token_id) is not None]
        self.known = _bits(known, self.num_words)  # ids that have a token: the others are never allowed
        first = int(np.argmax(self.known != -1)) if (self.known != -1).any() else self.num_words
        self.partial = slice(first, self.num_words)  # words with unknown ids are among these: mostly the last few
        self.ends = _bits(list(ends), self.num_words)

    @property
    def canonical(self) -> bool:
        """Whether llguidance tokenizes as the tokenizer does."""
        return bool(self.tokens.is_canonical)

    @property
    def exact(self) -> bool:
        """Whether llguidance's masks have our width."""
        return self.tokens_wide == self.width


def _compiled(spelling: TokenSpelling, wide: int, ends: tuple[int, ...]) -> LLTokenizer:
    try:
        return LLTokenizer(spelling.to_json(), n_vocab=wide, eos_token=list(ends))
    except ValueError as error:
        raise UnsupportedModel(
            f"This model's tokenizer does not define the bytes of its tokens ({shown(str(error))}), so its "
            f"answers cannot be constrained. Omit response_format and structured_outputs."
        ) from error


def _bits(token_ids: list[int], num_words: int) -> IntArray:
    flags = np.zeros(num_words * _WORD_BITS, np.uint8)
    flags[token_ids] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
