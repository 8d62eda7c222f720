"""Clients that do not read their response: what waits for them is bounded in bytes and in time."""

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest

from quire.server.http.protocol import ConnectionLimits, GuardedProtocol
from quire.server.http.slow_readers import ReaderLimits, ReaderWatch
from tests.server.http_app import AUTH_LINE, LARGE_BYTES, RunningServer, Timers, received_until_closed, running_server
from tests.server.server_process import wait_until

LIMITS = ConnectionLimits()
READERS = LIMITS.readers


def get(path: bytes, more: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: x\r\n" % path + AUTH_LINE + more + b"\r\n"


def deaf(server: RunningServer, text: bytes) -> socket.socket:
    """A connection that sends this and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(text)
    return connection


def unread_of(server: RunningServer) -> dict[ReaderWatch, int]:
    protocol = server.server.config.http_protocol_class
    assert issubclass(protocol, GuardedProtocol)
    return protocol.unread.readers


def fire(server: RunningServer, timers: Timers, delay_s: float) -> None:
    wait_until(lambda: timers.running(delay_s))  # set by the loop a moment after the output is known to wait
    (handle,) = timers.running(delay_s)
    handle_run = handle._run
    server.in_loop(handle_run)
    handle.cancel()


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def server(timers: Timers) -> Iterator[RunningServer]:
    with running_server(timers=timers) as server:
        yield server


def let_time_pass(server: RunningServer, timers: Timers) -> None:
    """As long as a client may accept nothing."""
    fire(server, timers, READERS.crowding_s)
    fire(server, timers, READERS.period_s - READERS.crowding_s)


def test_a_stream_that_is_not_read_is_cut_off(
    server: RunningServer, timers: Timers, caplog: pytest.LogCaptureFixture
) -> None:
    with deaf(server, get(b"/v1/flood")):
        wait_until(lambda: unread_of(server))
        assert sum(unread_of(server).values()) <= LIMITS.buffered_bytes + 8192 + 16  # the application waits
        with caplog.at_level(logging.WARNING, "quire"):
            let_time_pass(server, timers)
        assert server.application.left.wait(20)  # it is told, and ends its work
        wait_until(lambda: [each for each in server.records if each.error_code == "slow_reader"])
    [line] = [each for each in caplog.records if each.message == "slow_reader"]
    fields = line.__dict__["fields"]
    assert fields["reason"] == "stalled" and fields["unread_bytes"] > 0 and fields["key"] == "holder"
    [record] = server.records
    assert (record.status, record.request_id) == (499, fields["id"])
    assert server.cut == ["stalled"] and not unread_of(server)


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_a_whole_response_that_is_not_read_is_cut_off(server: RunningServer, timers: Timers, more: bytes) -> None:
    """The application is done with it, and a transport that closes waits for its buffer without a limit."""
    with deaf(server, get(b"/v1/large", more)) as connection:
        wait_until(lambda: unread_of(server))
        let_time_pass(server, timers)
        wait_until(lambda: not server.server.server_state.connections)
        with pytest.raises(ConnectionResetError):  # the kernel keeps nothing for it either
            while connection.recv(65536):
                pass
    assert server.cut == ["stalled"]


def test_a_client_that_reads_enough_gets_its_response(server: RunningServer, timers: Timers) -> None:
    with deaf(server, get(b"/v1/large", b"Connection: close\r\n")) as connection:
        received = 0
        for _ in range(3):
            wait_until(lambda: unread_of(server))
            [before] = unread_of(server).values()
            [reader] = unread_of(server)
            fire(server, timers, READERS.crowding_s)
            while before - reader.num_unread < READERS.period_bytes:
                received += len(connection.recv(4096))
            fire(server, timers, READERS.period_s - READERS.crowding_s)
        received += len(received_until_closed(connection))
    assert received > LARGE_BYTES and not server.cut


def test_too_many_unread_bytes_in_all_cut_the_largest() -> None:
    timers, limits = Timers(), ConnectionLimits(readers=ReaderLimits(total_bytes=LARGE_BYTES))
    with running_server(timers=timers, limits=limits) as server, deaf(server, get(b"/v1/flood")):
        wait_until(lambda: len(unread_of(server)) == 1)
        fire(server, timers, READERS.crowding_s)
        assert not server.cut
        with deaf(server, get(b"/v1/large")), deaf(server, get(b"/v1/large")):
            wait_until(lambda: len(unread_of(server)) == 3)
            first, second = timers.running(READERS.crowding_s)
            server.in_loop(first._run)
            assert server.cut == ["connections"]  # the one that has waited, and not the stream, which is small
            server.in_loop(second._run)
            assert len(unread_of(server)) == 2 and server.cut == ["connections"]


def test_a_client_that_reads_is_never_watched_for_long(server: RunningServer, timers: Timers) -> None:
    async def read() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(get(b"/v1/large", b"Connection: close\r\n"))
        received = len(await reader.read())
        writer.close()
        return received

    assert asyncio.run(read()) > LARGE_BYTES
    wait_until(lambda: not unread_of(server))
    assert not timers.running(READERS.crowding_s) and not server.cut
