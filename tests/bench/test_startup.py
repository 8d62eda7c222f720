"""What a start is made of, in real processes that have little installed."""

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

# Read by Python when it starts: what the machine lacks, and the shape of tests/bench/conftest.py.
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

# Says whether its caches are empty, fills them, and tells of two phases.
CHILD = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
empty = not folder.exists()
folder.mkdir(exist_ok=True)
settings = json.load(sys.stdin)
since = float(sys.argv[sys.argv.index("--since") + 1])
print("a remark")
batch = " for batches" * ("--batch" in sys.argv)
print(json.dumps({"first_token_s": since + 5, "phases": [["empty", float(empty), settings["model"] + batch]]}))
"""


def test_the_warm_start_finds_what_the_cold_one_left() -> None:
    config = EngineConfig(model="tiny", load_format="dummy")
    starts = measure_starts(config, repeats=2, say=lambda text: None, child=[sys.executable, "-S", "-c", CHILD])
    assert [(start.caches, start.phases[0].seconds) for start in starts] == [("cold", 1), ("warm", 0)] * 2
    assert {start.phases[0].detail for start in starts} == {"tiny"}
    assert all(abs(start.seconds - 5) < 1e-6 for start in starts), "from the parent's start to the child's word"


def test_a_process_that_fails_is_told() -> None:
    with pytest.raises(EngineFailed, match="status 3"):
        measure_starts(EngineConfig(), repeats=1, say=lambda text: None, child=[sys.executable, "-c", "exit(3)"])


def test_both_starts_are_told_for_people_and_for_programs(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "CHILD", [sys.executable, "-S", "-c", CHILD])
    [row] = [line for line in quire("bench", "startup", "--model", "tiny").out.splitlines() if "to the first" in line]
    assert row.count("5.00") == 2
    told = json.loads(quire("bench", "startup", "--model", "tiny", "--json").out)
    assert [(start["caches"], start["phases"][0]["name"]) for start in told["starts"]] == [
        ("cold", "empty"),
        ("warm", "empty"),
    ]
    assert told["command"] == "quire bench startup --model tiny --json"
    assert not told["batch"] and told["starts"][0]["phases"][0]["detail"] == "tiny"
    told = json.loads(quire("bench", "startup", "--model", "tiny", "--batch", "--json").out)
    assert told["batch"] and told["starts"][0]["phases"][0]["detail"] == "tiny for batches"


def test_a_machine_that_has_little_comes_to_its_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(MACHINE)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    config = EngineConfig(model="tiny", load_format="dummy", device="cpu", threads=1, kv_cache_memory=1 << 20)
    command = [*startup.CHILD, "--since", repr(time.monotonic())]
    child = children.run(command, input=json.dumps(asdict(config)), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    names = [phase[0] for phase in json.loads(child.stdout)["phases"]]
    assert names[:3] == ["python", "torch", "quire"] and names[-1] == "first token"
    assert {"weights", "kv cache", "warm-up"} <= set(names)
