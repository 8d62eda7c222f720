"""One throw-away environment per client, below .venv-clients: made when it is missing or its requirements changed."""

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from tests import children
from tests.architecture.tree import ROOT

FOLDER = ROOT / ".venv-clients"
REQUIREMENTS = Path(__file__).parent / "requirements"
SCRIPTS = Path(__file__).parent / "scripts"


class Outcome(NamedTuple):
    """How one case of a script went; no error means well."""

    case: str
    error: str | None


def environment(name: str, *flags: str) -> Path:
    """The folder of a client's environment, with what its file of requirements asks for. `flags`: for pip."""
    home = FOLDER / name
    asked = next(REQUIREMENTS.glob(f"{name}.*"))
    stamp = home / asked.name
    if stamp.exists() and stamp.read_text() == asked.read_text():
        return home
    shutil.rmtree(home, ignore_errors=True)
    if asked.suffix == ".json":
        home.mkdir(parents=True)
        shutil.copy(asked, home / "package.json")
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home))
    else:
        _run(sys.executable, "-m", "venv", str(home))
        _run(str(home / "bin" / "pip"), "install", "--quiet", *flags, "--requirement", str(asked))
    shutil.copy(asked, stamp)
    return home


def python(name: str) -> str:
    return str(environment(name) / "bin" / "python")


def errors(went: list[Outcome]) -> dict[str, str]:
    """What failed, by case."""
    assert went, "the script has no cases"
    return {case: error for case, error in went if error}


def outcomes(*command: str) -> list[Outcome]:
    """What a script reported, case by case; one that ended before its end has no outcomes at all."""
    done = children.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"case"')]


def _run(*command: str) -> None:
    done = children.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
