"""A full disk, a closed stream or a closed pipe ends a command with a sentence, never with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import children
from tests.cli.commands import SMALL, Shell
from tests.tiers import long_only

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def _quire(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a shell starts it, with a redirection such as `>&-`."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "quire", *arguments]
    return children.run(command, text=True, capture_output=True, timeout=60, check=False)


@needs_full
@pytest.mark.parametrize("line", ["--help", "check --steps 20", *long_only(["--version", "list", "list --json"])])
def test_a_full_disk_is_one_sentence(line: str) -> None:
    result = _quire(f">{FULL}", *line.split())
    assert result.returncode == 1
    assert result.stderr.startswith("quire: Cannot write what this command prints: No space left on device.")
    assert result.stderr.count("\n") == 1


@needs_full
def test_a_journal_on_a_full_disk_is_named(quire: Shell) -> None:
    result = quire("check", "--trial", "1", "--record", str(FULL))
    assert (result.status, result.out) == (2, "")
    assert result.err == f"quire: {FULL} cannot be written: No space left on device.\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-", *long_only(["<&-", "2>&-"])])
def test_a_closed_stream_is_the_null_device(closed: str) -> None:
    result = _quire(closed, "list", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert (result.stdout == "") == (">&-" in closed.split())


def test_a_closed_pipe_gets_no_traceback() -> None:
    result = _quire("| :", "list", "--json")
    assert result.stderr == ""


@pytest.mark.usefixtures("shallow_default")
def test_a_prompt_that_is_no_text_is_one_sentence() -> None:
    """In a locale other than C, where the interpreter refuses such bytes itself."""
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "quire", "run", "-", *SMALL]
    result = children.run(command, input=b"caf\xe9", capture_output=True, timeout=60, check=False, env=strict)
    assert result.returncode == 2
    assert result.stderr.decode().startswith("quire: The text holds a lone surrogate (U+DCE9, character 3)")
    assert result.stderr.count(b"\n") == 1
