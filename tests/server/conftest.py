"""One real server for all tests of this folder, with the default model, as a user would start it; and its facts."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest

from quire.core.sampling import SamplingParams
from quire.formats.opening import open_checkpoint
from quire.server.served import Served
from quire.text.tokenizer import Tokenizer

QUIRE = str(Path(sys.executable).with_name("quire"))
SMALL = ("--threads", "1", "--max-model-len", "1k", "--kv-cache-memory", "256MiB")


class Running(NamedTuple):
    url: str
    process: "subprocess.Popen[str]"


def start_server() -> Running:
    """A server on a free port, once it says that it is ready."""
    process = subprocess.Popen(
        [QUIRE, "serve", "--port", "0", *SMALL], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("Ready"):
            process.stderr.readline()  # the curl line
            return Running(line.split()[5], process)
    raise AssertionError("the server ended before it was ready:\n" + "".join(said))


@pytest.fixture(scope="session")
def server(default_model_path: Path) -> Iterator[Running]:
    running = start_server()
    yield running
    running.process.terminate()
    running.process.wait(30)


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def served(default_model_path: Path) -> Served:
    """The facts of the default model, without its weights."""
    checkpoint = open_checkpoint(default_model_path)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    return Served(
        name="org/model",
        aliases=("other",),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        defaults=SamplingParams(),
        max_model_len=1024,
        vocab_size=checkpoint.spec.vocab_size,
        created=1_700_000_000,
    )
