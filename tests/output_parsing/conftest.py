"""The default model's tokenizer, as quire and as llguidance know it."""

from pathlib import Path

import llguidance
import pytest

from quire.formats.open_checkpoint import open_checkpoint
from quire.text.gguf_tokenizer import vocabulary_from_gguf
from quire.text.hf_tokenizer import TokenizerFiles
from quire.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_vocabulary(default_model_path: Path) -> TokenizerFiles:
    return vocabulary_from_gguf(open_checkpoint(default_model_path).metadata)


@pytest.fixture(scope="session")
def default_tokenizer(default_vocabulary: TokenizerFiles) -> Tokenizer:
    return Tokenizer(default_vocabulary)


@pytest.fixture(scope="session")
def guidance_tokenizer(default_vocabulary: TokenizerFiles) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(default_vocabulary.backend.to_str(), eos_token=default_vocabulary.eos_id)
