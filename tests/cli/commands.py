"""The command line for tests: in this process where that is enough, else as a shell starts it."""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.cli.main import main

QUIRE = str(Path(sys.executable).with_name("quire"))
PROMPT = "\r\n\x1b[?2004h› "  # of quire chat in a terminal, which is asked to mark what is pasted
SMALL = ("--threads", "1", "--max-model-len", "512", "--kv-cache-memory", "64MiB")  # quick to start, little memory


class CommandResult(NamedTuple):
    status: int
    out: str
    err: str


class Shell:
    """Runs `quire` in this process and returns its status and output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> CommandResult:
        self._monkeypatch.setattr(sys, "argv", ["quire", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        result = self._capsys.readouterr()
        return CommandResult(int(end.value.code or 0), result.out, result.err)
