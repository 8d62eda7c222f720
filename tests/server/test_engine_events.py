"""The stream of the engine's state, over HTTP: differences, resuming, its bounds, and how it ends."""

import json
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server import admin
from quire.server.context import ServerState
from quire.server.http.protocol import GuardedProtocol
from quire.server.http.slow_readers import ReaderLimits
from quire.server.server import Server
from tests.server.http_app import received_until_closed
from tests.server.local_server import LocalServer
from tests.server.scripted_servers import check_control, completion_body, scripted_here
from tests.server.server_process import wait_until
from tests.server.several_models import answer, ask, several_here, statuses

ENDLESS = completion_body("endless", stream=True)
EVENTS = "/engine/events"


class Events:
    """An open stream, and what its events say together."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()
        self.state: dict[str, Any] = {}
        self.steps: list[int] = []
        self.id = ""

    def next(self) -> dict[str, Any]:
        """The next event, without comments."""
        for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "id":
                self.id = value
            if name == "data":
                event = json.loads(value)
                self.state |= event
                self.steps += [step["step"] for step in event.get("steps", ())]
                return event  # type: ignore[no-any-return]
        return {}

    def until(self, holds: Callable[[dict[str, Any]], object]) -> None:
        while not (self.state and holds(self.state)):
            assert self.next(), "the stream ended"

    def rest(self) -> list[dict[str, Any]]:
        """The events to its end."""
        return list(iter(self.next, {}))


@contextmanager
def watching(client: httpx.Client, **options: Any) -> Iterator[Events]:
    with client.stream("GET", EVENTS, **options) as response:
        assert response.status_code == 200, response.read()
        yield Events(response)


def state_of(server: LocalServer) -> ServerState:
    assert isinstance(server.server, Server)
    return server.server.state


def wait_until_unwatched(server: LocalServer) -> None:
    wait_until(lambda: state_of(server).watchers.total == 0)


@contextmanager
def running(client: httpx.Client) -> Iterator[None]:
    """A request that decodes meanwhile."""
    with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        lines = response.iter_lines()  # once it is collected its connection is closed
        next(lines)
        yield


@pytest.fixture
def server(default_model_path: Path, tmp_path: Path) -> Iterator[LocalServer]:
    """A server that a test may stop or change."""
    with scripted_here(tmp_path) as server:
        yield server


def test_the_first_event_is_the_state_and_the_others_what_changes(scripted_server: LocalServer) -> None:
    with scripted_server.client() as client, watching(client) as events:
        assert events.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert events.response.headers["x-accel-buffering"] == "no"
        first = events.next()
        once = client.get("/engine/state").json()
        assert first.keys() == {"since", *once}
        with running(client):
            events.until(lambda state: len(state["rows"]) == 1)
            seen = len(events.steps)
            rows = [events.next() for _ in range(3)]
            assert any("rows" not in event for event in rows), "a decoding row is described once"
            assert all("num_blocks" not in event for event in rows)
        assert len(events.steps) > seen and events.steps == sorted(set(events.steps)), "each step once"
        assert events.id == str(events.steps[-1])


@pytest.mark.parametrize("way", ["query", "header", "both"])
def test_a_stream_goes_on_after_the_step_that_is_named(scripted_server: LocalServer, way: str) -> None:
    with scripted_server.client() as client, running(client):
        with watching(client) as events:
            events.until(lambda state: len(events.steps) > 5)
            last = int(events.id)
        headers = {"Last-Event-ID": str(last)} if way != "query" else {}
        params = {"header": {}, "query": {"since": last}, "both": {"since": 0}}[way]  # a browser repeats the address
        with watching(client, headers=headers, params=params) as events:
            first = events.next()
            assert first["since"] == last and events.steps == list(range(last + 1, first["step"] + 1))
            assert first["num_blocks"], "the state is whole"


def test_what_no_stream_was_ever_named_is_refused_or_means_nothing(scripted_server: LocalServer) -> None:
    with scripted_server.client() as client:
        for wrong in ("x", "1.5", "9" * 30, "-", "--1", "1 2", "1e3", "\xb2", "0x10", "", "1\t"):
            header = [(b"last-event-id", wrong.encode("latin-1"))]
            refused = client.get(EVENTS, headers=header) if wrong.strip() == wrong else client.get(EVENTS + "?since=x")
            error = refused.json()["error"]
            assert refused.status_code == 400 and "must be the number of a step" in error["message"], wrong
        refused = client.get(EVENTS, params={"since": "x"})
        assert refused.json()["error"]["param"] == "since"
        assert client.get(EVENTS, headers={"Last-Event-ID": "x"}).json()["error"]["param"] == "Last-Event-ID"
        for number in (10**17, -5):  # of another engine, or before the first
            with watching(client, headers={"Last-Event-ID": str(number)}) as events:
                assert events.next()["num_blocks"] and events.state["since"] <= events.state["step"]
        assert client.head(EVENTS).headers["content-type"] == "text/event-stream; charset=utf-8"
        check_control(client)
    wait_until_unwatched(scripted_server)


def test_it_is_for_those_who_may_read_metrics(default_model_path: Path, tmp_path: Path) -> None:
    arguments = ("--api-key", "sk-one", "--admin-key", "sk-boss")
    with scripted_here(tmp_path, *arguments) as server, server.client() as client:
        for path in (EVENTS, "/metrics", "/engine/state"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers={"authorization": "Bearer sk-two"}).status_code == 401, path
        for key in ("sk-one", "sk-boss"):
            with watching(client, headers={"authorization": f"Bearer {key}"}) as events:
                assert events.next()["num_blocks"]
    refused = httpx.Headers({"origin": "https://elsewhere.example"})
    with scripted_here(tmp_path) as server, server.client(headers={"host": "elsewhere.example"}) as client:
        assert client.get(EVENTS, headers=refused).status_code == 403, "without keys, names of others are refused"


def test_other_names_are_not_told_to_a_key(default_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-ada name=ada\nsk-bob name=bob\n")
    arguments = ("--api-key-file", str(tmp_path / "keys"), "--max-num-seqs", "1")
    with (
        scripted_here(tmp_path, *arguments) as server,
        server.client(headers={"authorization": "Bearer sk-ada"}) as ada,
        running(ada),
        running_too(server, "bob"),
        watching(ada) as events,
    ):
        events.until(lambda state: state["queue"])
        assert events.state["queue"][0]["tenant"] == "others"


@contextmanager
def running_too(server: LocalServer, name: str) -> Iterator[None]:
    """A request of another key, which waits."""
    text = json.dumps(ENDLESS).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-{name}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(head.encode() + text)
        yield


def test_two_viewers_see_the_same_and_ask_once(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = counted_questions(server, monkeypatch)
    with server.client() as client, watching(client) as one, watching(client) as other, running(client):
        for events in (one, other):
            events.until(lambda state: len(state["rows"]) == 1)
            events.until(lambda state: len(state["steps"]) > 10)
        most = max(one.state["step"], other.state["step"])
        for events in (one, other):
            events.until(lambda state: state["step"] >= most)
        together = sorted(set(one.steps) & set(other.steps))
        assert len(together) > 10 and together == list(range(together[0], together[-1] + 1))
    wait_until_unwatched(server)
    num_asked = len(questions)
    with server.client() as client:
        check_control(client)  # it works, unwatched
        assert len(questions) == num_asked, "nothing asks when nobody looks"


def counted_questions(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []
    engine = state_of(server).engine
    query: Callable[[str, int], Awaitable[bytes]] = engine.query

    async def counted(what: str, number: int = 0) -> bytes:
        asked.append(number)
        return await query(what, number)

    monkeypatch.setattr(engine, "query", counted)
    return asked


def test_streams_are_bounded_and_take_no_place_of_a_request(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MAX_WATCHERS", 2)
    with server.client() as client, watching(client) as one:
        assert one.next()
        with watching(client) as two:
            assert two.next()
            refused = client.get(EVENTS)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (429, "too_many_streams")
            assert "the limit is 2" in error["message"] and refused.headers["retry-after"] == "5"
            assert client.get("/load").json()["server_load"] == 0
            check_control(client)
        wait_until(lambda: state_of(server).watchers.total == 1)
        with watching(client) as three:
            assert three.next()
    wait_until_unwatched(server)


def test_a_reader_that_does_not_read_is_cut_and_the_others_go_on(server: LocalServer) -> None:
    protocol = server._http.config.http_protocol_class
    assert issubclass(protocol, GuardedProtocol)
    protocol.unread.limits = ReaderLimits(period_s=0.4, crowding_s=0.1)
    state_of(server).engine_state._period_s = lambda: 0.02
    with server.client() as client, running(client), socket.socket() as deaf, watching(client) as events:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(20)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /engine/events HTTP/1.1\r\nHost: x\r\n\r\n")
        events.until(lambda state: state_of(server).watchers.total == 2)
        events.until(lambda state: state_of(server).watchers.total == 1)
        assert b'"since":-1' in received_until_closed(deaf)
        assert events.next()
        page = client.get("/metrics").text
        assert 'quire_slow_readers_total{reason="stalled"} 1.0' in page


def test_an_engine_that_is_lost_ends_the_stream_with_its_reason(server: LocalServer) -> None:
    with server.client() as client, watching(client) as events:
        events.next()
        supervisor = state_of(server).supervisor
        supervisor._process._process.kill()  # type: ignore[attr-defined]
        [error] = [event["error"] for event in events.rest() if "error" in event]
        assert error["code"] in ("engine_lost", "engine_unavailable")
    wait_until_unwatched(server)


def test_a_drain_ends_streams_at_once_and_goes_on(server: LocalServer) -> None:
    with server.client() as client, server.client() as other:
        with running(other), watching(client) as events:
            events.next()
            server.send_signal(signal.SIGTERM)
            assert events.rest()[-1]["error"]["code"] == "draining", "while a request still runs"
            assert client.get("/ready").json() == {"status": "draining"}
            refused = client.get(EVENTS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            assert state_of(server).engine.num_requests == 1
        server.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_does_not_wait_for_streams(server: LocalServer, number: signal.Signals) -> None:
    state_of(server).engine_state._period_s = lambda: 1e6  # it never ends by itself
    with server.client() as client, watching(client) as events:
        events.next()
        server.send_signal(number)
        assert events.rest()[-1]["error"]["code"] == "draining"
        server.wait()


def test_of_several_models_the_stream_is_of_one_and_holds_none(default_model_path: Path, tmp_path: Path) -> None:
    with several_here(tmp_path, a={}, b={}) as server, server.client() as client:
        refused = client.get(EVENTS, params={"model": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        assert client.get(EVENTS, params={"model": "c"}).status_code == 404
        assert answer(ask(client, "a")) == "I am a."
        with watching(client, params={"model": "a"}) as named:
            named.next()
            assert answer(ask(client, "b")) == "I am b.", "one fits: the other is unloaded, though it is watched"
            assert named.rest()[-1]["error"]["code"] in ("model_unavailable", "engine_lost", "engine_unavailable")
        with watching(client) as latest:
            assert latest.next()["num_blocks"]
        assert statuses(client) == {"a": "unloaded", "b": "loaded"}


def test_without_a_name_the_stream_follows_the_model_that_was_used_last(
    default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MAX_WATCHERS", 2)
    with several_here(tmp_path, "--models-max", "2", a={}, b={}) as server, server.client() as client:
        for name in "ab":
            answer(ask(client, name))
        with watching(client) as events, watching(client, params={"model": "a"}) as other:
            assert events.next() and other.next()
            answer(ask(client, "a", max_tokens=1))
            while "num_blocks" not in (event := events.next()):  # the state is whole again
                assert event
            assert client.get(EVENTS, params={"model": "b"}).status_code == 429, "the bound is of all models"
        server.send_signal(signal.SIGTERM)
        server.wait()


def test_behind_replicas_the_stream_is_of_one_that_runs(default_model_path: Path, tmp_path: Path) -> None:
    with (
        scripted_here(tmp_path, "--replicas", "2") as server,
        server.client() as client,
        running(client),
        watching(client) as events,
    ):
        assert events.next()["num_blocks"] and events.next()


def test_a_stream_that_says_nothing_is_kept_alive(server: LocalServer) -> None:
    state = state_of(server)
    state.keep_alive_s = 0.05
    state.engine_state._period_s = lambda: 1e6
    with server.client() as client, client.stream("GET", EVENTS) as response:
        lines = response.iter_lines()
        found = [next(line for line in lines if line.startswith(":")) for _ in range(2)]
    assert found == [": keep-alive"] * 2
    wait_until_unwatched(server)
