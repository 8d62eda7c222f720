"""Early refusals by the head alone: sent by the protocol, reported as usual; the connection stays usable."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Scope

from quire.core.errors import QueueFull
from quire.server.http.access import AccessOptions
from quire.server.http.middleware import secure
from quire.server.http.protocol import ConnectionLimits, GuardedProtocol
from quire.server.http.request_context import route_path
from tests.server.http_app import (
    ADMIN_ROUTES,
    KEY,
    KEYED,
    Application,
    RunningServer,
    first_response,
    running_server,
    status_of,
)

BODY = b'{"prompt": "hi"}'
HEAD = b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\nContent-Length: %d\r\n" % len(BODY)
KEYED_HEAD = HEAD + b"Authorization: Bearer " + KEY.encode() + b"\r\n"
CLOSING = KEYED_HEAD + b"Connection: close\r\n\r\n"


class Queue:
    """In place of admission control: full until a request is released."""

    def __init__(self) -> None:
        self.full = True

    def check(self, scope: Scope) -> None:
        self.admit(scope)

    def admit(self, scope: Scope) -> None:
        if self.full and route_path(scope) in ("/v1/echo", "/v1/messages"):
            raise QueueFull(2, 2, "requests")


@pytest.fixture(scope="module")
def queue() -> Queue:
    return Queue()


@pytest.fixture(scope="module")
def shared(queue: Queue) -> Iterator[RunningServer]:
    with running_server(limits=ConnectionLimits(linger_s=0.5), admission=queue) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer, queue: Queue) -> RunningServer:
    queue.full = True
    shared.records.clear()
    return shared


def test_a_refusal_is_complete_and_reported_and_never_reaches_the_application(server: RunningServer) -> None:
    response = server.send(CLOSING, BODY)
    head, _, body = response.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"http/1.1 429 too many requests"
    assert {b"retry-after: 1", b"retry-after-ms: 1000", b"x-request-id: mine", b"connection: close"} <= set(lines)
    assert {b"x-content-type-options: nosniff", b"content-length: %d" % len(body)} <= set(lines)
    assert any(line.startswith(b"date: ") for line in lines)
    assert json.loads(body)["error"]["code"] == "queue_full"
    [record] = server.records
    assert (record.route, record.method, record.status, record.identity_name) == ("/v1/echo", "POST", 429, "holder")
    assert b"x-quire-request-id: " + record.request_id.encode() in lines and record.label == "mine"
    assert server.application.starlette.middleware_stack is None  # built for the first routed request


def test_authentication_comes_first(server: RunningServer) -> None:
    assert status_of(server.send(HEAD + b"Connection: close\r\n\r\n", BODY)) == 401
    assert [(record.status, record.identity_name) for record in server.records] == [(401, "nobody")]


def test_an_error_has_the_shape_of_its_api(server: RunningServer) -> None:
    response = server.send(CLOSING.replace(b"/v1/echo", b"/v1/messages"), BODY)
    assert b'"type": "rate_limit_error"' in response and response.startswith(b"HTTP/1.1 429 ")


def test_the_next_request_of_a_connection_is_served(server: RunningServer, queue: Queue) -> None:
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(KEYED_HEAD + b"\r\n" + BODY)
            assert status_of(first_response(connection)) == 429
        queue.full = False
        connection.sendall(KEYED_HEAD + b"\r\n" + BODY)
        assert b'"length":%d' % len(BODY) in first_response(connection)
    assert [record.status for record in server.records[:2]] == [429, 429]


def test_a_body_after_its_refusal_is_not_a_request(server: RunningServer, queue: Queue) -> None:
    with server.connect() as connection:
        connection.sendall(KEYED_HEAD + b"\r\n")
        assert status_of(first_response(connection)) == 429
        queue.full = False
        for place in range(len(BODY)):
            connection.sendall(BODY[place : place + 1])
        connection.sendall(KEYED_HEAD + b"\r\n" + BODY)
        assert first_response(connection).startswith(b"HTTP/1.1 200 OK")


def test_a_closing_client_may_finish_its_body(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(CLOSING)
        response = first_response(connection)
        assert status_of(response) == 429 and b"\r\nconnection: close\r\n" in response
        assert connection.recv(1) == b""
        connection.sendall(BODY)
    assert status_of(server.send(CLOSING, BODY)) == 429


def test_expect_100_continue_is_refused_without_a_body(server: RunningServer) -> None:
    response = server.send(KEYED_HEAD + b"Expect: 100-continue\r\n\r\n")
    assert response.startswith(b"HTTP/1.1 429 ") and b"\r\nconnection: close\r\n" in response
    assert b" 100 " not in response


@pytest.mark.parametrize("more", [KEYED_HEAD + b"\r\n" + BODY, b"noise\r\n\r\n"])
def test_bytes_before_the_response_are_ignored(server: RunningServer, more: bytes) -> None:
    response = server.send(KEYED_HEAD + b"\r\n" + BODY + more)
    assert response.count(b"HTTP/1.1 ") == 1 and response.startswith(b"HTTP/1.1 429 ")
    assert [record.status for record in server.records] == [429]


def test_a_refused_body_may_be_malformed(server: RunningServer) -> None:
    head = KEYED_HEAD.replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked")
    assert server.send(head + b"\r\nzz\r\n").startswith(b"HTTP/1.1 429 ")
    assert [record.status for record in server.records] == [429]


def test_a_response_to_head_has_no_body(server: RunningServer) -> None:
    response = server.send(b"HEAD /v1/full HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert response.startswith(b"HTTP/1.1 401 ") and response.endswith(b"\r\n\r\n")


def test_a_client_that_does_not_read_waits(server: RunningServer) -> None:
    """Backpressure: otherwise its refusals would pile up in this process."""

    def only_one() -> GuardedProtocol:
        [connection] = server.server.server_state.connections
        assert isinstance(connection, GuardedProtocol)
        return connection

    with server.connect() as connection:
        connection.sendall(KEYED_HEAD + b"\r\n" + BODY)
        assert status_of(first_response(connection)) == 429
        server.in_loop(lambda: only_one().pause_writing())
        connection.sendall(KEYED_HEAD + b"\r\n" + BODY)
        while not server.server.server_state.tasks:
            pass
        assert only_one().cycle.response_complete is False
        server.in_loop(lambda: only_one().resume_writing())
        assert status_of(first_response(connection)) == 429


HEADERS = st.lists(
    st.sampled_from(
        [
            (b"authorization", b"Bearer " + KEY.encode()), (b"x-api-key", b"wrong"), (b"x-request-id", b"mine"),
            (b"content-type", b"text/plain"), (b"content-type", b"application/json"),
            (b"content-length", b"99999999999"), (b"origin", b"https://elsewhere"), (b"host", b"here"),
        ]
    ),
    max_size=5,
)  # fmt: skip
PATHS = st.sampled_from(["/v1/echo", "/v1/messages", "/health", "/admin/pause", "/requests/1/explain", "/nowhere", "/"])


@given(st.sampled_from(["GET", "HEAD", "POST", "DELETE"]), PATHS, HEADERS)
def test_early_and_late_refusals_are_equal(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> None:
    def scope() -> Scope:
        return {"type": "http", "method": method, "path": path, "headers": [*headers], "query_string": b""}

    logger = secure(Application().starlette, keys=KEYED, options=AccessOptions(admin_routes=ADMIN_ROUTES))
    early, late = logger.check(scope(), replies=True), reply_of(logger, scope())
    if early is None:
        assert late.status not in (401, 403, 413, 415)
    else:
        assert (early.status, without_ids(early.headers)) == (late.status, without_ids(late.headers))


class AsgiReply:
    """The response of an application."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []


def reply_of(app: ASGIApp, scope: Scope) -> AsgiReply:
    records = AsgiReply()

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            records.status, records.headers = message["status"], message["headers"]

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return records


def without_ids(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if value == b"mine" or not name.endswith(b"request-id")]


def test_with_cors_a_refusal_has_its_headers_and_needs_no_body() -> None:
    options = AccessOptions(allowed_origins=("https://a.example",))
    head = HEAD + b"Origin: https://a.example\r\n\r\n"
    with running_server(options=options) as server, server.connect() as connection:
        connection.sendall(head)  # a body is announced, and never sent
        response = first_response(connection)
    assert status_of(response) == 401 and b"access-control-allow-origin: https://a.example\r\n" in response
