"""The state of a scheduler is private to `sched/`: a change from outside would bypass the journal."""

import ast
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, SOURCE, syntax

INSPECTION = ROOT / "tests" / "sched" / "inspection.py"  # what tests may read it through


def outside_files() -> list[Path]:
    inside = SOURCE / "sched"
    files = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return sorted(path for path in files if inside not in path.parents and path != INSPECTION)


def reads_of_state(tree: ast.AST) -> list[str]:
    """`x._state` of anything but `self`, and imports of the class from outside the tests."""
    found = []
    for node in ast.walk(tree):
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if isinstance(node, ast.Attribute) and node.attr == "_state" and not own:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module == "quire.sched.state":
            found += [alias.name for alias in node.names if alias.name == "SchedulerState"]
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("self._state.rows", []),
        ("self.scheduler._state.rows", ["self.scheduler._state"]),
        ("scheduler._state = other", ["scheduler._state"]),
        ("from quire.sched.state import Counters, SchedulerState", ["SchedulerState"]),
    ],
)
def test_a_read_of_the_state_is_found(source: str, found: list[str]) -> None:
    assert reads_of_state(ast.parse(source)) == found


def test_no_file_outside_sched_reads_the_state_of_a_scheduler() -> None:
    named = [path for path in outside_files() if any(name in path.read_text() for name in ("_state", "SchedulerState"))]
    found = {str(path.relative_to(ROOT)): reads_of_state(syntax(path)) for path in named}
    assert {path: reads for path, reads in found.items() if reads} == {}
