"""What the README shows is what happens: its Python runs, its commands and flags exist, its links lead somewhere."""

import ast
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quire.cli.main import app
from tests import children

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def said_by(code: str) -> str:
    result = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_the_first_python_example_runs(default_model_path: Path) -> None:
    said = said_by(blocks("python")[0])
    assert "Paris" in said and "length" in said


def test_the_example_of_forks_runs(default_model_path: Path) -> None:
    (code,) = blocks("python")[1:]
    four, best, beam, *explained = said_by(code).splitlines()
    assert len(ast.literal_eval(four.rpartition("] ")[0] + "]")) == 4
    assert int(best.rpartition(" ")[2]) > 0, "the prompt was not found in the cache"
    assert beam.startswith("[")
    assert any("cache" in line or "cached" in line for line in explained), explained


@pytest.mark.parametrize("command", re.findall(r"quire (\w+)[^\n`]*", "\n".join(blocks("bash"))))
def test_the_commands_exist(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, result.output


def test_the_flags_exist() -> None:
    flags = set(re.findall(r"--[a-z][a-z-]+", README))
    commands = ("run", "chat", "serve", "models", "doctor", "check", "replay", "bench transformers", "bench scheduler",
                "bench regimes", "bench serve", "bench pacing")  # fmt: skip
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
