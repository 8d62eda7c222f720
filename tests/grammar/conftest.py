"""Vocabularies of both kinds, and a writer that takes random tokens under the mask."""

from pathlib import Path

import pytest

from quire.formats.open_checkpoint import open_checkpoint
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import GrammarVocabulary
from quire.text.tokenizer import Tokenizer

WIDER = 100  # logits beyond the tokenizer's ids, as models pad them


@pytest.fixture(scope="session")
def byte_level(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(default_model_path).metadata)


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece with bytes for what has no piece: the kind of Llama 2, Mistral and Gemma."""
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *'{}[]",:', "▁a", "ab", '":', '",', "true", "null", "é"]
    pieces = ["<unk>", "<s>", "</s>", "<end_of_turn>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.token_type": [2, 3, 3, 3, *[6] * 256, *[1] * len(words)],
            "tokenizer.ggml.scores": [0.0] * 260 + [-float(place) for place in range(len(words))],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )


@pytest.fixture(scope="session")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(byte_level, byte_level.end_ids, byte_level.vocab_size + WIDER))


@pytest.fixture(scope="session")
def fallback_compiler(byte_fallback: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(byte_fallback, byte_fallback.end_ids, byte_fallback.vocab_size))
