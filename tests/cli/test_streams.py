"""Streams that are full, closed or left by their reader end a command with a sentence, never with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import children
from tests.cli.commands import SMALL, Shell

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def _quire(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a shell starts it, with a redirection such as `>&-`."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "quire", *arguments]
    return children.run(command, text=True, capture_output=True, timeout=60, check=False)


@needs_full
@pytest.mark.parametrize("line", ["--version", "--help", "models", "models --json", "check --steps 20"])
def test_a_full_disk_is_one_sentence(line: str) -> None:
    said = _quire(f">{FULL}", *line.split())
    assert said.returncode == 1
    assert said.stderr.startswith("quire: Cannot write what this command prints: No space left on device.")
    assert said.stderr.count("\n") == 1


@needs_full
def test_a_journal_on_a_full_disk_is_named(quire: Shell) -> None:
    said = quire("check", "--trial", "1", "--record", str(FULL))
    assert (said.status, said.out) == (2, "")
    assert said.err == f"quire: {FULL} cannot be written: No space left on device.\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_leads_nowhere(closed: str) -> None:
    said = _quire(closed, "models", "--json")
    assert (said.returncode, said.stderr) == (0, "")
    assert (said.stdout == "") == (">&-" in closed.split())


def test_who_reads_no_more_gets_no_traceback() -> None:
    said = _quire("| :", "models", "--json")
    assert said.stderr == ""


def test_a_prompt_that_is_no_text_is_one_sentence() -> None:
    """As it comes where the locale is no plain C: there the interpreter refuses such bytes by itself."""
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "quire", "run", "-", *SMALL]
    said = children.run(command, input=b"caf\xe9", capture_output=True, timeout=60, check=False, env=strict)
    assert said.returncode == 2
    assert said.stderr.decode().startswith("quire: The text holds a lone surrogate (U+DCE9, character 3)")
    assert said.stderr.count(b"\n") == 1
