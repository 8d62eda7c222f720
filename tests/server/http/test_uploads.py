"""Uploads: the application reads their bodies as they arrive, and nothing of them is left where they are cut off."""

import socket
from collections.abc import Iterator

import pytest

from quire.server.http.access import AccessOptions
from quire.server.http.protocol import ConnectionLimits
from tests.server.http_app import (
    AUTH_LINE,
    LARGE_BYTES,
    RunningServer,
    Timers,
    first_response,
    received_until_closed,
    running_server,
)
from tests.server.server_process import wait_until

OPTIONS = AccessOptions(max_body_bytes=1000, upload_routes=("/v1/echo",), max_upload_bytes=2 * LARGE_BYTES)
HEAD = b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n" + AUTH_LINE


JSON = b"application/json"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(options=OPTIONS) as running:
        yield running


def of_length(number: int) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % number


def test_a_body_reaches_the_application_as_it_arrives(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(of_length(10) + b"12345")
        wait_until(lambda: server.application.num_read == 5)
        connection.sendall(b"67890")
        assert b'"length":10' in first_response(connection)
        connection.sendall(of_length(LARGE_BYTES))
        connection.sendall(b"x" * LARGE_BYTES)  # more than the limit of other bodies
        assert b'"length":%d' % LARGE_BYTES in first_response(connection)
        usual = HEAD.replace(b"/v1/echo", b"/v1/messages/echo").replace(
            b"multipart/form-data; boundary=x", b"text/json"
        )
        connection.sendall(usual.replace(b"text/json", b"application/json") + b"Content-Length: 1001\r\n\r\n")
        assert status_of_any(first_response(connection)) == 413


def status_of_any(response: bytes) -> int:
    return int(response.split()[1])


def test_an_upload_has_its_own_limit_and_needs_a_key(server: RunningServer) -> None:
    """The server goes on reading for a while, so that the client sees the answer: it is not waited for."""
    other = of_length(10).replace(b"/v1/echo", b"/v1/messages") + b"x" * 9
    cases = ((413, of_length(2 * LARGE_BYTES + 1)), (401, of_length(10).replace(AUTH_LINE, b"")), (415, other))
    for status, head in cases:
        with server.connect() as connection:
            connection.sendall(head + b"x")
            assert status_of_any(connection.recv(4096)) == status


def test_a_client_that_leaves_is_noticed(server: RunningServer) -> None:
    before = len(server.records)
    with server.connect() as connection:
        connection.sendall(of_length(10) + b"123")
        wait_until(lambda: server.application.num_read == 3)
    wait_until(lambda: len(server.records) > before)
    assert server.records[-1].status == 499
    server.control()


def test_a_malformed_rest_ends_the_upload(server: RunningServer) -> None:
    before = len(server.records)
    with server.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        wait_until(lambda: server.application.num_read == 3)
        connection.sendall(b"no length\r\n")
        assert received_until_closed(connection) == b""
    wait_until(lambda: len(server.records) > before)
    assert server.records[-1].status == 499


def test_an_upload_that_stalls_is_ended() -> None:
    timers = Timers()
    with running_server(options=OPTIONS, timers=timers) as server, server.connect() as connection:
        connection.sendall(of_length(10) + b"123")
        wait_until(lambda: server.application.num_read == 3)
        fire(server, timers, ConnectionLimits().body_s)  # some bytes have come since its start: a little longer
        fire(server, timers, 3 / ConnectionLimits().body_bytes_per_s)
        assert closed(connection)
        wait_until(lambda: server.records)
        assert server.records[-1].status == 499


def fire(server: RunningServer, timers: Timers, delay_s: float) -> None:
    [handle] = timers.running(delay_s)
    server.in_loop(handle._run)


def closed(connection: socket.socket) -> bool:
    return received_until_closed(connection) == b""
