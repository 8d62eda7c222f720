"""Tokenizers for the tests of this room: the default model's, and one small enough to compute by hand."""

from pathlib import Path

import pytest

from quire.formats.open_checkpoint import open_checkpoint
from quire.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(default_model_path).metadata)


def piece_metadata(**changes: object) -> dict[str, object]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, the 256 bytes, a few letters and words."""
    words = ["▁", "h", "i", "a", "b", "c", "▁h", "hi", "▁hi", "ab", "▁ab", "bc"]
    scores = [-10.0, -11.0, -12.0, -13.0, -14.0, -15.0, -3.0, -2.0, -1.0, -4.0, -5.0, -0.5]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *words,
        ],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    return metadata


@pytest.fixture(scope="session")
def piece_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(piece_metadata())
