"""`quire check --record` and `quire replay`: one world written down and decided again; and checks in several jobs."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests import children
from tests.cli.commands import QUIRE, Shell


def test_a_recorded_world_is_replayed(quire: Shell, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert quire("check", "--trial", "427", "--record", str(journal)).status == 0
    said = quire("replay", str(journal))
    summary = json.loads(said.out.splitlines()[-1])
    assert said.status == 0
    assert (summary["differences"], summary["journal"]) == (0, "complete")
    assert summary["steps"] > 0 and summary["bytes"] == journal.stat().st_size


def test_a_changed_journal_is_status_1(quire: Shell, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    quire("check", "--trial", "427", "--record", str(journal))
    content = bytearray(journal.read_bytes())
    content[-1] ^= 1
    journal.write_bytes(content)
    said = quire("replay", str(journal))
    assert said.status == 1
    assert json.loads(said.out.splitlines()[-1])["journal"] == "damaged"


def test_what_is_no_journal_is_one_sentence(quire: Shell, tmp_path: Path) -> None:
    (tmp_path / "no-journal").write_text("hello")
    said = quire("replay", str(tmp_path / "no-journal"))
    assert said.status == 2
    assert "is no journal of quire" in said.err and "Traceback" not in said.err


def test_a_journal_that_cannot_be_written_is_one_sentence(quire: Shell, tmp_path: Path) -> None:
    said = quire("check", "--record", str(tmp_path / "nowhere" / "journal"))
    assert said.status == 2
    assert "cannot be written" in said.err and "Traceback" not in said.err


def test_several_jobs_add_up(quire: Shell) -> None:
    said = quire("check", "--steps", "400", "--seed", "5", "--jobs", "2")
    summary = json.loads(said.out.splitlines()[-1])
    assert said.status == 0
    assert summary["steps"] >= 400 and summary["trials"] >= 2 and summary["jobs"] == 2
    assert 0 < summary["event_pairs"] <= summary["event_pairs_possible"]
    assert sum(summary["events"].values()) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_jobs_do_not_outlive_the_check_that_started_them(number: int) -> None:
    command = [QUIRE, "check", "--steps", "1000000000", "--jobs", "2"]
    with children.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as check:
        jobs = Path(f"/proc/{check.pid}/task/{check.pid}/children")
        while len(jobs.read_text().split()) < 2:
            assert check.poll() is None
        check.send_signal(number)
        check.communicate(timeout=30)  # as long as one of them lives, stderr stays open
