"""What lies in deploy/, parsed as little as the tests need."""

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from click.testing import CliRunner

from quire.cli.main import app
from tests.architecture.tree import ROOT

DEPLOY = ROOT / "deploy"
SHUTDOWN_DEFAULT_S = 30.0


class Instruction(NamedTuple):
    word: str
    rest: str


class Stage(NamedTuple):
    """One FROM of a Dockerfile, with what stands in the stages it builds upon before it."""

    name: str
    instructions: tuple[Instruction, ...]


def documents(path: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def stages() -> dict[str, Stage]:
    """The Dockerfile's stages by name; the last is what a plain build makes."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    here: list[Instruction] = []
    name = ""
    for line in filter(None, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            here = list(found[source].instructions) if source in found else []
        here.append(Instruction(word, rest.strip()))
        if name:
            found[name] = Stage(name, tuple(here))
    return found


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names have capitals
    parser.read(DEPLOY / "systemd" / "quire.service")
    return parser


def serve_help() -> str:
    return CliRunner().invoke(app, ["serve", "--help"]).output


def shutdown_s(words: list[str]) -> float:
    """The --shutdown-timeout of a command."""
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == "--shutdown-timeout":
            return float(value or words[place + 1])
    return SHUTDOWN_DEFAULT_S


def commands() -> dict[str, list[str]]:
    """Every command line of `quire serve` that stands in deploy/, by where it stands."""
    docker = next(each.rest for each in reversed(stages()["cpu"].instructions) if each.word == "CMD")
    deployment = next(each for each in documents("kubernetes/quire.yaml") if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {
        "Dockerfile": json.loads(docker),
        "systemd": shlex.split(unit()["Service"]["ExecStart"])[1:],
        "kubernetes": container["args"],
    }


def exists(path: str, folder: Path = DEPLOY) -> bool:
    return (folder / path).exists()
