"""Downloads with the real client of the hub, over HTTP, from a hub on this machine: as a user gives a hub id."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import children
from tests.catalog.hub_server import TOKEN, Hub, serving
from tests.llm.tiny import tiny_llama, write_model

PROMPT = "a model from afar"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = write_model(tmp_path_factory.mktemp("origin"), tiny_llama())
    (folder / "pytorch_model.bin").write_bytes(b"a pickle, which must not come")
    with serving(Hub({"people/tiny": folder, "people/gated": folder}, gated={"people/gated"})) as hub:
        yield hub


def run(hub: Hub, home: Path, code: str, *arguments: str, reachable: bool = True) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, whose hub is ours; the client reads its settings once, when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    nobody = "http://127.0.0.1:9"
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint if reachable else nobody}
    command = [sys.executable, "-c", code, *arguments]
    return children.run(command, env=environment, capture_output=True, text=True, timeout=120)


SPEAK = "from quire.cli.main import main; main()"
WORDS = ("--temperature", "0", "--max-tokens", "8", "--dtype", "float32", PROMPT)

FETCH = """
import json, sys
from quire.catalog.hub import fetch
from quire.catalog.names import HubName
from quire.core.errors import QuireError

for repository, file_name, revision, token in json.loads(sys.argv[1]):
    try:
        path = fetch(HubName(repository, file_name), revision=revision, token=token, report=lambda progress: None)
        print("fetched", sorted(file.name for file in path.iterdir()))
    except QuireError as error:
        print(type(error).__name__, error)
"""


def test_a_hub_id_is_fetched_once_and_generates(hub: Hub, tmp_path: Path) -> None:
    fetched = run(hub, tmp_path, SPEAK, "run", "people/tiny", *WORDS)
    assert fetched.returncode == 0 and fetched.stdout.strip(), fetched.stderr
    files = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "/resolve/" in line}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files and "pytorch_model.bin" not in files
    again = run(hub, tmp_path, FETCH, json.dumps([("people/tiny", None, None, None)]), reachable=False)
    assert again.stdout.startswith("fetched") and "model.safetensors" in again.stdout, again.stderr


def test_refusals_of_the_hub_are_explained_and_a_token_opens(hub: Hub, tmp_path: Path) -> None:
    asked = [
        ("people/none", None, None, None),
        ("people/tiny", None, "v9", None),
        ("people/gated", None, None, None),
        ("people/gated", None, None, "hf_another"),
        ("people/tiny", "other.gguf", None, None),
        ("people/gated", None, None, TOKEN),
    ]
    result = run(hub, tmp_path, FETCH, json.dumps(asked))
    assert result.returncode == 0, result.stderr
    none, revision, gated, wrong_token, no_file, opened = result.stdout.splitlines()
    assert none.startswith("ModelNotFound The hub has no model people/none")
    assert revision.startswith("ModelNotFound people/tiny has no revision v9")
    assert gated.startswith("FetchFailed people/gated is gated") and wrong_token == gated
    assert no_file.startswith("ModelNotFound people/tiny has no file other.gguf")
    assert opened.startswith("fetched") and "model.safetensors" in opened and "pytorch_model.bin" not in opened


def test_an_unreachable_hub_is_reported(hub: Hub, tmp_path: Path) -> None:
    result = run(hub, tmp_path, FETCH, json.dumps([("people/tiny", None, None, None)]), reachable=False)
    assert result.stdout.startswith("FetchFailed people/tiny is not in the hub's cache"), result.stderr
