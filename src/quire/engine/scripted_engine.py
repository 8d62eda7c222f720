"""Builds an engine with scripted outputs instead of a model, for tests of clients and agents.

A script is a file of JSON lines. {"say": "…"} is what the model answers; with "when": "…" only where the prompt holds
that text: the first line that fits is said. "end": false lets the text run on to its length; "break": true makes the
row fail there, as one whose numbers are not finite. {"step_ms": 20} makes every step take that long.
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.core.errors import BrokenModelFile, NoTokenizer
from quire.core.ids import IntArray
from quire.core.shared_blocks import SharedBlocks
from quire.engine.block_transport import LOCAL_TRANSPORT, BlockTransport
from quire.engine.build_scheduler import make_grammars, make_scheduler, make_validator
from quire.engine.engine import Engine
from quire.engine.open_model import OpenedModel, open_model
from quire.engine.prefix_transfer import EngineRole
from quire.engine.resolved_config import MachineInfo, resolve
from quire.engine.startup import StartupReporter
from quire.engine.stats import EngineInfo, MemoryUsage
from quire.sched.cost_model import UNMEASURED, CostTable
from quire.sim.scripted_runner import ScriptedReply, ScriptedRunner
from quire.text.tokenizer import Tokenizer

_KV_BYTES = 1 << 30  # what a small model's cache would be given; nothing is allocated


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file."""

    say: str | None = None
    when: str | None = None
    end: bool = True
    broken: bool = msgspec.field(default=False, name="break")
    step_ms: float | None = None


def build_scripted(
    config: EngineConfig,
    path: Path,
    watch: StartupReporter,
    journal: BinaryIO | None = None,
    role: EngineRole = EngineRole.WHOLE,
    transport: BlockTransport = LOCAL_TRANSPORT,
) -> tuple[Engine, EngineInfo]:
    """The engine, with the tokenizer, template and context of the model that was named."""
    opened = open_model(config, watch.fetching, scripted=True)
    if opened.tokenizer is None:
        raise NoTokenizer("a script needs one")
    script = Script(path, opened, opened.tokenizer)
    spec = opened.checkpoint.spec
    if config.max_model_len is not None:  # a script has no positions to run out of; agents need long ones
        spec = replace(spec, max_positions=max(spec.max_positions, config.max_model_len))
    machine = MachineInfo(device="cpu", free_bytes=4 * _KV_BYTES, fast_bfloat16=True, num_cores=os.cpu_count() or 1)
    resolved = resolve(config, spec, spec.kv_bytes_per_token(2), machine)
    watch.done("script", f"{len(script.lines)} lines · {path.name}")
    costs = CostTable(replace(UNMEASURED, seconds_per_step=1e-3 + script.step_s))
    engine = Engine(
        make_scheduler(config, resolved, costs, journal=journal, scripted=True),
        ScriptedRunner(script.choose, spec.vocab_size, lambda: time.sleep(script.step_s)),
        make_validator(spec.vocab_size, opened.end_ids, resolved),
        depth=resolved.run_ahead,
        seed=config.seed,
        clock=time.monotonic,
        grammars=make_grammars(opened, spec.vocab_size),
    )
    if role is not EngineRole.WHOLE:
        _connect(engine, role, f"script of {opened.name}", transport)
    info = EngineInfo(
        name=opened.name,
        max_model_len=resolved.max_model_len,
        vocab_size=spec.vocab_size,
        max_num_seqs=resolved.max_num_seqs,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        device="script",
        dtype="none",
        memory=MemoryUsage(),
        run_ahead=resolved.run_ahead,
        pid=os.getpid(),
        caches_prefixes=resolved.regime == "prefix",
    )
    return engine, info


def _connect(engine: Engine, role: EngineRole, layout: str, transport: BlockTransport) -> None:
    """Blocks without bytes: the leases and their ends are real."""
    if role is EngineRole.PREFILL:
        shared = SharedBlocks(1, 0)
        transport.offer(shared)
        engine.export_prefixes(layout, shared)
    else:
        engine.import_prefixes(layout, transport.reader(np.zeros((1, 0), dtype=np.uint8), time.monotonic))


class Script:
    """The lines of a file, as tokens."""

    def __init__(self, path: Path, opened: OpenedModel, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.step_s = 0.0
        self.lines: list[tuple[str | None, ScriptedReply]] = []
        for number, read in enumerate(_read(path), 1):
            if read.step_ms is not None:
                self.step_s = read.step_ms / 1000
            if read.say is not None:
                tokens = tokenizer.encode(read.say, add_special_tokens=False) if read.say else []
                end = [opened.end_ids[0]] if read.end and not read.broken else []
                if not tokens and not end and not read.broken:
                    raise BrokenModelFile(f'Line {number} of {path.name} is empty and has "end": false; add text.')
                self.lines.append((read.when, ScriptedReply((*tokens, *end), read.broken)))
        if not self.lines:
            raise BrokenModelFile(f'{path.name} has no line with "say", such as {{"say": "Hello."}}.')

    def choose(self, prompt: IntArray) -> ScriptedReply:
        """The first line that fits; if none does, the last."""
        text = self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        fitting = [line for when, line in self.lines if when is None or when in text]
        return fitting[0] if fitting else self.lines[-1][1]


def _read(path: Path) -> list[ScriptLine]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BrokenModelFile(f"The script {path.name} cannot be read: {error.strerror}.") from error
    read = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                read.append(msgspec.json.decode(line, type=ScriptLine))
        except (msgspec.DecodeError, ValueError) as error:
            raise BrokenModelFile(f"Line {number} of {path.name} is not a line of a script: {error}.") from error
    return read
