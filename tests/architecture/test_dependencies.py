"""Every package that quire uses is asked for in pyproject.toml and has its reason in docs/dependencies.md."""

import importlib.metadata
import re
import sys
import tomllib
from typing import NamedTuple

from tests.architecture.tree import ROOT, imported_names, source_files, syntax

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[.*\])?\s*(?:>=\s*([0-9.]+))?")
_ROW = re.compile(r"^\| `([a-z0-9-]+)` \| ([0-9.]+) \| (.+) \| (.+) \|$", re.MULTILINE)


class Requirement(NamedTuple):
    name: str
    lower_bound: str


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(*, without: tuple[str, ...] = ()) -> set[Requirement]:
    """What pyproject.toml names, in its dependencies and in its extras but for some."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra, asked in project["optional-dependencies"].items():
        lines += [] if extra in without else asked
    found = set()
    for line in lines:
        match = _REQUIREMENT.match(line)
        assert match is not None, line
        if normal(match[1]) != "quire":
            found.add(Requirement(normal(match[1]), match[2] or ""))
    return found


def documented() -> set[Requirement]:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    return {Requirement(name, bound) for name, bound, _, _ in _ROW.findall(page)}


def test_the_table_matches_pyproject() -> None:
    assert documented() == requirements()


def test_every_import_is_a_dependency() -> None:
    distributions = importlib.metadata.packages_distributions()
    asked = {requirement.name for requirement in requirements(without=("test", "lint"))}
    strangers = set()
    for path in source_files():
        for name in imported_names(syntax(path)):
            top = name.split(".")[0]
            if top == "quire" or top in sys.stdlib_module_names:
                continue
            absent = [name for name in asked if name.startswith(f"{normal(top)}-")] or [top]  # of an extra, perhaps
            owners = {normal(owner) for owner in distributions.get(top, absent)}
            if not owners & asked:
                strangers.add(f"{path.name} imports {top}")
    assert not strangers
