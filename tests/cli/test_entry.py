"""Ctrl-C before the subcommands are imported ends the command without a traceback."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

import quire
from quire.cli.entry import main
from tests import children
from tests.cli.commands import QUIRE

INTERRUPTED = """
import importlib, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["quire", "--version"]
"""


def console_script() -> str:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["quire"].partition(":")
    return f"importlib.import_module({module!r}).{function}()"


@pytest.mark.parametrize("entry", ["import runpy; runpy.run_module('quire', run_name='__main__')", console_script()])
def test_control_c_before_the_imports_ends_it_quietly(entry: str) -> None:
    result = children.run([sys.executable, "-c", INTERRUPTED + entry], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_windows_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert (end.value.code, said.count("\n")) == (2, 1) and "WSL 2" in said
    with pytest.raises(ImportError, match="WSL 2"):
        getattr(quire, "LLM")  # noqa: B009  # as `from quire import LLM` does


def test_shells_complete_commands_and_options() -> None:
    environment = {**os.environ, "_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": "quire chat --ur", "COMP_CWORD": "2"}
    result = children.run([QUIRE], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "plain,--url\n"
