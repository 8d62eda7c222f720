"""Disconnects of clients in the middle of a response, and shutdown of the server on a signal."""

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.server import server as lifecycle
from quire.server.async_engine import AsyncEngine
from tests.server.http_app import received_until_closed
from tests.server.local_server import LocalServer
from tests.server.many_clients import RawClient, RawResponse, request
from tests.server.scripted_servers import check_control, completion_body, scripted, scripted_here
from tests.server.server_process import PATIENCE_S, Running, is_alive, load, wait_until, wait_until_at_rest

ENDLESS = completion_body("endless", stream=True)


def wait_until_running(client: httpx.Client, num_requests: int) -> None:
    wait_until(lambda: load(client).get("num_requests_running") == num_requests)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_request(scripted_server: LocalServer, stream: bool) -> None:
    with scripted_server.client() as client:
        wait_until_at_rest(client)
        if stream:
            with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
                lines = response.iter_lines()  # a reference: without it the stream would be closed
                assert next(lines).startswith("data: ")
                wait_until_running(client, 1)
        else:
            body = json.dumps(completion_body("endless")).encode()
            with httpx.Client(base_url=scripted_server.url, timeout=0.5) as hasty, pytest.raises(httpx.ReadTimeout):
                hasty.post("/v1/completions", content=body)
        wait_until_at_rest(client)
        check_control(client)


DRAINING = ("--shutdown-timeout", "90", "--max-num-seqs", "4")


@pytest.fixture
def server(default_model_path: Path, tmp_path: Path) -> Iterator[Running]:
    """A server process that a test may stop."""
    with scripted(tmp_path, *DRAINING) as running:
        yield running


@pytest.fixture
def local(default_model_path: Path, tmp_path: Path) -> Iterator[LocalServer]:
    """A server of this process that a test may stop."""
    with scripted_here(tmp_path, *DRAINING) as running:
        yield running


def test_sigterm_drains_open_streams_and_refuses_new_requests(server: Running) -> None:
    engine = server.engine_pid
    with server.client() as client, server.client() as other:
        with client.stream(
            "POST", "/v1/completions", json=completion_body("endless", max_tokens=1600, stream=True)
        ) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: other.get("/ready").status_code == 503)
            assert other.get("/ready").json() == {"status": "draining"}
            assert other.get("/health").status_code == 200, "it still serves"
            refused = other.post("/v1/completions", json=completion_body("hi"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            rest = list(lines)
        events = [json.loads(line[6:]) for line in [first, *rest] if line.startswith("data: {")]
        assert rest[-2:] == ["data: [DONE]", ""]
        assert "".join(each["choices"][0]["text"] for each in events).startswith("on and on")
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0
    assert not is_alive(engine)
    assert server.output[-1] == "Stopped.\n"


def stopped_by_second_signal(server: Running | LocalServer, send_signal: Callable[[int], None], second: int) -> None:
    with server.client() as client, client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        lines = response.iter_lines()
        next(lines)
        send_signal(signal.SIGTERM)
        with server.client() as other:
            wait_until(lambda: other.get("/ready").status_code == 503)
        send_signal(second)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert not any("[DONE]" in line or '"finish_reason":"' in line for line in rest)


@pytest.mark.long  # below in threads, and a process that ends after a signal above
def test_a_second_signal_stops_at_once_and_sends_an_error(server: Running) -> None:
    stopped_by_second_signal(server, server.process.send_signal, signal.SIGINT)
    assert server.process.wait(60) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_the_drain(local: LocalServer, second: signal.Signals) -> None:
    stopped_by_second_signal(local, local.send_signal, second)
    local.wait()


def test_ctrl_c_stops_at_once_and_sends_an_error(local: LocalServer) -> None:
    with local.client() as client, client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        lines = response.iter_lines()
        next(lines)
        local.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "server_stopping"
    local.wait()


def test_a_client_that_is_still_sending_its_body_gets_an_error(local: LocalServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", local.port), PATIENCE_S) as connection:
        connection.sendall(head)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # the server waits for the body
        local.send_signal(signal.SIGTERM)
        response = received_until_closed(connection)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 5\r\n" in head, response
    assert json.loads(body)["error"]["code"] == "server_stopping"
    local.wait()


def test_a_drain_times_out(default_model_path: Path, tmp_path: Path) -> None:
    with scripted_here(tmp_path, "--shutdown-timeout", "0.2") as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "server_stopping"
        server.wait()


def test_a_blocked_client_is_disconnected_at_the_end_without_a_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "_CLOSE_S", 0.05)

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)
            await asyncio.sleep(0)  # let other tasks see that the reader is gone

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(pieces())(scope, receive, send)

    async def life() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=PATIENCE_S)
        server = lifecycle.DrainingServer(config, AsyncEngine(None, time.monotonic), drain_s=0)
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname(), limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readline()
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.wait_for(serving, PATIENCE_S / 2)
        writer.transport.abort()

    asyncio.run(life())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_drain_serves_queued_requests_too(local: LocalServer) -> None:
    """Four requests run and two are queued when the signal comes."""

    async def crowd() -> list[RawResponse]:
        lines = request(completion_body("endless", max_tokens=900, stream=True))
        raw_clients = [await RawClient.connect(local.port, lines) for _ in range(6)]
        with local.client() as client:
            wait_until(lambda: load(client).get("num_requests_waiting") == 2)
        local.send_signal(signal.SIGTERM)
        return [await raw_client.receive_all() for raw_client in raw_clients]

    assert all(events.complete and not events.failed for events in asyncio.run(crowd()))
    local.wait()
