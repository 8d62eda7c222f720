"""Raw bytes on a real socket: they get a 4xx or are accepted, and the next client is served."""

import gc
import inspect
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.http import protocol
from quire.server.http.protocol import ConnectionLimits
from tests.server.http_app import (
    KEY,
    RunningServer,
    Timers,
    first_response,
    received_until_closed,
    running_server,
    status_of,
)
from tests.server.server_process import wait_until
from tests.tiers import examples

HOST = b"Host: x\r\n"
AUTH = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
POST = b"POST /v1/echo HTTP/1.1\r\n" + HOST + AUTH
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(limits=ConnectionLimits(linger_s=0.5)) as server:
        yield server


MALFORMED = {
    "noise": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "HTTP/0.9": b"GET / HTTP/0.9\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/9.9": b"GET / HTTP/9.9\r\n" + HOST + b"\r\n",
    "version junk": b"GET / HTTP/one\r\n" + HOST + b"\r\n",
    "no method": b"/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "odd method": b"FROB / HTTP/1.1\r\n" + HOST + b"\r\n",
    "lower-case method": b"get / HTTP/1.1\r\n" + HOST + b"\r\n",
    "method with NUL": b"GE\x00T / HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "NUL in target": b"GET /\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "no target": b"GET  HTTP/1.1\r\n" + HOST + b"\r\n",
    "high bytes in target": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form": b"GET http://x/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute form elsewhere": b"GET http://169.254.169.254/latest HTTP/1.1\r\n" + HOST + b"\r\n",
    "authority form": b"GET x:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT": b"CONNECT x:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT with a path": b"CONNECT /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    "relative": b"GET health HTTP/1.1\r\n" + HOST + b"\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "header without colon": b"GET / HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n",
    "header without name": b"GET / HTTP/1.1\r\n" + HOST + b": value\r\n\r\n",
    "space before colon": b"GET / HTTP/1.1\r\n" + HOST + b"Name : value\r\n\r\n",
    "NUL in name": b"GET / HTTP/1.1\r\n" + HOST + b"Na\x00me: value\r\n\r\n",
    "NUL in value": b"GET / HTTP/1.1\r\n" + HOST + b"Name: va\x00lue\r\n\r\n",
    "bare CR in value": b"GET / HTTP/1.1\r\n" + HOST + b"Name: a\rb\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\n" + HOST + b"Name: a\r\n b\r\n\r\n",
    "first line indented": b" GET / HTTP/1.1\r\n" + HOST + b"\r\n",
    "length and chunked": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "two equal lengths": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nhello",
    "negative length": POST + b"Content-Length: -5\r\n\r\n",
    "plus length": POST + b"Content-Length: +5\r\n\r\nhello",
    "hex length": POST + b"Content-Length: 0x5\r\n\r\nhello",
    "huge length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "empty length": POST + b"Content-Length: \r\n\r\n",
    "gzip transfer": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "gzip and chunked transfer": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked then more": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "negative chunk size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "0x chunk size": CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "chunk size overflow": CHUNKED + b"fffffffffffffffff\r\n",
    "chunk longer than said": CHUNKED + b"1\r\nhello\r\n0\r\n\r\n",
    "chunk without its end": CHUNKED + b"5\r\nhelloXX0\r\n\r\n",
    "trailers": CHUNKED + b"5\r\nhello\r\n0\r\nAuthorization: Bearer x\r\n\r\n",
    "huge chunk extension": CHUNKED + b"5;" + b"a" * (1 << 20),
    "huge trailer": CHUNKED + b"0\r\nName: " + b"a" * (1 << 20),
    "header bomb": b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"a%d: b\r\n" % n for n in range(10_000)) + b"\r\n",
    "one huge header": b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * (1 << 20) + b"\r\n\r\n",
    "one huge name": b"GET / HTTP/1.1\r\n" + HOST + b"a" * (1 << 20),
    "huge target": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "empty lines": b"\r\n" * 20_000,
}  # fmt: skip
TOO_LARGE = {"header bomb", "one huge header", "one huge name", "huge target", "empty lines"}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(server: RunningServer, name: str) -> None:
    with server.connect() as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(MALFORMED[name])
        status = status_of(received_until_closed(connection))
    assert status == (431 if name in TOO_LARGE else 400)
    server.control()


def test_error_bodies_are_small_and_have_no_machine_paths(server: RunningServer) -> None:
    for text in MALFORMED.values():
        if len(text) < 1000:
            response = server.send(text)
            assert len(response) < 4096
            assert not re.search(rb"0x[0-9a-f]{6,}| object at |/usr/|/home/|Traceback", response)


