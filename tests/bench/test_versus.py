"""Two commands in turns: who is compared with whom, and what is refused."""

import json
import sys
from pathlib import Path

import pytest

from quire.bench.versus import DuelHeat, DuelResult, duel, read_result
from quire.cli.bench_processes import race
from quire.core.errors import ConfigError

# Prints the next line of its script each time it is run.
TURNS = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
turn = len(list(folder.glob("turn*")))
(folder / f"turn{turn}").touch()
print("something else first")
print((folder / "script").read_text().splitlines()[turn])
"""


def contestant(folder: Path, *turns: dict[str, object]) -> list[str]:
    folder.mkdir()
    (folder / "script").write_text("\n".join(map(json.dumps, turns)))
    return [sys.executable, "-S", "-c", TURNS, str(folder)]


def ours(seconds: float, output: int = 10) -> dict[str, object]:
    return {"workload": "nano", "seconds": seconds, "output_tokens": output}


def theirs(seconds: float, output: int = 10) -> dict[str, object]:
    return {"workload": "nano", "wall_s": seconds, "out_tok": output}


def test_their_turn_is_compared_with_ours_around_it(tmp_path: Path) -> None:
    said: list[str] = []
    quire = contestant(tmp_path / "quire", ours(1), ours(3), ours(4))
    rival = contestant(tmp_path / "rival", theirs(6), theirs(7))
    [heat] = duel(quire, rival, rounds=2, say=said.append)
    assert said == ["quire's turn", "the rival's turn", "quire's turn", "the rival's turn", "quire's turn"]
    assert heat.ratios == [6 / 2, 7 / 3.5] and heat.ratio == 2.5
    assert heat.drift == 4 and heat.same_work


def test_what_a_rival_says_need_not_be_text(tmp_path: Path) -> None:
    loud = "import sys; sys.stdout.buffer.write(b'\\xff\\n'); sys.stdout.flush(); print(sys.argv[1])"
    rival = [sys.executable, "-S", "-c", loud, json.dumps(theirs(2))]
    [heat] = duel(contestant(tmp_path / "quire", ours(1), ours(1)), rival, rounds=1, say=lambda text: None)
    assert heat.theirs_s == [2]


def test_the_table_says_when_the_work_was_not_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quire = contestant(tmp_path / "quire", ours(1), ours(1))
    race(quire, contestant(tmp_path / "rival", theirs(2, output=9)), 1, as_json=False)
    told = capsys.readouterr().out
    assert "9 ≠ 10" in told and "not the same work" in told


def test_a_race_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quire = contestant(tmp_path / "quire", ours(1), ours(3))
    race(quire, contestant(tmp_path / "rival", theirs(4)), 1, as_json=True)
    [told] = json.loads(capsys.readouterr().out)
    assert (told["workload"], told["ours_s"], told["theirs_s"], told["ratio"]) == ("nano", [1, 3], [4], 2)


def test_nothing_in_common_and_a_failure_are_told(tmp_path: Path) -> None:
    quire = contestant(tmp_path / "quire", ours(1), ours(1))
    other = contestant(tmp_path / "rival", {**theirs(1), "workload": "exp"})
    with pytest.raises(ConfigError, match="quire ran nano; the rival, exp"):
        duel(quire, other, rounds=1, say=lambda text: None)
    with pytest.raises(ConfigError, match="The command of quire ended with status 1"):
        duel(quire, other, rounds=1, say=lambda text: None)  # its script is over
    with pytest.raises(ConfigError, match="cannot be run"):
        duel([str(tmp_path / "absent")], other, rounds=1, say=lambda text: None)


def test_only_results_are_read() -> None:
    assert read_result('{"workload": "a", "seconds": 2, "output_tokens": 3}') == DuelResult("a", 2.0, 3)
    for line in ("", "[1]", "loading…", '{"start_s": 80}', '{"workload": "a", "seconds": "2", "output_tokens": 3}'):
        assert read_result(line) is None, line


def test_a_heat_without_drift_has_one() -> None:
    assert DuelHeat("a", [2.0, 2.0], [2.0], {1}).drift == 1
