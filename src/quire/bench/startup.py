"""The time of a fresh process from its start to its first token, by phase.

Caches of compiled kernels are in a temporary folder: empty for the cold start, filled by it for the warm start. Files
are in the page cache of the operating system in both. The measured process (`first_token`) imports what an engine
imports, and the time of its imports is a phase.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from quire.config import EngineConfig
from quire.core.errors import EngineFailed
from quire.core.sampling import SamplingParams
from quire.engine.build import build
from quire.engine.machine import pick_device
from quire.engine.open_model import OpenedModel
from quire.engine.startup import StartupPhase, StartupReporter
from quire.llm import LLM

# Started with `--since SECONDS` (of the monotonic clock) and the settings as JSON on stdin; prints a line of JSON.
CHILD = (sys.executable, "-m", "quire", "bench", "first-token")
# Variables for the cache folders of compilers.
_CACHES = {"TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
_PROMPT = list(range(1, 17))  # token ids that every model has


class StartupTimes(NamedTuple):
    """One process, from its start to its first token."""

    caches: str  # "cold" or "warm"
    seconds: float
    phases: tuple[StartupPhase, ...]


def measure_starts(
    config: EngineConfig,
    *,
    repeats: int,
    batch: bool = False,  # an engine for batches instead of a server's
    say: Callable[[str], None],
    child: Many[str] | None = None,  # instead of `CHILD`
) -> list[StartupTimes]:
    """A cold start and a warm one, `repeats` times."""
    command = [*(child or CHILD), *(["--batch"] if batch else [])]
    starts = []
    for number in range(repeats):
        with tempfile.TemporaryDirectory(prefix="quire-kernels-") as folder:
            for caches in ("cold", "warm"):
                say(f"repeat {number + 1} of {repeats}: {caches}")
                starts.append(_start(config, caches, Path(folder), command))
    return starts


def _start(config: EngineConfig, caches: str, folder: Path, child: Many[str]) -> StartupTimes:
    environment = dict(os.environ) | {name: str(folder / subfolder) for name, subfolder in _CACHES.items()}
    started_s = time.monotonic()
    ended = subprocess.run(
        [*child, "--since", repr(started_s)],
        input=json.dumps(asdict(config)),
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise EngineFailed(f"The measured process ended with status {ended.returncode}; see above.")
    report = json.loads(ended.stdout.splitlines()[-1])
    return StartupTimes(
        caches, report["first_token_s"] - started_s, tuple(StartupPhase(*phase) for phase in report["phases"])
    )


class ImportTimes(NamedTuple):
    """When the measured process came how far, by the monotonic clock."""

    started_s: float
    reached_s: float  # its command was called
    opened_s: float  # the model was opened, and torch's libraries being loaded beside that
    torch_s: float  # torch was imported


def first_token(config: EngineConfig, opened: OpenedModel, times: ImportTimes, serving: bool) -> dict[str, object]:
    """In the measured process: loads the model, makes one token; the time of each phase."""
    phases = [
        StartupPhase("python", times.reached_s - times.started_s, "interpreter and command line"),
        StartupPhase("model", times.opened_s - times.reached_s, "and scheduler's imports; torch's libraries meanwhile"),
        StartupPhase("torch", times.torch_s - times.opened_s, "import"),
        StartupPhase("quire", time.monotonic() - times.torch_s, "import"),
    ]
    reporter = StartupReporter(finished=phases.append)
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        reporter.done("cuda", "context")
    llm = LLM.over(build(config, reporter, serving=serving, opened=opened))
    llm.generate(_PROMPT, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), progress=False)
    reporter.done("first token", f"a prompt of {len(_PROMPT)} tokens")
    return {"first_token_s": time.monotonic(), "phases": phases}
