"""Two commands, interleaved: which runs are compared, and which commands are refused."""

import json
import sys
from pathlib import Path

import pytest

from quire.bench.race import CommandComparison, WorkloadResult, compare_commands, read_result
from quire.cli.bench_processes import race
from quire.core.errors import ConfigError

# Prints the next line of its script each time it is run.
SCRIPTED = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
turn = len(list(folder.glob("turn*")))
(folder / f"turn{turn}").touch()
print("something else first")
print((folder / "script").read_text().splitlines()[turn])
"""


def command(folder: Path, *turns: dict[str, object]) -> list[str]:
    folder.mkdir()
    (folder / "script").write_text("\n".join(map(json.dumps, turns)))
    return [sys.executable, "-S", "-c", SCRIPTED, str(folder)]


def ours(seconds: float, output: int = 10) -> dict[str, object]:
    return {"workload": "nano", "seconds": seconds, "output_tokens": output}


def theirs(seconds: float, output: int = 10) -> dict[str, object]:
    return {"workload": "nano", "wall_s": seconds, "out_tok": output}


def test_a_run_of_the_rival_is_compared_with_the_quire_runs_around_it(tmp_path: Path) -> None:
    lines: list[str] = []
    quire = command(tmp_path / "quire", ours(1), ours(3), ours(4))
    rival = command(tmp_path / "rival", theirs(6), theirs(7))
    [found] = compare_commands(quire, rival, rounds=2, say=lines.append)
    assert lines == [
        "quire's turn",
        "the other engine's turn",
        "quire's turn",
        "the other engine's turn",
        "quire's turn",
    ]
    assert found.ratios == [6 / 2, 7 / 3.5] and found.ratio == 2.5
    assert found.drift == 4 and found.same_work


def test_output_of_the_rival_may_hold_bytes_that_are_no_text(tmp_path: Path) -> None:
    script = "import sys; sys.stdout.buffer.write(b'\\xff\\n'); sys.stdout.flush(); print(sys.argv[1])"
    rival = [sys.executable, "-S", "-c", script, json.dumps(theirs(2))]
    [found] = compare_commands(command(tmp_path / "quire", ours(1), ours(1)), rival, rounds=1, say=lambda text: None)
    assert found.theirs_s == [2]


def test_the_table_shows_when_the_work_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quire = command(tmp_path / "quire", ours(1), ours(1))
    race(quire, command(tmp_path / "rival", theirs(2, output=9)), 1, as_json=False)
    shown = capsys.readouterr().out
    assert "9 ≠ 10" in shown and "not the same work" in shown


def test_the_comparison_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quire = command(tmp_path / "quire", ours(1), ours(3))
    race(quire, command(tmp_path / "rival", theirs(4)), 1, as_json=True)
    [shown] = json.loads(capsys.readouterr().out)
    assert (shown["workload"], shown["ours_s"], shown["theirs_s"], shown["ratio"]) == ("nano", [1, 3], [4], 2)


def test_no_common_workload_and_a_failing_command_are_refused(tmp_path: Path) -> None:
    quire = command(tmp_path / "quire", ours(1), ours(1))
    other = command(tmp_path / "rival", {**theirs(1), "workload": "exp"})
    with pytest.raises(ConfigError, match="quire ran nano; the other engine, exp"):
        compare_commands(quire, other, rounds=1, say=lambda text: None)
    with pytest.raises(ConfigError, match="The command of quire ended with status 1"):
        compare_commands(quire, other, rounds=1, say=lambda text: None)  # no line of its script is left
    with pytest.raises(ConfigError, match="cannot be run"):
        compare_commands([str(tmp_path / "absent")], other, rounds=1, say=lambda text: None)


def test_only_lines_with_results_are_read() -> None:
    assert read_result('{"workload": "a", "seconds": 2, "output_tokens": 3}') == WorkloadResult("a", 2.0, 3)
    for line in ("", "[1]", "loading…", '{"start_s": 80}', '{"workload": "a", "seconds": "2", "output_tokens": 3}'):
        assert read_result(line) is None, line


def test_equal_runs_have_a_drift_of_one() -> None:
    assert CommandComparison("a", [2.0, 2.0], [2.0], {1}).drift == 1
