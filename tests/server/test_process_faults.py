"""Faults of the engine process, the front process and one row, over HTTP with real processes and signals."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.many_clients import RawClient, RawResponse, fetch, fetch_all, request
from tests.server.scripted_servers import CONTROL, check_control, completion_body, scripted
from tests.server.server_process import Running, counted, is_alive, load, wait_until, wait_until_at_rest
from tests.tiers import examples

NUM_STREAMS = 64


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that a test may damage, if it recovers."""
    with scripted(tmp_path_factory.mktemp("faults"), "--max-num-seqs", str(NUM_STREAMS + 8)) as running:
        yield running


def test_a_killed_engine_fails_all_requests_and_is_replaced(server: Running) -> None:
    async def crowd() -> tuple[list[RawResponse], list[RawResponse], RawResponse, int]:
        engine = server.engine_pid
        streams = [
            await RawClient.connect(server.port, request(completion_body("endless", stream=True)))
            for _ in range(NUM_STREAMS)
        ]
        plain = [await RawClient.connect(server.port, request(completion_body("endless"))) for _ in range(8)]
        for stream in streams:
            await stream.receive_until(b'"text"')
        with server.client() as client:
            await asyncio.to_thread(wait_until, lambda: load(client)["num_requests"] == NUM_STREAMS + 8)
        os.kill(engine, signal.SIGKILL)
        await streams[0].receive_until(b'"engine_lost"')  # all streams get the error at the same time
        late = await fetch(server.port, request(completion_body("hi")))
        with server.client() as client:
            ready = client.get("/ready").status_code
        responses = await asyncio.gather(*(raw_client.receive_all() for raw_client in [*streams, *plain]))
        return responses[:NUM_STREAMS], responses[NUM_STREAMS:], late, ready

    with server.client() as client:
        restarts = counted(client, "engine_restarts_total")
        streams, plain, late, ready = asyncio.run(crowd())
        assert (late.status, ready) == (503, 503), "all requests failed before there was another engine"
        assert late.retry_after_s and b'"engine_unavailable"' in late.body
        assert all(each.failed and not each.complete and b'"engine_lost"' in each.body for each in streams)
        assert all(each.status == 503 and each.retry_after_s and b'"engine_lost"' in each.body for each in plain)
        wait_until(lambda: client.get("/ready").status_code == 200)
        check_control(client)
        assert counted(client, "engine_restarts_total") == restarts + 1
        wait_until_at_rest(client)


def test_a_stopped_engine_is_not_ready_until_it_continues(server: Running) -> None:
    with server.client() as client:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_until(lambda: client.get("/ready").status_code == 503)  # and is killed much later
            assert client.get("/ready").json() == {"status": "stalled"}
            assert client.get("/health").status_code == 200, "it may come back by itself"
            refused = client.post("/v1/completions", json=completion_body("hi"))
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_until(lambda: client.get("/ready").status_code == 200)
        check_control(client)
        assert server.engine_pid == engine


def test_a_broken_row_fails_its_own_request_alone(server: Running) -> None:
    async def crowd() -> list[RawResponse]:
        kinds = [
            completion_body("boom"),
            completion_body("boom", stream=True),
            completion_body("dud"),
            completion_body("dud", stream=True),
            completion_body("hi"),
        ]
        return await fetch_all(server.port, [request(body) for body in kinds * 8])

    responses = asyncio.run(crowd())
    for plain, streamed, dud, streamed_dud, good in zip(*(iter(responses),) * 5, strict=True):
        for failed in (plain, dud, streamed_dud):  # before the first byte
            assert failed.status == 500 and b'"numerical_error"' in failed.body and not failed.complete
        assert streamed.failed and not streamed.complete and b'"numerical_error"' in streamed.body
        assert streamed.status == 200 and streamed.body.count(b" bang") == 7, "before the error"
        assert good.status == 200 and CONTROL.encode() in good.body
    with server.client() as client:
        wait_until_at_rest(client)
        assert client.get("/ready").status_code == 200


def test_requests_may_share_a_client_id(server: Running) -> None:
    sent = request(completion_body("secret"), headers={"X-Request-Id": "the-same"})
    responses = asyncio.run(fetch_all(server.port, [sent] * 32))
    assert all(each.status == 200 and "日本語".encode() in each.body for each in responses)
    assert all(b"\r\nx-request-id: the-same\r\n" in each.head for each in responses)
    own = {line for each in responses for line in each.head.splitlines() if line.startswith(b"x-quire-request-id: ")}
    assert len(own) == 32


def test_a_thousand_idle_connections_do_not_matter(server: Running) -> None:
    async def crowd() -> list[RawResponse]:
        idle = [await RawClient.connect(server.port, b"POST /v1/comp") for _ in range(1000)]
        responses = await fetch_all(server.port, [request(completion_body("hi"))] * 200)
        for raw_client in idle:
            raw_client.disconnect()
        return responses

    with server.client() as client:
        num_files = server.num_files
        assert all(each.status == 200 and CONTROL.encode() in each.body for each in asyncio.run(crowd()))
        wait_until(lambda: server.num_files <= num_files + 4)
        check_control(client)


def test_clients_that_do_not_read_affect_no_other_request(server: Running) -> None:
    """Many of them: their unread output is bounded, the engine finishes them, and other requests are served."""
    slow = [socket.socket() for _ in range(examples(16, 50))]
    sent = request(completion_body("endless", max_tokens=1000, stream=True, logprobs=5))
    with server.client() as client:
        wait_until_at_rest(client)
        before_bytes = server.resident_bytes
        for each in slow:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.connect(("127.0.0.1", server.port))
            each.sendall(sent)
        wait_until(lambda: load(client)["num_requests"] == len(slow))
        check_control(client)
        wait_until(lambda: load(client)["num_requests"] == 0)
        assert server.resident_bytes - before_bytes < 64 << 20
        check_control(client)
        for each in slow:
            each.close()
        wait_until_at_rest(client)


def test_a_killed_front_leaves_no_engine_process(server: Running) -> None:
    """The last test of this server."""
    engine = server.engine_pid
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not is_alive(engine), 30)
