"""What the README shows is what happens: its Python runs, its commands and flags exist, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quire.cli.main import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(default_model_path: Path) -> None:
    (code,) = blocks("python")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Paris" in result.stdout
    assert "length" in result.stdout


@pytest.mark.parametrize("command", re.findall(r"quire (\w+)[^\n`]*", "\n".join(blocks("bash"))))
def test_the_commands_exist(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, result.output


def test_the_flags_exist() -> None:
    flags = set(re.findall(r"--[a-z][a-z-]+", README))
    commands = ("run", "chat", "serve", "models", "doctor", "check", "bench transformers")
    helps = "".join(CliRunner().invoke(app, [*command.split(), "--help"]).output for command in commands)
    assert flags, "the README shows no flags"
    assert {flag for flag in flags if flag not in helps} == set()


def test_the_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert {"serve", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
