"""One real server for all tests of this folder, and the facts of the default model.

Its model has two of the default model's layers: what it says is nonsense, but always the same, and comes quickly. What
the default model itself says is tested in openai/test_default_model.py.
"""

from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from quire.core.sampling import SamplingParams
from quire.formats.open_checkpoint import open_checkpoint
from quire.server.context import ServedModel
from quire.text.tokenizer import Tokenizer
from tests.server.local_server import LocalServer
from tests.server.scripted_servers import scripted_here
from tests.server.server_process import Running

SMALL = ("--threads", "1", "--max-model-len", "1k", "--kv-cache-memory", "256MiB")


@pytest.fixture(scope="session")
def server(shallow_model_path: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as environment:  # the model where none is named, under its name
        environment.setenv("XDG_CACHE_HOME", str(shallow_model_path.parents[2]))
        running = Running(*SMALL)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def scripted_server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A scripted server for all tests of a module that do not change it; no thread of it runs beside other modules."""
    with scripted_here(tmp_path_factory.mktemp("script")) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: Running) -> str:
    """The address that the clients below have. A module with a server of its own replaces this fixture alone."""
    return server.url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def model(default_model_path: Path) -> ServedModel:
    """The facts of the default model, without its weights."""
    checkpoint = open_checkpoint(default_model_path)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    return ServedModel(
        name="org/model",
        aliases=("other",),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        defaults=SamplingParams(),
        max_model_len=1024,
        vocab_size=checkpoint.spec.vocab_size,
        created=1_700_000_000,
    )