@pytest.mark.parametrize("name", ["noise", "no Host", "header bomb", "trailers"])
def test_a_refusal_of_the_protocol_has_the_headers_of_every_response(server: RunningServer, name: str) -> None:
    with server.connect() as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(MALFORMED[name])
        headers = headers_of(received_until_closed(connection))
    assert headers["x-quire-request-id"] == headers["x-request-id"] and headers["x-content-type-options"] == "nosniff"
    server.control()
    assert headers["x-quire-request-id"] in {record.request_id for record in server.records}


def headers_of(response: bytes) -> dict[str, str]:
    lines = response.partition(b"\r\n\r\n")[0].decode("ascii").splitlines()[1:]
    assert len({line.partition(":")[0] for line in lines}) == len(lines)
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize(("num_headers", "status"), [(64, 401), (65, 431)])
def test_the_number_of_headers_is_limited(server: RunningServer, num_headers: int, status: int) -> None:
    lines = b"".join(b"a%d: b\r\n" % number for number in range(num_headers - 2))
    response = server.send(b"GET / HTTP/1.1\r\nConnection: close\r\n" + HOST + lines + b"\r\n")
    assert status_of(response) == status


@pytest.mark.parametrize(("more", "status"), [(0, 401), (1, 431)])
@pytest.mark.parametrize("piece", [1 << 20, 100])
def test_the_size_of_the_head_is_limited(server: RunningServer, more: int, status: int, piece: int) -> None:
    head = b"GET / HTTP/1.1\r\nConnection: close\r\n" + HOST + b"a: %b\r\n\r\n"
    head = head.replace(b"%b", b"b" * (ConnectionLimits().head_bytes - len(head) + 2 + more))
    assert len(head) == ConnectionLimits().head_bytes + more
    pieces = [head[start : start + piece] for start in range(0, len(head), piece)]
    assert status_of(server.send(*pieces)) == status


def test_a_body_in_the_same_packet_does_not_count_as_head(server: RunningServer) -> None:
    body = b" " * 200_000
    request = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert b'"length":200000' in server.send(request)


def test_chunks_are_read_whatever_their_size(server: RunningServer) -> None:
    end = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;x=y\r\na\r\n" * 20_000 + b"0\r\n\r\n"
    assert b'"length":20000' in server.send(POST + end)


