"""Ctrl-C before the subcommands are imported ends the command without a traceback."""

import sys
import tomllib
from pathlib import Path

import pytest

from tests import children

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
