"""Token ids to text, as they come: never half a character, never more work than the new tokens ask for.

The pieces joined are what `Tokenizer.decode` gives for all tokens at once. Where decoding depends on what
stands before (SentencePiece takes away the space that begins a text), it is the text that follows the prompt.
"""

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from quire.text.tokenizer import Tokenizer

_FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8  # tokens that one character may take, with room: UTF-8 has at most four bytes


class Detokenizer:
    """The text of one sequence. `prompt_ids` stand before it and are not repeated."""

    __slots__ = ("_skipped", "_way")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._way: _Way = _JoinedBytes(tokenizer)
        if not tokenizer.byte_level:
            self._way = _SlidingWindow(tokenizer, [token for token in prompt_ids if token not in self._skipped])

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens settle: what no later token can change."""
        return self._way.push([token for token in token_ids if token not in self._skipped])

    def finish(self) -> str:
        """The text of what was held back; an unfinished character becomes U+FFFD."""
        return self._way.finish()


class _Way(Protocol):
    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class _JoinedBytes:
    """Byte-level vocabularies: every token is bytes, and the text is their UTF-8."""

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: list[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.piece_bytes, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _SlidingWindow:
    """Every other vocabulary: decode the last settled tokens with the new ones, take away the settled text.

    A run of fallback bytes is decoded as a whole (one bad byte spoils its run), so it is held until it ends.
    """

    __slots__ = ("_context", "_context_text", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        end = len(prompt_ids)
        while end and self._is_fallback_byte(prompt_ids[end - 1]):  # a run of bytes is not continued: it is new
            end -= 1
        self._context = prompt_ids[max(end - _LONGEST_CHARACTER, 0) : end]
        self._context_text = self._decode(self._context)

    def push(self, token_ids: list[int]) -> str:
        self._pending += [token for token in token_ids if self._tokenizer.id_to_piece(token) is not None]
        if not self._pending or self._is_fallback_byte(self._pending[-1]):
            return ""
        return self._settle(final=False)

    def finish(self) -> str:
        return self._settle(final=True) if self._pending else ""

    def _settle(self, final: bool) -> str:
        whole = self._decode(self._context + self._pending)
        unfinished = whole.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER
        text = whole[len(self._context_text) :]
        if unfinished and not final:
            return ""
        self._context = self._pending
        self._context_text = self._decode(self._context)
        self._pending = []
        return text

    def _is_fallback_byte(self, token_id: int) -> bool:
        return _FALLBACK_BYTE.fullmatch(self._tokenizer.id_to_piece(token_id) or "") is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
