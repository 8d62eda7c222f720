"""Incremental detokenization: whole characters only, at a cost proportional to the new tokens.

The concatenated output equals `Tokenizer.decode` of all tokens, except that an incomplete UTF-8 character at the end
is dropped. Decoding can depend on the tokens before (SentencePiece strips a leading space; a character may start in
the prompt), so the prompt's last tokens serve as context.

`Detokenizer` decodes one sequence. `SequenceText` adds stop strings to it.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from quire.text.stop_strings import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8  # tokens per character, upper bound with a margin: UTF-8 has at most four bytes
_LONGEST_BEGINNING = 3  # bytes of an incomplete character


class Detokenizer:
    """The text of one sequence. `prompt_ids` are context only and are not emitted."""

    __slots__ = ("_skipped", "_way")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._way: _TokenDecoder = (
            _JoinedBytes(tokenizer, prompt_ids)
            if tokenizer.byte_level
            else _SlidingWindow(tokenizer, prompt_ids, self._skipped)
        )

    @property
    def place(self) -> int:
        """Character offset of the next token: all complete characters, emitted or held back."""
        return self._way.place

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that is final: no later token can change it."""
        return self._way.push([token for token in token_ids if token not in self._skipped])

    def finish(self) -> str:
        """The text held back so far, without an incomplete character at its end."""
        return self._way.finish()


def decode_whole(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of these tokens, with special tokens, without an incomplete character at its end."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    return detokenizer.push(token_ids) + detokenizer.finish()


class _TokenDecoder(Protocol):
    place: int

    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class _JoinedBytes:
    """For byte-level vocabularies: every token is a byte string, and the text is their UTF-8."""

    __slots__ = ("_decoder", "_tokenizer", "place")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = _utf8_decoder()
        self._decoder.decode(_last_bytes(map(tokenizer.piece_bytes, reversed(prompt_ids))))
        self.place = 0

    def push(self, token_ids: list[int]) -> str:
        text = self._decoder.decode(b"".join(map(self._tokenizer.piece_bytes, token_ids)))
        self.place += len(text)
        return text

    def finish(self) -> str:
        return ""


class _SlidingWindow:
    """For other vocabularies: decodes the last emitted tokens with the new ones and strips the emitted text.

    A run of byte-fallback tokens is decoded as a unit (one invalid byte changes the whole run), so it is held back
    until it ends.
    """

    __slots__ = ("_context", "_context_text", "_num_said", "_pending", "_run", "_tokenizer", "place")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._pending = list(prompt_ids[len(prompt_ids) - self._num_begun(prompt_ids) :])
        known = [token for token in prompt_ids if token not in skipped]
        end = len(known)
        while end and self._byte(known[end - 1]):  # of a trailing run of bytes, only an incomplete character is kept
            end -= 1
        self._context = known[max(end - _LONGEST_CHARACTER, 0) : end]
        self._context_text = self._decode(self._context)
        self._run = _utf8_decoder()
        self._run.decode(b"".join(map(self._byte, self._pending)))
        self._num_said = self.place = 0

    def push(self, token_ids: list[int]) -> str:
        self._pending += [token for token in token_ids if self._tokenizer.id_to_piece(token) is not None]
        if not self._pending:
            return ""
        if self._byte(self._pending[-1]):  # its characters count before they are emitted; usually the run is valid
            self.place += len(self._run.decode(b"".join(map(self._byte, token_ids))))
            return ""
        return self._settle(final=False)

    def finish(self) -> str:
        del self._pending[len(self._pending) - self._num_begun(self._pending) :]
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
        self._run.reset()
        self._num_said += len(text)
        self.place = self._num_said
        return text

    def _num_begun(self, token_ids: Sequence[int]) -> int:
        """How many tokens at the end form an incomplete character: byte-fallback tokens, one byte each."""
        decoder = _utf8_decoder()
        for token in token_ids[-_LONGEST_BEGINNING:]:
            byte = self._byte(token)
            decoder.decode(byte, final=not byte)
        return len(decoder.getstate()[0])

    def _byte(self, token_id: int) -> bytes:
        return self._tokenizer.fallback_byte(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _last_bytes(pieces: Iterable[bytes]) -> bytes:
    """The last bytes of the pieces (given last first): at least as many as an incomplete character can have."""
    last = b""
    for piece in pieces:
        last = piece + last
        if len(last) >= _LONGEST_BEGINNING:
            break
    return last


class TextDelta(NamedTuple):
    """New final text; the stop string that matched, if any; and the number of tokens pushed so far."""

    text: str
    stop: str | None
    num_tokens: int


class SequenceText:
    """Push tokens, get text. After a stop string further tokens are ignored."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens", "_pieces", "_stop")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: StopStrings,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        include_stop_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._matcher = StopMatcher(stop_strings, include_stop_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._stop: str | None = None

    @property
    def text(self) -> str:
        """All text emitted so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        released = []
        for token_id in token_ids:
            if self._stop is not None:
                break
            self._num_tokens += 1
            released.append(self._advance(self._detokenizer.push((token_id,))))
        return TextDelta("".join(released), self._stop, self._num_tokens)

    def finish(self) -> TextDelta:
        """Emit the text held back; call it after the last token. The text may still complete a stop string."""
        rest = ""
        if self._stop is None:
            rest = self._advance(self._detokenizer.finish())
        if self._stop is None:
            held = self._matcher.finish()
            self._pieces.append(held)
            rest += held
        return TextDelta(rest, self._stop, self._num_tokens)

    def _advance(self, text: str) -> str:
        if not text:
            return ""
        released = self._matcher.push(text, armed=self._num_tokens >= self._min_tokens)
        self._stop = released.stop
        self._pieces.append(released.text)
        return released.text
