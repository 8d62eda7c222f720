"""What tests start ends with them: when a test fails, when pytest is killed, and by Ctrl-C in a shell's background."""

import re
import signal
import subprocess
import sys

import pytest

from tests import children
from tests.architecture.tree import ROOT

FOR_EVER = "import signal; print('begun', flush=True); signal.pause()"
PARENT = f"""
import sys
from tests import children
children.start([sys.executable, "-c", {FOR_EVER!r}])
print("started", flush=True)
sys.stdin.read()
"""


def test_a_child_is_killed_when_its_test_fails() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        children.started([sys.executable, "-c", FOR_EVER], stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout.readline() == b"begun\n"
        _ = 1 // 0
    assert child.returncode == -signal.SIGKILL


def test_the_children_of_a_child_are_killed_too() -> None:
    reading = "import sys; sys.stdin.read()"
    script = f'"{sys.executable}" -c "{FOR_EVER}" & echo "$!"; exec "{sys.executable}" -c "{reading}"'
    with children.started(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        said = [child.stdout.readline(), child.stdout.readline()]
        assert b"begun\n" in said
        pipe = child.stdout
        child.stdout = None  # left open
    assert pipe.read() == b"", "the pipe ends when nothing that could write to it lives"
    pipe.close()


def test_a_child_is_killed_when_pytest_is() -> None:
    with children.started(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert {parent.stdout.readline(), parent.stdout.readline()} == {b"started\n", b"begun\n"}
        parent.kill()
        assert parent.stdout.read() == b"", "its child held the pipe, in a group of its own"


def test_control_c_ends_a_child_where_it_is_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with children.started(
            [sys.executable, "-c", FOR_EVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            assert child.stdout.readline() == b"begun\n"
            child.send_signal(signal.SIGINT)
            assert b"KeyboardInterrupt" in child.communicate()[1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_every_process_of_a_test_is_started_so() -> None:
    """The scripts of clients are such processes themselves."""
    plain = re.compile(r"\bsubprocess\.(Popen|run|call|check_call|check_output)\(")
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    scripts = ROOT / "tests" / "clients" / "scripts"
    allowed = {ROOT / "tests" / "children.py", scripts / "use_llm.py", scripts / "use_nixl.py"}
    assert [path for path, source in sources.items() if path not in allowed and plain.search(source)] == []
