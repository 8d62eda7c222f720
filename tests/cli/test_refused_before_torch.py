"""A wrong model, path or parameter is answered in one sentence by a process that cannot import torch; a wrong name or
option by one that has neither numpy nor the web server nor the client of the hub."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import children

CODE = """
import contextlib, io, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ImportError(f"{name} is imported")

blocked = Blocked()
blocked.names = sys.argv[1:]
sys.meta_path.insert(0, blocked)
from quire.cli.main import main

answers = []
for arguments in json.load(sys.stdin):
    sys.argv, status, said = ["quire", *arguments], None, io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            status = end.code
        except ImportError as error:
            said.write(f"ImportError: {error}")
    answers.append((status, said.getvalue()))
print(json.dumps(answers))
"""

MISTAKES = {
    "run nosuchmodel hi": "There is no model 'nosuchmodel'",
    "run --model nosuchmodel": "The model goes without --model",
    "run ./nowhere.gguf hi": "There is no file or folder ./nowhere.gguf",
    "run EMPTY hi": "config.json",
    "run CUT hi": "is damaged",
    "run hi --temperature 999": "temperature must be a number",
    "run hi --max-tokens 0": "max_tokens must be a whole number",
    "run hi --threads 0": "threads must be a whole number",
    "run hi --quantization int7": "'int7' is not one of",
    "run hi --max-model-len 16777215": "but the model supports 8192 positions",
    "run smollm3 hi --load-format dummy": "smollm3",
    "run hi --temperature 9": "temperature must be a number from 0 to 2",
    "run hi --temp 1": "There is no --temp here: use --temperature.",
    "serve --record /nowhere/journal": "--record /nowhere/journal: there is no folder /nowhere; create it first.",
    "serve --record EMPTY": "is a folder; name a file in it, such as",
    "bench regimes --workload nowhere": "There is no sample and no file 'nowhere'; there are sharegpt, mooncake, stall",
    "bench regimes --workload EMPTY": "Is a directory",
    "bench pacing --workload CUT": "is damaged",
    "bench scheduler --plot /nowhere/plot.svg": "there is no folder /nowhere; create it first.",
    "check --record /nowhere/journal": "there is no folder /nowhere; create it first.",
    "replay /dev/zero": "/dev/zero is not a quire journal",
    "batch CUT -o /nowhere/out.jsonl": "Cannot write /nowhere/out.jsonl: there is no folder /nowhere; create it first.",
    "show /dev/null": "/dev/null is neither a .gguf file nor a folder.",
    "batch CUT -o CUT": "cannot be both the input and the output.",
    "serve --ray --replicas 2": "use --min-replicas 2 with --ray.",
    "serve --ray --record x": "--record is for engines on this machine, not for --ray",
    "serve --kv-transport nixl": "--kv-transport nixl is for --prefill-engines; omit it, or use both.",
    "serve --ray --min-replicas 3 --max-replicas 2": "use --max-replicas 3 or more.",
    "serve --max-replicas 2": "--max-replicas is for --ray; use --replicas",
    "run hi -n 5": "There is no -n here: use --max-tokens.",
    "serve -ngl 99": "There is no -ngl here: all layers run on one device",
    "serve -c 4096": "There is no -c here: use --max-model-len.",
    "serve --ctx-size 4096": "There is no --ctx-size here: use --max-model-len.",
    "serve -np 4": "use --max-num-seqs.",
    "serve --temp 1": "each request brings its own temperature",
    "serve --mlock": "weights are read once",
    "serve -fa on": "fused attention kernels are always used",
    "serve --hf-repo x/y": "give the hub id as the model",
    "serve --keep-alive 5m": "the model stays loaded",
    "serve -z": "No such option",
    "chat nosuchmodel": "There is no model 'nosuchmodel'",
    "chat CUT": "is damaged",
    "serve nosuchmodel --port 0": "There is no model 'nosuchmodel'",
    "serve EMPTY --port 0": "config.json",
    "serve CUT --port 0": "is damaged",
    "serve --quantization int7": "'int7' is not one of",
    "serve --port 0 --max-model-len 16777215": "but the model supports 8192 positions",
    "run hi --tensor-parallel-size 0": "tensor_parallel_size must be a whole number from 1 to 64",
    "run hi --tensor-parallel-size 2": "Use --tensor-parallel-size 1 or 3.",
    "serve --port 0 --tensor-parallel-size 2": "9 attention heads, 3 key heads and a feed-forward width of 1536",
    "serve --tp 2": "There is no --tp here: use --tensor-parallel-size.",
    "serve --port 0 --pipeline-parallel-size 2 --device cuda": "Use --tensor-parallel-size 2 instead, or --device cpu.",
    "serve --port 0 --pipeline-parallel-size 2 --speculative auto": "Use --speculative off",
    "serve --pp 2": "There is no --pp here: use --pipeline-parallel-size.",
    "bench latency --model nosuchmodel": "There is no model 'nosuchmodel'",
    "bench throughput --model CUT": "is damaged",
    "bench startup --model EMPTY": "config.json",
}


# Answered before anything that takes long is imported: 0.2 to 0.6 s of processor time, most of it for click and rich.
HEAVY = ("torch", "numpy", "starlette", "uvicorn", "huggingface_hub", "tokenizers")
LIGHT = {
    "run nosuchmodel hi": "There is no model 'nosuchmodel'",
    "chat nosuchmodel": "There is no model 'nosuchmodel'",
    "serve nosuchmodel": "There is no model 'nosuchmodel'",
    "serve --config TABLES": "There is no model 'nosuchmodel'",
    "serve ./nowhere.gguf": "There is no file or folder ./nowhere.gguf",
    "pull nosuchmodel": "There is no model 'nosuchmodel'",
    "show nosuchmodel": "There is no model 'nosuchmodel'",
    "run hi --temperature 999": "temperature must be a number",
    "run hi --threads 0": "threads must be a whole number",
    "chat --top-p 7": "top_p must be a number",
    "serve --dtype int8": "'int8' is not one of",
    "serve --dtype half": "'float32': use float16, or on a CPU bfloat16.",
    "serve --dtype fp8": "weights of 8 or 4 bits are --quantization int8 or int4",
    "serve --host 0.0.0.0": "use --host 127.0.0.1, or use --insecure-no-key.",
    "serve --host localhost:8000": "write for example --host 127.0.0.1 --port 8000",
    "serve --host 999.1.1.1": "--host '999.1.1.1' is not an address",
    "serve --api-key=": "The key of key-1 must be 1 to 512 visible ASCII characters",
    "serve --api-key-file nowhere.keys": "Cannot read the keys in nowhere.keys: No such file or directory.",
    "serve --ssl-certfile nowhere.pem": "Cannot use the certificate nowhere.pem: No such file or directory.",
    "serve --ssl-keyfile nowhere.pem": "--ssl-keyfile needs --ssl-certfile.",
    "serve --root-path x": "--root-path 'x' must be empty, or begin with a slash",
    "serve --otlp-endpoint x": "--otlp-endpoint 'x' is not a collector URL",
    "serve --tensor-parallel-size 0": "tensor_parallel_size must be a whole number from 1 to 64",
    "serve -ngl 99": "There is no -ngl here",
    "serve smollm2 --revision main": "A revision (main) is for models of the hub",
    "nosuchcommand": "There is no command 'nosuchcommand'",
    "batch nowhere.jsonl -o out.jsonl": "Cannot read nowhere.jsonl: No such file or directory.",
    "batch . -o out.jsonl": "Cannot read .: Is a directory.",
    "batch - nosuchmodel -o -": "There is no model 'nosuchmodel'",
}


class Answer(NamedTuple):
    status: int | None
    text: str


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> dict[str, Answer]:
    """Every mistake in one process: none of them may have imported torch for the next."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "empty").mkdir()
    with default_model_path.open("rb") as file:
        (folder / "cut.gguf").write_bytes(file.read(100_000))
    places = {"EMPTY": str(folder / "empty"), "CUT": str(folder / "cut.gguf")}
    return answered([[places.get(word, word) for word in line.split()] for line in MISTAKES], MISTAKES, "torch")


