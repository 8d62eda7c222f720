"""`quire run` as a shell sees it: the completion alone on stdout, and a clean end after any interruption."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import children
from tests.cli.commands import QUIRE, SMALL, Shell

# `quire run`, which waits for ever where the weights are read: after the headline, and before any text.
WAITING = """
import os, sys

class Wait:
    def find_spec(self, name, path=None, target=None):
        if name == "quire.weights.gguf_dequantize":
            os.read(os.pipe()[0], 1)

sys.meta_path.insert(0, Wait())
sys.argv[0] = "quire"
from quire.cli.entry import main
main()
"""

on_shallow_model = pytest.mark.usefixtures("shallow_default")  # two layers of the default model


def start(*arguments: str, program: Sequence[str] = (QUIRE,)) -> AbstractContextManager["subprocess.Popen[str]"]:
    command = [*program, "run", *arguments, *SMALL]
    pipe = subprocess.PIPE
    return children.started(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


@on_shallow_model
def test_stdout_is_the_completion_alone(quire: Shell) -> None:
    result = quire("run", "The capital of France is", "--temperature", "0", "--max-tokens", "3", *SMALL)
    assert result.out.strip("\n") and result.out.endswith("\n")
    assert (result.status, result.err) == (0, "")


def test_a_model_a_prompt_from_stdin_and_the_report(default_model_path: Path) -> None:
    command = [QUIRE, "run", "-v", str(default_model_path), "-", "--temperature", "0", "--max-tokens", "3", *SMALL]
    result = children.run(command, input="The capital of France is", capture_output=True, text=True, check=True)
    assert result.stdout == " Paris.\n\n"
    lines = result.stderr.splitlines()
    phases = ["config", "kernels", "weights", "kv", "warm-up", "steps", "memory"]
    assert [line.split()[0] for line in lines] == ["quire", *phases, "3"], "none wrapped"
    details = [line.split(" s   ")[1] for line in lines[1:-1]]
    assert len(set(details)) == len(details), "each phase says something of its own"
    assert "tok/s" in lines[-1]


@on_shallow_model
def test_a_closed_pipe_ends_it_quietly() -> None:
    with start("Once upon a time", "--temperature", "0", "--max-tokens", "400") as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.read(1)
        running.stdout.close()
        errors = running.stderr.read()
        assert running.wait() == 1
        assert errors == ""


@on_shallow_model
def test_control_c_ends_a_completion() -> None:
    with start("Once upon a time", "--temperature", "0", "--max-tokens", "400") as running:
        assert running.stdout is not None
        first = running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate()
        assert running.returncode == 130
        assert errors == ""
        assert (first + rest).endswith("\n")


@on_shallow_model
def test_control_c_ends_a_start() -> None:
    with start("Once upon a time", "-v", program=[sys.executable, "-c", WAITING]) as running:
        assert running.stderr is not None
        running.stderr.readline()  # the headline: now it loads
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate()
        assert running.returncode == 130
        assert output == ""
        assert "Traceback" not in errors and "Interrupted." in errors
