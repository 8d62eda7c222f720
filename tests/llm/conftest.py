"""The tiny model as a folder, and an engine over it."""

from pathlib import Path

import pytest

from quire import LLM
from tests.llm.tiny import tiny_llama, write_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_llama())


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> LLM:
    """Shared: every test leaves the engine idle."""
    return LLM(str(tiny_folder), dtype="float32")
