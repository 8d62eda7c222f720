"""The tiny model as a folder, and an engine over it."""

from pathlib import Path

import pytest

from quire import LLM
from tests.llm.tiny import tiny_llama, write_model

SMALL_SETTINGS = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 32}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_llama())


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> LLM:
    """Shared: every test leaves the engine idle."""
    return LLM(str(tiny_folder), dtype="float32")


@pytest.fixture(scope="module")
def one(tiny_folder: Path) -> LLM:
    """One process with all memory that it needs: what a model that is divided among processes must answer."""
    return LLM(str(tiny_folder), kv_cache_memory=4 << 20, **SMALL_SETTINGS)
