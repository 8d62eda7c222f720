"""The phases of a start, in real processes with few packages installed."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from quire.bench import startup
from quire.bench.startup import measure_starts
from quire.config import EngineConfig
from quire.core.errors import EngineFailed
from tests import children
from tests.architecture.test_light import ABSENT
from tests.cli.commands import Shell

# sitecustomize.py: hides packages, and adds the shape of tests/bench/conftest.py.
MACHINE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
from quire.formats.presets import SHAPES
from quire.core.model import *
SHAPES["tiny"] = ModelSpec("llama", 2, 32, 2, 1, 16, 48, 97, 256, 1e-5, RopeSpec(10_000.0, 16), tied_embeddings=True)
"""

# Reports whether its caches are empty, and fills them.
CHILD = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
empty = not folder.exists()
folder.mkdir(exist_ok=True)
settings = json.load(sys.stdin)
since = float(sys.argv[sys.argv.index("--since") + 1])
print("another line")
batch = " for batches" * ("--batch" in sys.argv)
print(json.dumps({"first_token_s": since + 5, "phases": [["empty", float(empty), settings["model"] + batch]]}))
"""


def test_the_warm_start_has_the_caches_of_the_cold_one() -> None:
    config = EngineConfig(model="tiny", load_format="dummy")
    starts = measure_starts(config, repeats=2, say=lambda text: None, child=[sys.executable, "-S", "-c", CHILD])
    assert [(start.caches, start.phases[0].seconds) for start in starts] == [("cold", 1), ("warm", 0)] * 2
    assert {start.phases[0].detail for start in starts} == {"tiny"}
    assert all(abs(start.seconds - 5) < 1e-6 for start in starts), "from the start of the process to its report"


def test_a_failing_process_is_reported() -> None:
    with pytest.raises(EngineFailed, match="status 3"):
        measure_starts(EngineConfig(), repeats=1, say=lambda text: None, child=[sys.executable, "-c", "exit(3)"])


def test_both_starts_as_a_table_and_as_json(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "CHILD", [sys.executable, "-S", "-c", CHILD])
    command = ("bench", "startup", "--model", "tiny", "--load-format", "dummy")
    [row] = [line for line in quire(*command).out.splitlines() if "to the first" in line]
    assert row.count("5.00") == 2
    report = json.loads(quire(*command, "--json").out)
    assert [(start["caches"], start["phases"][0]["name"]) for start in report["starts"]] == [
        ("cold", "empty"),
        ("warm", "empty"),
    ]
    assert report["command"] == "quire bench startup --model tiny --load-format dummy --json"
    assert not report["batch"] and report["starts"][0]["phases"][0]["detail"] == "tiny"
    report = json.loads(quire(*command, "--batch", "--json").out)
    assert report["batch"] and report["starts"][0]["phases"][0]["detail"] == "tiny for batches"


def test_the_first_token_needs_no_optional_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(MACHINE)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    config = EngineConfig(model="tiny", load_format="dummy", device="cpu", threads=1, kv_cache_memory=1 << 20)
    command = [*startup.CHILD, "--since", repr(time.monotonic())]
    child = children.run(command, input=json.dumps(asdict(config)), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    names = [phase[0] for phase in json.loads(child.stdout)["phases"]]
    assert names[:4] == ["python", "model", "torch", "quire"] and names[-1] == "first token"
    assert {"weights", "kv cache", "warm-up"} <= set(names)