@pytest.mark.parametrize("head", [b"Content-Length: 2\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
@pytest.mark.parametrize("together", [True, False])
def test_an_upgrade_offer_is_ignored(server: RunningServer, head: bytes, together: bool) -> None:
    """Java's HTTP client offers HTTP/2 with every first request, also with a body."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    body = b"{}" if b"Length" in head else b"2\r\n{}\r\n0\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(POST + offer + head + (body if together else b""))
        server.control()
        connection.sendall(b"" if together else body)
        assert b'"length":2' in first_response(connection)
        connection.sendall(POST + b"Connection: close\r\nContent-Length: 3\r\n\r\n{ }")
        assert b'"length":3' in received_until_closed(connection)


@pytest.mark.parametrize("more", [b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n", b"}", b"\x00\x01", POST + b"\r\n"])
@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_pipelined_bytes_get_one_response(server: RunningServer, more: bytes, close: bytes) -> None:
    response = server.send(POST + close + b"Content-Length: 2\r\n\r\n{}" + more)
    assert response.count(b"HTTP/1.1 200 OK") == 1 and b'"length":2' in response


def test_a_disconnect_after_pipelined_bytes_is_noticed() -> None:
    with running_server() as server:
        with server.connect() as connection:
            connection.sendall(b"GET /v1/endless HTTP/1.1\r\n" + HOST + AUTH + b"\r\nGET /health HTTP/1.1\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert server.application.left.wait(20)


def test_a_response_before_the_end_of_a_body_arrives_whole(server: RunningServer) -> None:
    body = b" " * (4 << 20)
    head = b"POST /v1/echo HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body)
    with server.connect() as connection:
        for _ in range(6):  # 24 MiB in all: more than may be thrown away, but not of one body
            connection.sendall(head + body)
            assert status_of(first_response(connection)) == 401


def test_a_connection_is_reused_after_an_early_response(server: RunningServer) -> None:
    head = b"POST /v1/echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        connection.recv(1)
        server.control()
        for _ in range(3):
            connection.sendall(b"{}" + head)  # the rest of one and the beginning of the next, in one piece
            server.control()
        connection.sendall(b"{}" + POST + b"Connection: close\r\nContent-Length: 3\r\n\r\n{ }")
        response = received_until_closed(connection)
    assert response.count(b" 401 Unauthorized\r\n") == 4 and b'"length":3' in response


def test_a_closed_connection_is_freed_without_a_garbage_collection(server: RunningServer) -> None:
    """A full collection of a server may be an hour away: connections that wait for one look like a leak."""

    def existing() -> int:
        return sum(isinstance(each, protocol.GuardedProtocol) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = existing()
        for _ in range(4):
            with server.connect() as connection:
                connection.sendall(POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")
                assert b'"length":2' in received_until_closed(connection)
        wait_until(lambda: existing() <= before)
    finally:
        gc.enable()


def test_expect_100_continue_is_refused_before_the_body(server: RunningServer) -> None:
    head = b"POST /v1/echo HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 99\r\n\r\n"
    assert status_of(server.send(head)) == 401


def test_a_stream_for_http_1_0_is_not_chunked(server: RunningServer) -> None:
    def record(version: bytes, more: bytes = b"Connection: close\r\n") -> tuple[bytes, bytes]:
        head, _, body = server.send(
            b"GET /v1/pieces HTTP/" + version + b"\r\n" + HOST + AUTH + more + b"\r\n"
        ).partition(b"\r\n\r\n")
        return head.lower(), body

    head, body = record(b"1.0", b"Connection: keep-alive\r\n")
    assert body == b"one two three"
    assert b"transfer-encoding" not in head and b"content-length" not in head and b"connection: close" in head
    head, body = record(b"1.1")
    assert b"transfer-encoding: chunked" in head and body.startswith(b"4\r\none \r\n") and body.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
def test_a_response_with_a_length_is_the_same_for_http_1_0(server: RunningServer, method: bytes) -> None:
    target = b"/v1/echo" if method == b"POST" else b"/health"
    response = server.send(method + b" " + target + b" HTTP/1.0\r\n" + AUTH + b"Content-Length: 2\r\n\r\n{}")
    assert response.startswith(b"HTTP/1.1 200 ")
    assert b"content-length: " in response and b"transfer-encoding" not in response


def test_a_stream_that_breaks_for_http_1_0_is_closed(server: RunningServer) -> None:
    response = server.send(b"GET /v1/broken_stream HTTP/1.0\r\n" + AUTH + b"\r\n")
    assert response.endswith(b"\r\n\r\nfirst")
    server.control()


# Time


def test_slow_loris_headers_are_cut_off() -> None:
    timers = Timers()
    with running_server(timers=timers) as server, server.connect() as connection:
        server.control()
        (first,) = timers.running(ConnectionLimits().head_s)
        for byte in (b"G", b"E", b"T", b" "):
            connection.sendall(byte)
            server.control()  # later than the byte, so that it has arrived
        assert timers.running(ConnectionLimits().head_s) == [first]  # no byte has bought more time
        server.in_loop(first._run)
        assert status_of(first_response(connection)) == 408
        server.in_loop(timers.running(ConnectionLimits().linger_s)[0]._run)
        assert connection.recv(1) == b""
        server.control()


def test_an_idle_connection_is_closed_without_a_reply() -> None:
    timers = Timers()
    with running_server(timers=timers) as server, server.connect() as connection:
        server.control()
        server.in_loop(timers.running(ConnectionLimits().head_s)[0]._run)
        assert connection.recv(1) == b""


def test_empty_lines_between_requests_do_not_hold_a_connection() -> None:
    timers = Timers()
    with running_server(timers=timers) as server, server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert b"200 OK" in first_response(connection)
        assert timers.running(ConnectionLimits().head_s) == []
        connection.sendall(b"\r\n")
        server.control()
        assert len(timers.running(ConnectionLimits().head_s)) == 1


def pass_time(server: RunningServer, timers: Timers, delay_s: float) -> None:
    """Fire the timer of one connection."""
    (handle,) = timers.running(delay_s)
    server.in_loop(handle._run)
    handle.cancel()  # it has run


def price_s(num_bytes: int) -> float:
    return num_bytes / ConnectionLimits().body_bytes_per_s


@pytest.mark.parametrize("head", [POST + b"Content-Length: 10\r\n\r\n", CHUNKED])
def test_a_body_that_never_comes_is_cut_off_and_the_application_notified(head: bytes) -> None:
    timers = Timers()
    with running_server(timers=timers) as server, server.connect() as connection:
        connection.sendall(head.replace(b"\r\n\r\n", b"\r\nX-Request-Id: mine\r\n\r\n"))
        server.control()
        pass_time(server, timers, ConnectionLimits().body_s)
        response = first_response(connection)
        assert status_of(response) == 408 and b"0 bytes in 30 s or more" in response and b"65536 bytes/s" in response
        server.control()
        assert sorted((each.route, each.status) for each in server.records) == [
            ("/v1/echo", n) for n in (200, 200, 408)
        ]
        (record,) = [each for each in server.records if each.status == 408]
        assert record.error_code == "request_timeout" and record.refused_early  # as in the response
        assert headers_of(response)["x-quire-request-id"] == record.request_id  # one id, in the log and for the client
        assert headers_of(response)["x-request-id"] == "mine" == record.label


@pytest.mark.parametrize("chunked", [False, True])
def test_a_slow_loris_body_is_cut_off(chunked: bool) -> None:
    timers = Timers()
    with running_server(timers=timers) as server, server.connect() as connection:
        connection.sendall(CHUNKED if chunked else POST + b"Content-Length: 100\r\n\r\n")
        server.control()
        first = timers.running(ConnectionLimits().body_s)
        for _ in range(5):
            connection.sendall(b"1\r\n \r\n" if chunked else b" ")
            server.control()
        assert timers.running(ConnectionLimits().body_s) == first  # no byte begins it anew
        pass_time(server, timers, ConnectionLimits().body_s)
        pass_time(server, timers, price_s(5))
        response = first_response(connection)
        assert status_of(response) == 408 and b"5 bytes in" in response


def test_a_body_that_never_comes_gets_an_error_of_its_api() -> None:
    timers = Timers()
    with running_server(timers=timers) as server, server.connect() as connection:
        connection.sendall(b"POST /v1/messages/echo HTTP/1.1\r\n" + HOST + AUTH + b"Content-Length: 10\r\n\r\n")
        server.control()
        pass_time(server, timers, ConnectionLimits().body_s)
        response = first_response(connection)
    record = headers_of(response)
    body = json.loads(response.partition(b"\r\n\r\n")[2])
    assert body["type"] == "error" and body["request_id"] == record["request-id"] == record["x-quire-request-id"]


def test_a_malformed_chunk_is_reported_with_the_status_sent(server: RunningServer) -> None:
    server.records.clear()
    response = server.send(CHUNKED, b"no number\r\n")
    server.control()
    (record,) = [each for each in server.records if each.status != 200]
    assert (status_of(response), record.route, record.status, record.error_code) == (
        400,
        "/v1/echo",
        400,
        "malformed_http",
    )
    assert headers_of(response)["x-quire-request-id"] == record.request_id


def test_a_body_that_makes_progress_gets_time() -> None:
    timers = Timers()
    with running_server(timers=timers) as server, server.connect() as connection:
        much, more = b" " * 1000, b" " * 64_000
        length = len(much) + len(more) + 2
        connection.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % length + much)
        server.control()
        pass_time(server, timers, ConnectionLimits().body_s)
        connection.sendall(b" ")
        server.control()
        pass_time(server, timers, price_s(len(much)))
        connection.sendall(more)
        server.control()
        pass_time(server, timers, price_s(1))
        assert len(timers.running(price_s(len(more)))) == 1
        connection.sendall(b" ")
        assert b'"length":%d' % length in received_until_closed(connection)
        assert timers.running(price_s(len(more))) == []


def test_a_fast_body_that_stalls_is_cut_off_after_twice_the_time() -> None:
    timers = Timers()
    with (
        running_server(timers=timers, limits=ConnectionLimits(body_bytes_per_s=10)) as server,
        server.connect() as connection,
    ):
        connection.sendall(POST + b"Content-Length: 5000\r\n\r\n" + b" " * 4999)  # worth 500 s
        server.control()
        for _ in range(2):
            pass_time(server, timers, ConnectionLimits().body_s)
        assert status_of(first_response(connection)) == 408


def test_a_connection_above_the_limit_gets_an_error_and_slots_are_released() -> None:
    with running_server(limits=ConnectionLimits(connections=2, turned_away=1, linger_s=0.5)) as server:
        held = [server.connect() for _ in range(2)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
            assert b"200 OK" in first_response(connection)
        response = server.send(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert status_of(response) == 503 and b"retry-after: 1\r\n" in response
        for connection in held:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
            connection.close()
        server.control()


@pytest.mark.parametrize("is_kept", [False, True])
def test_idle_connections_of_one_address_give_way_to_another(is_kept: bool) -> None:
    limits = ConnectionLimits(connections=3, turned_away=2, linger_s=0.5, head_s=1000)
    health = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    with running_server(limits=limits) as server, server.connect() as oldest:
        oldest.sendall(health if is_kept else b"G")
        if is_kept:
            assert b"200 OK" in first_response(oldest)
        with server.connect() as younger, server.connect() as youngest:
            for connection in (younger, youngest):
                connection.sendall(health)
                assert b"200 OK" in first_response(connection)
            assert status_of(server.send(health)) == 503  # of the same address
            address = ("127.0.0.1", server.port)
            with socket.create_connection(address, 20, source_address=("127.0.0.2", 0)) as other:
                other.sendall(health)
                assert b"200 OK" in first_response(other)
                assert oldest.recv(1) == b""  # closed in its favour
                for connection in (younger, youngest):
                    connection.sendall(health)
                    assert b"200 OK" in first_response(connection)
        networks = server.server.config.http_protocol_class.networks  # type: ignore[union-attr]
        server.control()
        wait_until(lambda: not networks)


def test_a_body_in_very_many_chunks_is_refused() -> None:
    """Each takes some microseconds of the event loop, however short it is."""
    with running_server(limits=ConnectionLimits(body_pieces=100)) as server:
        assert b'"length":100' in server.send(CHUNKED + b"1\r\n \r\n" * 100 + b"0\r\n\r\n")
        assert status_of(server.send(CHUNKED + b"1\r\n \r\n" * 101 + b"0\r\n\r\n")) == 400
        server.control()


def test_an_address_that_takes_every_place_for_errors_too_gives_way_to_another() -> None:
    """Connections above the limit that send nothing would keep their places for the time of `linger_s`."""
    limits = ConnectionLimits(connections=2, turned_away=2, linger_s=1000, head_s=1000)
    with running_server(limits=limits) as server, ExitStack() as connections:
        for _ in range(limits.connections + limits.turned_away):
            connections.enter_context(server.connect())
        with server.connect() as refused:
            assert received_until_closed(refused) == b""
        address = ("127.0.0.1", server.port)
        for _ in range(2):
            with socket.create_connection(address, 20, source_address=("127.0.0.2", 0)) as other:
                other.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
                assert b"200 OK" in first_response(other)


# Anything


PIECES = st.sampled_from(
    [
        b"GET", b"POST", b" ", b"/", b"/health", b"/v1/echo", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\n", b"\r",
        b"\x00", b"Host: x\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
        b"5\r\n", b"0\r\n\r\n", b"hello", b"\xff", b":", b";", b"\t", b"Expect: 100-continue\r\n",
        b"Upgrade: websocket\r\n", AUTH, POST, CHUNKED, b"X: " + b"y" * 5000 + b"\r\n",
    ]
)  # fmt: skip


@given(st.lists(PIECES | st.binary(max_size=40), max_size=30), st.booleans())
@settings(max_examples=examples(40, 150), deadline=None)
def test_any_bytes_leave_the_server_working(server: RunningServer, pieces: list[bytes], together: bool) -> None:
    with server.connect() as connection:
        with suppress(OSError):
            for piece in [b"".join(pieces)] if together else pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
        response = received_until_closed(connection)
    statuses = [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", response)]
    assert all(status < 500 for status in statuses), response
    server.control()


# What the protocol leans on in uvicorn


def test_uvicorn_still_has_the_overridden_methods() -> None:
    own = {name for name, value in vars(protocol.GuardedProtocol).items() if inspect.isfunction(value)}
    theirs = {name for name, value in vars(HttpToolsProtocol).items() if inspect.isfunction(value)}
    assert own & theirs == {
        "connection_made", "connection_lost", "data_received", "on_message_begin", "on_header", "on_headers_complete",
        "on_body", "on_message_complete", "on_response_complete", "shutdown", "_start_asgi_task",
        "pause_writing", "resume_writing", "timeout_keep_alive_handler",
    }  # fmt: skip
    state = set(vars(HttpToolsProtocol)) | set(re.findall(r"self\.(\w+)", inspect.getsource(HttpToolsProtocol)))
    clashing = {name for name in vars(protocol.GuardedProtocol) if not name.startswith("__")} & state - theirs
    assert not clashing
    assert {"cycle", "flow", "headers", "url", "parser", "connections", "transport", "loop"} <= state
    cycle = set(re.findall(r"self\.(\w+) = ", inspect.getsource(RequestResponseCycle)))
    assert {"disconnected", "keep_alive", "message_event", "response_started", "response_complete"} <= cycle
    assert "self.chunked_encoding: bool | None = None" in inspect.getsource(RequestResponseCycle)
    assert "expected_content_length" in cycle
    assert {"_unset_keepalive_if_required", "shutdown"} <= theirs