def answered(lines: Sequence[list[str]], names: Iterable[str], *blocked: str) -> dict[str, Answer]:
    """What one process answers to all lines; it cannot import what is blocked."""
    command = [sys.executable, "-c", CODE, *blocked]
    ended = children.run(command, input=json.dumps(lines), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    return {line: Answer(*answer) for line, answer in zip(names, found, strict=True)}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_without_torch(line: str, answers: dict[str, Answer]) -> None:
    answer = answers[line]
    assert MISTAKES[line] in answer.text
    assert (answer.status, "Traceback" in answer.text) == (2, False)


def test_a_wrong_name_or_option_is_answered_at_once(tmp_path: Path) -> None:
    tables = tmp_path / "tables.toml"
    tables.write_text('[models.a]\nmodel = "nosuchmodel"\n')
    lines = [line.replace("TABLES", str(tables)).split() for line in LIGHT]
    for line, answer in answered(lines, LIGHT, *HEAVY).items():
        assert (answer.status, LIGHT[line] in answer.text, "Traceback" in answer.text) == (2, True, False), answer


def test_a_right_command_does_import_torch(default_model_path: Path) -> None:
    """Else the other test would pass because nothing is imported at all."""
    ended = children.run(
        [sys.executable, "-c", CODE, "torch"], input='[["run", "hi"]]', capture_output=True, text=True, check=False
    )
    [(status, text)] = json.loads(ended.stdout.splitlines()[-1])
    assert (status, text) == (None, "ImportError: torch is imported")
