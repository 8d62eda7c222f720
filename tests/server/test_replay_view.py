"""A journal in the page /engine: any step of it, played, stepped and searched."""

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.cli.serve import listen
from quire.sched.journal.recorder import MAX_JOURNALS
from quire.sched.journal.records import MAGIC, ArrivalRecord
from quire.sched.journal.replay import Condition, Replayer, read_journal
from quire.server.replay_view import HOST, ReplayControl, ReplayPlayer, replay_server
from quire.sim.check.check import CheckReport, numpy_oracle, run_trial
from tests.server.scripted_servers import check_control, completion_body, scripted_here

SEED = 427  # a scenario with preemptions


class Uncloseable(io.BytesIO):
    def close(self) -> None:
        """Keeps what was written."""


@pytest.fixture(scope="module")
def recorded() -> bytes:
    file = Uncloseable()
    run_trial(SEED, CheckReport(0), numpy_oracle, journal=file)
    return file.getvalue()


@pytest.fixture
def journal(recorded: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "session.journal"
    path.write_bytes(recorded)
    return path


class Watched:
    """A player on a clock that moves when it is told to."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.player = ReplayPlayer(read_journal(path), lambda: self.now_s)

    def wait(self, seconds: float) -> dict[str, object]:
        self.now_s += seconds
        return self.player.describe(-1)

    def at(self, position: int) -> dict[str, object]:
        self.player.control(ReplayControl(position=position))
        return self.wait(0.1)


def where(view: dict[str, object]) -> object:
    return view["replay"]["position"]  # type: ignore[index]


def test_the_replayer_stops_after_each_absorbed_step(journal: Path) -> None:
    contents = read_journal(journal)
    replayer, steps = Replayer(contents), []
    while replayer.advance():
        steps.append(replayer.scheduler.last_absorbed)
        assert replayer.started_s <= replayer.now_s
    assert replayer.difference is None and contents.condition is Condition.COMPLETE
    assert len(steps) == contents.num_absorbed and steps == sorted(set(steps))


def test_a_position_shows_the_same_from_both_sides(journal: Path) -> None:
    watched = Watched(journal)
    onward = [watched.at(position) for position in range(75)]
    back = [watched.at(position) for position in range(74, -1, -1)]
    for there, again in zip(onward, reversed(back), strict=True):
        assert there == again
    assert onward[0]["steps"] == [] and len(onward[74]["steps"]) == 74  # type: ignore[arg-type]
    assert any(step["num_preemptions"] for step in onward[74]["steps"])  # type: ignore[attr-defined]
    assert any(view["rows"] for view in onward) and any(view["queue"] for view in onward)
    assert where(watched.at(10**9)) == 74, "beyond the end is the end"


def test_playing_follows_the_clock_and_ends_at_the_end(journal: Path) -> None:
    watched = Watched(journal)
    assert where(watched.wait(10)) == 0, "it does not start by itself"
    watched.player.control(ReplayControl(playing=True, speed=64))
    assert where(watched.wait(0.25)) == 16
    assert where(watched.wait(60)) == 48, "of the time in which no page asked, half a second counts"
    assert where(watched.wait(0.5)) == 74
    assert watched.player.status()["playing"] is False
    watched.player.control(ReplayControl(playing=True))
    assert where(watched.wait(0.25)) == 16, "played again from the start"
    watched.player.control(ReplayControl(playing=False))
    assert where(watched.wait(5)) == 16


def test_a_long_way_is_gone_in_slices(journal: Path) -> None:
    watched = Watched(journal)
    ticks = iter(range(10**6))
    watched.player = ReplayPlayer(read_journal(journal), lambda: next(ticks) * 0.02)  # every look at the clock is late
    watched.player.control(ReplayControl(position=74))
    positions = [where(watched.player.describe(-1)) for _ in range(40)]
    assert 0 < positions[0] < positions[1] < 74 and positions[-1] == 74  # type: ignore[operator]


def test_a_cut_journal_is_shown_up_to_the_cut(journal: Path, recorded: bytes) -> None:
    journal.write_bytes(recorded[: len(recorded) // 2])
    watched = Watched(journal)
    num_steps = watched.player.status()["num_steps"]
    assert isinstance(num_steps, int) and 0 < num_steps < 74
    assert watched.player.notice() == f"The journal is cut off; {num_steps} steps of it can be replayed."
    assert where(watched.at(10**6)) == num_steps


def test_a_changed_journal_ends_where_a_decision_differs(journal: Path, recorded: bytes) -> None:
    differing = None
    for place in range(len(MAGIC) + 1200, len(recorded) - 5):
        journal.write_bytes(recorded[:place] + bytes([recorded[place] ^ 1]) + recorded[place + 1 :])
        contents = read_journal(journal)
        replayer = Replayer(contents)
        while replayer.advance():
            pass
        if replayer.difference is not None and contents.num_absorbed > replayer.num_planned > 2:
            differing = replayer.difference
            break
    assert differing is not None
    watched = Watched(journal)
    last = where(watched.at(10**6))
    assert f"The replay ends after {last} steps: step {differing.step} is not as recorded." in watched.player.notice()
    assert where(watched.at(0)) == 0
    assert "is not as recorded" in watched.player.notice(), "it is known from then on"


@contextmanager
def replaying(journal: Path) -> Iterator[httpx.Client]:
    """A client of the real server over a new player, whose clock stands still."""
    player = ReplayPlayer(read_journal(journal), lambda: 0.0)
    with listen(HOST, 0) as listening:
        server = replay_server(player)
        serving = threading.Thread(target=server.run, args=([listening],))
        serving.start()
        try:
            with httpx.Client(base_url=f"http://{HOST}:{listening.getsockname()[1]}", timeout=20) as client:
                yield client
        finally:
            server.should_exit = True
            serving.join(20)
            assert not serving.is_alive()


@contextmanager
def events_of(client: httpx.Client, since: int = -1) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream."""
    with client.stream("GET", "/engine/events", params={"since": since}) as response:
        assert response.status_code == 200, response.read()
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def steps_of(event: dict[str, Any]) -> list[int]:
    return [step["step"] for step in event["steps"]]


def test_the_page_and_its_controls_over_http(journal: Path) -> None:
    with replaying(journal) as client:
        page = client.get("/engine")
        assert "script-src 'self'" in page.headers["content-security-policy"] and 'id="replay"' in page.text
        assert client.get("/").headers["location"] == "/engine"
        assert client.get("/pages/replay.js").status_code == 200
        moved = client.post("/replay", json={"position": 40})
        assert moved.json()["target"] == 40
        with events_of(client, since=30) as events:
            state = next(events)
        assert state["replay"]["position"] == 40 and state["replay"]["name"] == "session.journal"
        assert steps_of(state) == list(range(31, state["step"] + 1))
        assert {entry["tenant"] for entry in state["queue"]} == {"x", "y"}, "a journal hides no names"
        request = state["rows"][0]["request"]
        story = client.get(f"/engine/requests/{request}/explain").json()
        assert "arrived with" in story["lines"][0]


def test_a_control_is_answered_by_the_stream_at_once(journal: Path) -> None:
    """Of every viewer. A replay that stands still sends an event every ten seconds."""
    began_s = time.monotonic()
    with replaying(journal) as client, events_of(client) as one, events_of(client) as other:
        for events in (one, other):
            first = next(events)
            assert first["since"] == -1 and steps_of(first) == [] and first["replay"]["position"] == 0
        for position, since in ((40, -1), (50, 39), (20, -1), (74, 19)):
            client.post("/replay", json={"position": position}).raise_for_status()
            for events in (one, other):
                event = next(each for each in events if each.get("replay", {}).get("position") == position)
                assert event["since"] == since and steps_of(event) == list(range(since + 1, position)), position
    assert time.monotonic() - began_s < 10


def test_a_stop_ends_the_streams_of_a_replay(journal: Path, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn would wait for them, and complain of tasks that it cancels."""
    player = ReplayPlayer(read_journal(journal), lambda: 0.0)
    with listen(HOST, 0) as listening, httpx.Client(timeout=20) as client:
        server = replay_server(player)
        serving = threading.Thread(target=server.run, args=([listening],))
        serving.start()
        with client.stream("GET", f"http://{HOST}:{listening.getsockname()[1]}/engine/events") as response:
            lines = response.iter_lines()
            next(lines)
            server.should_exit = True
            last = [line for line in lines if line.startswith("data: ")][-1]
        serving.join(20)
    assert json.loads(last[6:])["error"]["code"] == "draining" and not serving.is_alive()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


WRONG = {
    "position": {"position": -1},
    "speed": {"speed": 0},
    "playing": {"playing": 7},
    "play": {"play": True},
}


def test_a_wrong_control_is_a_sentence(journal: Path) -> None:
    with replaying(journal) as client:
        for word, body in WRONG.items():
            refused = client.post("/replay", json=body)
            assert refused.status_code == 400 and word in refused.json()["error"]["message"], refused.text
        unknown = client.get("/engine/requests/99999/explain")
        assert unknown.status_code == 404 and "is not open at this step" in unknown.json()["error"]["message"]
        assert client.get("/engine/events?since=x").status_code == 400
        assert client.get("/engine/events", headers={"host": "elsewhere.example"}).status_code == 403
        assert client.get("/engine/state").status_code == 404, "nothing reads it here"


def test_a_server_records_what_the_page_replays(tmp_path: Path) -> None:
    path = tmp_path / "server.journal"
    with scripted_here(tmp_path, "--record", str(path)) as server, server.client() as client:
        for text in ("hi", "endless", "boom"):  # the last one fails alone
            client.post("/v1/completions", json=completion_body(text, max_tokens=30))
    contents = read_journal(path)
    assert contents.condition is Condition.COMPLETE and contents.num_absorbed > 30
    watched = Watched(path)
    state = watched.at(contents.num_absorbed)
    assert watched.player.notice() == "" and state["step"] == contents.num_absorbed - 1
    assert sum(isinstance(record, ArrivalRecord) for record in contents.records) == 3


def test_an_engine_without_a_place_for_its_journal_serves(tmp_path: Path) -> None:
    for name in ("j", *(f"j.{number}" for number in range(1, MAX_JOURNALS))):
        (tmp_path / name).touch()
    with scripted_here(tmp_path, "--record", str(tmp_path / "j")) as server, server.client() as client:
        check_control(client)
    assert (tmp_path / "j").stat().st_size == 0
