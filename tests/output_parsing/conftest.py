"""The default model's tokenizer, as quire and as llguidance know it."""

from pathlib import Path

import llguidance
import pytest
from gguf import GGUFReader

from quire.text.gguf_tokenizer import vocabulary_from_gguf
from quire.text.hf_tokenizer import TokenizerFiles
from quire.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_vocabulary(default_model_path: Path) -> TokenizerFiles:
    fields = GGUFReader(default_model_path).fields
    return vocabulary_from_gguf(
        {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    )


@pytest.fixture(scope="session")
def default_tokenizer(default_vocabulary: TokenizerFiles) -> Tokenizer:
    return Tokenizer(default_vocabulary)


@pytest.fixture(scope="session")
def guidance_tokenizer(default_vocabulary: TokenizerFiles) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(default_vocabulary.backend.to_str(), eos_token=default_vocabulary.eos_id)
