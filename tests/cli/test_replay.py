"""`quire check --record` and `quire replay`: one scenario recorded and decided again; and checks in several jobs."""

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from quire.core.errors import BrokenJournal
from quire.sched.journal.records import MAGIC, VERSION
from quire.sched.journal.replay import read_journal
from tests import children
from tests.cli.commands import QUIRE, Shell
from tests.tiers import long_only


def test_a_recorded_scenario_is_replayed(quire: Shell, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert quire("check", "--trial", "427", "--record", str(journal)).status == 0
    result = quire("replay", str(journal))
    summary = json.loads(result.out.splitlines()[-1])
    assert result.status == 0
    assert (summary["differences"], summary["journal"]) == (0, "complete")
    assert summary["steps"] > 0 and summary["bytes"] == journal.stat().st_size


def test_a_changed_journal_is_status_1(quire: Shell, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    quire("check", "--trial", "427", "--record", str(journal))
    content = bytearray(journal.read_bytes())
    content[-1] ^= 1
    journal.write_bytes(content)
    result = quire("replay", str(journal))
    assert result.status == 1
    assert json.loads(result.out.splitlines()[-1])["journal"] == "damaged"


def test_what_is_no_journal_is_one_sentence(quire: Shell, tmp_path: Path) -> None:
    (tmp_path / "no-journal").write_text("hello")
    result = quire("replay", str(tmp_path / "no-journal"))
    assert result.status == 2
    assert "is not a quire journal" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    "content, words",
    [
        (b"hello", "is not a quire journal"),
        (b"", "is not a quire journal"),
        (MAGIC, "its settings cannot be read"),
        (MAGIC + bytes((VERSION + 1,)), f"is a journal of version {VERSION + 1}; this quire reads version {VERSION}."),
        (MAGIC + bytes((VERSION,)) + b"\x03{}", "its settings cannot be read"),
    ],
)
def test_a_view_of_what_is_no_journal_is_one_sentence(quire: Shell, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "journal").write_bytes(content)
    result = quire("replay", str(tmp_path / "journal"), "--view")
    assert result.status == 2 and words in result.err and "Traceback" not in result.err


def test_a_view_needs_steps_and_a_port_needs_a_view(quire: Shell, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    quire("check", "--trial", "427", "--record", str(journal))
    assert "--port is for --view" in quire("replay", str(journal), "--port", "9000").err
    content = journal.read_bytes()
    for size in range(len(content)):
        with suppress(BrokenJournal):
            journal.write_bytes(content[:size])
            read_journal(journal)
            break
    result = quire("replay", str(journal), "--view")
    assert result.status == 2 and "holds no step (cut off): there is nothing to show." in result.err.replace("\n", " ")


def test_the_view_is_served_on_this_machine_until_ctrl_c(quire: Shell, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    quire("check", "--trial", "427", "--record", str(journal))
    command = [QUIRE, "replay", str(journal), "--view", "--port", "0"]
    with children.started(command, stderr=subprocess.PIPE, text=True) as view:
        assert view.stderr is not None
        words = view.stderr.readline().split()
        url = next(word for word in words if word.startswith("http://127.0.0.1:"))
        strangers = httpx.get(url + "/events", headers={"host": "stranger.example"})
        assert strangers.status_code == 403 and "DNS rebinding" in strangers.text
        with httpx.stream("GET", url + "/events", timeout=30) as response:
            events = (line for line in response.iter_lines() if line.startswith("data: "))
            assert json.loads(next(events)[6:])["replay"]["num_steps"] == 74
            view.send_signal(signal.SIGINT)
            assert "error" in list(events)[-1], "a page that is open does not hold it up"
        _, said = view.communicate(timeout=30)
    assert (view.returncode, said) == (0, "Stopped.\n")


def test_a_journal_that_cannot_be_written_is_one_sentence(quire: Shell, tmp_path: Path) -> None:
    result = quire("check", "--record", str(tmp_path / "nowhere" / "journal"))
    assert result.status == 2
    assert "nowhere; create it first" in result.err.replace("\n", " ") and "Traceback" not in result.err


def test_several_jobs_add_up(quire: Shell) -> None:
    result = quire("check", "--steps", "400", "--seed", "5", "--jobs", "2")
    summary = json.loads(result.out.splitlines()[-1])
    assert result.status == 0
    assert summary["steps"] >= 400 and summary["trials"] >= 2 and summary["jobs"] == 2
    assert 0 < summary["event_pairs"] <= summary["event_pairs_possible"]
    assert sum(summary["events"].values()) > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, *long_only([signal.SIGINT, signal.SIGTERM])])
def test_jobs_do_not_outlive_the_check_that_started_them(number: int) -> None:
    command = [QUIRE, "check", "--steps", "1000000000", "--jobs", "2"]
    with children.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as check:
        jobs = Path(f"/proc/{check.pid}/task/{check.pid}/children")
        while len(jobs.read_text().split()) < 2:
            assert check.poll() is None
        check.send_signal(number)
        check.communicate(timeout=30)  # stderr stays open until the last one has ended
