"""ruff and mypy --strict have nothing to say, as `make lint` asks; mypy takes most of a minute: only with `--long`."""

import sys

import pytest

from tests import children
from tests.architecture.tree import ROOT


@pytest.mark.timeout(900)  # mypy without a cache took 284 s where ten others wanted the same core
@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--no-cache", "src", "tests"),
        ("ruff", "format", "--no-cache", "--check", "src", "tests"),
        pytest.param(("mypy",), marks=pytest.mark.long),
    ],
    ids=["ruff-check", "ruff-format", "mypy"],
)
def test_the_tools_are_content(command: tuple[str, ...]) -> None:
    result = children.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
