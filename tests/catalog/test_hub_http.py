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
NUM_WORDS = 2_000_000  # 24 MB: the client resumes after parts of 10 MiB


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = write_model(tmp_path_factory.mktemp("origin"), tiny_llama())
    (folder / "pytorch_model.bin").write_bytes(b"a pickle, which must not come")
    ggufs = tmp_path_factory.mktemp("ggufs")
    for quantization, num_words in (("Q4_K_M", NUM_WORDS), ("Q6_K", 10), ("Q8_0", 10)):
        (ggufs / f"tiny-{quantization}.gguf").write_bytes(f"GGUF {quantization} ".encode() * num_words)
    models = {"people/tiny": folder, "people/gated": folder, "people/files": ggufs}
    with serving(Hub(models, gated={"people/gated"})) as hub:
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


def test_a_hub_id_is_fetched_once_and_generates_and_an_unreachable_hub_is_reported(hub: Hub, tmp_path: Path) -> None:
    fetched = run(hub, tmp_path, SPEAK, "run", "people/tiny", *WORDS)
    assert fetched.returncode == 0 and fetched.stdout.strip(), fetched.stderr
    files = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "/resolve/" in line}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files and "pytorch_model.bin" not in files
    wanted = [(name, None, None, None) for name in ("people/tiny", "people/files")]
    again = run(hub, tmp_path, FETCH, json.dumps(wanted), reachable=False)
    there, absent = again.stdout.splitlines()
    assert there.startswith("fetched") and "model.safetensors" in there, again.stderr
    assert absent.startswith("FetchFailed people/files is not in the hub's cache"), again.stderr


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


COMMANDS = """
import json, sys
from quire.cli.main import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["quire", *words]
    try:
        main()
    except SystemExit as end:
        print(f"status {end.code or 0}", flush=True)
"""


def commands(hub: Hub, home: Path, *lines: str, reachable: bool = True) -> subprocess.CompletedProcess[str]:
    """Several commands, one after the other, in one interpreter: to start one takes longer than they do."""
    result = run(hub, home, COMMANDS, json.dumps([line.split() for line in lines]), reachable=reachable)
    assert result.returncode == 0, result.stderr
    return result


def test_a_gguf_file_by_quantization_is_pulled_resumed_verified_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.cut = {"tiny-Q4_K_M.gguf"}
    name, file = "people/files:Q4_K_M", "people/files:tiny-Q4_K_M.gguf"
    pulled = commands(hub, tmp_path, "pull people/files:q4_k_m")
    path = Path(pulled.stdout.splitlines()[0])
    assert path.name == "tiny-Q4_K_M.gguf" and path.read_bytes() == b"GGUF Q4_K_M " * NUM_WORDS, pulled.stderr
    [resumed] = [line for line in hub.asked if line.startswith("bytes=") and line.endswith(path.name)]
    assert int(resumed.removeprefix("bytes=").partition("-")[0]) > 0
    then = commands(
        hub, tmp_path, f"pull {name}", f"show --verify {name}", "list --json", f"rm {file}", reachable=False
    )
    again, _, verified, _, *listed, _, removed, _ = then.stdout.splitlines()
    assert again == str(path) and verified == f"{name}: the checksums of 1 files are right.", then.stderr
    assert file in [json.loads(line)["name"] for line in listed] and removed == f"removed {file}, 23 MiB"
    assert not path.exists() and not [blob for blob in tmp_path.rglob("blobs/*") if blob.stat().st_size > 1000]


def test_pulls_that_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.claimed_bytes, hub.damaged = {"tiny-Q6_K.gguf": 10**18}, {"tiny-Q8_0.gguf"}
    names = ("people/files:Q2_K", "people/files", "people/files:Q6_K", "people/files:Q8_0")
    refused = commands(hub, tmp_path, *(f"pull {name}" for name in names))
    assert refused.stdout.splitlines() == ["status 2", "status 2", "status 1", "status 2"], refused.stderr
    assert "has no GGUF file of Q2_K; it has Q4_K_M, Q6_K, Q8_0" in refused.stderr
    assert "such as people/files:Q4_K_M. It has Q4_K_M, Q6_K, Q8_0" in refused.stderr
    assert "people/files:tiny-Q6_K.gguf takes 1,000,000,000.00 GB" in refused.stderr
    assert "tiny-Q8_0.gguf of people/files:tiny-Q8_0.gguf arrived with the checksum" in refused.stderr
    assert not list(tmp_path.rglob("*.gguf")), "nothing was kept"


def test_a_folder_of_the_hub_is_shown_and_removed(hub: Hub, tmp_path: Path) -> None:
    name = "people/tiny"
    done = commands(hub, tmp_path, f"pull {name}", f"show {name} --json", f"rm {name}", f"show {name}")
    _, _, shown, _, removed, _, absent = done.stdout.splitlines()
    assert json.loads(shown)["format"] == "safetensors" and removed.startswith(f"removed {name}, "), done.stderr
    assert absent == "status 2" and f"quire pull {name} brings it here" in done.stderr


def test_a_pull_brings_what_the_hub_has_now(hub: Hub, tmp_path: Path) -> None:
    hub.claimed_bytes, hub.damaged = {}, set()
    name, file = "people/files:Q6_K", hub.models["people/files"] / "tiny-Q6_K.gguf"
    before, commit = file.read_bytes(), hub.commit
    first = commands(hub, tmp_path, f"pull {name}", f"pull {name}")
    path = Path(first.stdout.splitlines()[0])
    assert path.read_bytes() == before and "downloading" not in first.stderr.partition("verifying")[2], first.stderr
    file.write_bytes(b"another " * 10)
    hub.commit = "f" * 40
    try:
        again = commands(hub, tmp_path, f"show --verify {name}", f"pull {name}", f"rm people/files:{file.name}")
    finally:
        file.write_bytes(before)
        hub.commit = commit
    _, _, pulled, _, removed, _ = again.stdout.splitlines()
    assert Path(pulled).parent.name == "f" * 40 and removed.startswith(f"removed people/files:{file.name}"), (
        again.stderr
    )
    assert not list(tmp_path.rglob("*.gguf")), "nor the one before"


FULL = """
import errno, sys
import quire.catalog.hub as hub
from quire.cli.main import main

def full(*args, **options):
    if not options["local_files_only"]:
        raise OSError(errno.ENOSPC, "No space left on device")
    raise FileNotFoundError

hub.snapshot_download = full
main()
"""


def test_a_disk_that_fills_up_is_told_from_a_missing_network(hub: Hub, tmp_path: Path) -> None:
    """As on a mirror that tells no sizes, or beside another download."""
    refused = run(hub, tmp_path, FULL, "pull", "people/tiny")
    assert refused.returncode == 1 and "was full before people/tiny was there" in refused.stderr, refused.stderr
    assert "the same command resumes it" in " ".join(refused.stderr.split())
