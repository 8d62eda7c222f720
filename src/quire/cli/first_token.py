"""The process that `quire bench startup` measures: loads a model, makes one token, prints the time of each phase.

A separate file: its imports are those of an engine, and their time is measured.
"""

import json
import sys
import time

import torch

from quire.config import EngineConfig
from quire.core.sampling import SamplingParams
from quire.engine.build import build
from quire.engine.machine import pick_device
from quire.engine.startup import StartupPhase, StartupReporter
from quire.llm import LLM

_PROMPT = list(range(1, 17))  # token ids that every model has


def first_token(since_s: float, reached_s: float, torch_s: float, serving: bool) -> None:
    """`since_s`: start of the process. `reached_s`: its command was called. `torch_s`: torch was imported."""
    config = EngineConfig(**json.load(sys.stdin))
    phases = [
        StartupPhase("python", reached_s - since_s, "interpreter and command line"),
        StartupPhase("torch", torch_s - reached_s, "import"),
        StartupPhase("quire", time.monotonic() - torch_s, "import"),
    ]
    reporter = StartupReporter(finished=phases.append)
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        reporter.done("cuda", "context")
    llm = LLM.over(build(config, reporter, serving=serving))
    llm.generate(_PROMPT, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), progress=False)
    reporter.done("first token", f"a prompt of {len(_PROMPT)} tokens")
    print(json.dumps({"first_token_s": time.monotonic(), "phases": phases}))
