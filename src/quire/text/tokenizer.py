"""Text to token ids and back, over the `tokenizers` library. Does not depend on file formats or sequences.

Thread-safe: immutable after construction, except for idempotent caches of single tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.core.errors import InvalidPrompt
from quire.text.gguf_tokenizer import vocabulary_from_gguf
from quire.text.hf_tokenizer import TokenizerFiles, vocabulary_from_folder

_MAX_IDS = 2**32  # the library's ids are unsigned 32-bit
_PART_CHARACTERS = 16_384  # encoded at once of a text that may be too long
_FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """One model's tokenizer. `chat_template` and `named_tokens` are arguments of `chat_template.render`."""

    __slots__ = (
        "_backend",
        "_piece_bytes",
        "_spellings",
        "bos_id",
        "byte_level",
        "chat_template",
        "end_ids",
        "eos_id",
        "named_tokens",
        "special_ids",
        "vocab_size",
    )

    def __init__(self, vocabulary: TokenizerFiles) -> None:
        self._backend = vocabulary.backend
        self._piece_bytes: dict[int, bytes] = {}
        self._spellings: dict[int, str] = {}
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_ids = vocabulary.end_ids
        self.chat_template = vocabulary.chat_template
        self.named_tokens = vocabulary.named_tokens
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_level = _decodes_bytes(self._backend.decoder)  # tokens are byte strings, which decoding joins

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        return cls(vocabulary_from_folder(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        return cls(vocabulary_from_gguf(metadata))

    def first_difference(self, other: "Tokenizer") -> int | None:
        """The first id that is another token there; None: there is none. Ids that only one of them has do not count."""
        mine, theirs = (
            {number: token for token, number in each._backend.get_vocab(with_added_tokens=True).items()}
            for each in (self, other)
        )
        return min((number for number in mine.keys() & theirs.keys() if mine[number] != theirs[number]), default=None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens that appear in the text are parsed as special tokens.

        Text from a chat template already has its special tokens: encode it with `add_special_tokens=False`.
        """
        check_text(text)
        # A batch of one: for a single text the library holds Python's lock, and all other threads wait.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text clearly has more tokens than this: its first parts, encoded one by one, have more than twice
        as many. The rest costs neither time nor memory."""
        count = 0
        for start in range(0, len(text), _PART_CHARACTERS):
            if count > 2 * num_tokens:
                return True
            count += len(self.encode(text[start : start + _PART_CHARACTERS], add_special_tokens=False))
        return count > 2 * num_tokens

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            check_text(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template, which already has its special tokens."""
        return self.encode(rendered, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens. Unknown ids give no text."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def spell(self, token_id: int) -> str:
        """The text of one token inside a sequence: with the leading space that decoding strips from the first."""
        known = self._spellings.get(token_id)
        if known is None:
            known = self.decode([token_id], skip_special_tokens=False)
            if not self.byte_level:
                known = self.decode([token_id, token_id], skip_special_tokens=False)[len(known) :]
            if token_id < self.vocab_size:  # unknown ids would fill it
                self._spellings[token_id] = known
        return known

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as stored in the vocabulary: bytes mapped to letters, spaces to markers. None for an unknown id,
        even one outside the library's range."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < _MAX_IDS else None

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json, for libraries that read that format."""
        return self._backend.to_str()

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; empty for an unknown id."""
        assert self.byte_level
        known = self._piece_bytes.get(token_id)
        if known is None:
            piece = self.id_to_piece(token_id) or ""
            known = self._piece_bytes[token_id] = _bytes_of(piece)
        return known

    def fallback_byte(self, token_id: int) -> bytes:
        """The byte of a byte-fallback token such as <0xE4>; empty for all other tokens."""
        piece = self.id_to_piece(token_id) or ""
        return bytes.fromhex(piece[3:5]) if not self.byte_level and _FALLBACK_BYTE.fullmatch(piece) else b""


def check_text(text: str) -> None:
    """Raise if a text is not valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(
            f"The text holds a lone surrogate (U+{ord(text[error.start]):04X}, character {error.start}), "
            f"half a character. Send valid Unicode.",
            param="prompt",
        ) from error


def _decodes_bytes(decoder: object) -> bool:
    if decoder is None:
        return False
    state = decoder.__getstate__()  # the library shows a decoder's type only in its serialized JSON
    assert isinstance(state, str | bytes), state
    described = json.loads(state)
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    return [step["type"] for step in steps] == ["ByteLevel"]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-to-unicode table: printable bytes map to themselves, the others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = byte_alphabet()


def _bytes_of(piece: str) -> bytes:
    """Pieces with other characters are added tokens, stored as plain text."""
    if all(letter in _BYTE_OF for letter in piece):
        return bytes(_BYTE_OF[letter] for letter in piece)
    return piece.encode("utf-8")
