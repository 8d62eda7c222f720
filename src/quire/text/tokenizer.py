"""Text to token ids and back, over the `tokenizers` library. Knows nothing of files' formats or of sequences.

Safe to use from many threads: nothing changes after it was made, but for a cache whose entries never differ.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.core.errors import InvalidPrompt
from quire.text.gguf_tokenizer import vocabulary_from_gguf
from quire.text.hf_tokenizer import TokenizerFiles, vocabulary_from_folder

_MOST_IDS = 2**32  # that the library counts in
_FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """One model's text. `chat_template` and `named_tokens` are what `chat.render` asks for."""

    __slots__ = (
        "_backend",
        "_piece_bytes",
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
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_ids = vocabulary.end_ids
        self.chat_template = vocabulary.chat_template
        self.named_tokens = vocabulary.named_tokens
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_level = _decodes_bytes(self._backend.decoder)  # every piece is bytes, and decoding joins them

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        return cls(vocabulary_from_folder(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        return cls(vocabulary_from_gguf(metadata))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled in the text are read as such.

        Text from a chat template is complete: encode it with `add_special_tokens=False`.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            _check_text(text)
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of what a chat template wrote: the template already said where the text begins."""
        return self.encode(rendered, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens. Ids that are no tokens give nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def spell(self, token_id: int) -> str:
        """The text of one token in the middle of others: with the space that decoding takes from the first."""
        alone = self.decode([token_id], skip_special_tokens=False)
        if self.byte_level:
            return alone
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it: bytes mapped to letters, spaces to marks. None if the id is no token,
        be it beyond all that could be."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < _MOST_IDS else None

    def to_json(self) -> str:
        """The whole tokenizer as a tokenizer.json, for libraries that read those."""
        return self._backend.to_str()

    def piece_bytes(self, token_id: int) -> bytes:
        """What a token of a byte-level vocabulary stands for; nothing if the id is no token."""
        assert self.byte_level
        known = self._piece_bytes.get(token_id)
        if known is None:
            piece = self.id_to_piece(token_id) or ""
            known = self._piece_bytes[token_id] = _bytes_of(piece)
        return known

    def fallback_byte(self, token_id: int) -> bytes:
        """The byte that a token such as <0xE4> of a vocabulary of texts stands for; nothing for all others."""
        piece = self.id_to_piece(token_id) or ""
        return bytes.fromhex(piece[3:5]) if not self.byte_level and _FALLBACK_BYTE.fullmatch(piece) else b""


def _check_text(text: str) -> None:
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
    state = decoder.__getstate__()  # the library's only way to ask what a decoder is: its saved JSON
    assert isinstance(state, str | bytes), state
    described = json.loads(state)
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _bytes_of(piece: str) -> bytes:
    """Pieces outside the alphabet are added tokens, spelled as they are."""
    if all(letter in _BYTE_OF for letter in piece):
        return bytes(_BYTE_OF[letter] for letter in piece)
    return piece.encode("utf-8")
