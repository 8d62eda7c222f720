"""Authentication, request ids, body limits and error replies: without a key only /health and /ready respond."""

import io
import itertools
import json
import logging
import re
import urllib.parse
from collections.abc import Iterator

import httpx
import pytest
from starlette.routing import Route

from quire.server.http.access import AccessOptions
from quire.server.http.auth import ADMIN, KeyRing
from quire.server.http.errors import sanitized
from quire.server.http.logs import JsonLines
from quire.server.http.middleware import METHODS
from quire.server.http.request_context import OTHER
from tests.server.http_app import (
    ADMIN_KEY,
    ADMIN_ROUTES,
    BEARER,
    KEY,
    SECRET,
    Application,
    RunningServer,
    first_response,
    running_server,
)

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(options=AccessOptions(LIMIT, admin_routes=ADMIN_ROUTES)) as server:
        yield server


@pytest.fixture(scope="module")
def open_server() -> Iterator[RunningServer]:
    with running_server(keys=KeyRing()) as server:
        yield server


@pytest.fixture(scope="module")
def anonymous(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def holder(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client(**BEARER) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, str]:
    assert set(response.json()) == {"error"}
    assert len(response.content) < 4096
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error  # type: ignore[no-any-return]


# Keys


def paths() -> list[str]:
    routes = [route for route in Application().starlette.routes if isinstance(route, Route)]
    served = [route.path.replace("{id}", "1").replace("{name:path}", "a/b") for route in routes]
    return [*served, "/nowhere", "/admin", "/admin/nothing", "/docs", "/openapi.json"]


@pytest.mark.parametrize("method", [*sorted(METHODS), "PROPFIND", "TRACE"])
def test_no_route_works_without_a_key(anonymous: httpx.Client, method: str) -> None:
    for path in paths():
        status = anonymous.request(method, path).status_code
        assert status == (200 if path in ("/health", "/ready") and method in ("GET", "HEAD") else 401), path


def mutations() -> list[tuple[str, dict[str, str]]]:
    """Variants of paths and headers that have bypassed authentication in other servers."""
    targets = [
        "//v1/echo", "/./v1/echo", "/health/../v1/echo", "/health/%2e%2e/v1/echo", "/health%2f..%2fv1/echo",
        "/health/..;/v1/echo", "/health;/v1/echo", "/health%00", "/health%00/v1/echo", "/health/", "//health",
        "/health//", "/HEALTH", "/Health", "/health%20", "/%20health", "/health%09", "/health%0a", "/health%0d%0a",
        "/health.", "/health.json", "/health%23", "/health%3f", "/health%5c..%5cv1%5cecho", "/ready/", "//ready",
        "/ready/../metrics", "/%2e/v1/echo", "/v1/%65cho", "/v1%2fecho", "/%2fv1/echo", "/v1/echo%20", "/v1//echo",
        "/%c0%afhealth", "/%ff", "/health%ff", "/%252e%252e/health", "/health%252f", "/heal%74h/", "/ⅼhealth",
        "/metrics?x=/health", "/metrics?/ready", "/v1/echo?key=health", "/v1/models/..%2f..%2fhealth", "/healthz",
        "/healthy", "/readyz", "/ready1", "/he/alth", "/static/../health/", "/.health", "/health%7f", "/\\health",
    ]  # fmt: skip
    headers = [
        {}, {"host": "health"}, {"host": "x/health"}, {"host": "x/health?"}, {"x-original-url": "/health"},
        {"x-forwarded-prefix": "/health"}, {"x-rewrite-url": "/health"}, {"x-forwarded-for": "127.0.0.1"},
        {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer "},
        {"authorization": "Bearer null"}, {"authorization": KEY},
        {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY}x"}, {"authorization": f"Bearer {KEY.upper()}"}, {"x-api-key": ""},
        {"x-api-key": KEY[:-1]}, {"api-key": KEY}, {"cookie": f"authorization=Bearer {KEY}"},
    ]  # fmt: skip
    return [*itertools.product(targets, headers[:4]), *itertools.product(["/v1/echo", "/metrics", "/"], headers)]


def test_no_variant_of_a_path_or_header_bypasses_authentication(server: RunningServer) -> None:
    assert len(mutations()) > 200
    for target, headers in mutations():
        head = {"host": "x", "connection": "close", **headers}
        written = urllib.parse.quote(target, safe="/%?=;.\\&")
        lines = [f"GET {written} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        response = server.send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        assert response.startswith(b"HTTP/1.1 401 "), (target, headers, response[:100])


@pytest.mark.parametrize(
    "headers",
    [
        BEARER,
        {"authorization": f"bearer   {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer wrong", "x-api-key": KEY},
        {"authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
        {"authorization": f"Bearer {ADMIN_KEY}"},
    ],
)
def test_a_valid_key_is_accepted(anonymous: httpx.Client, headers: dict[str, str]) -> None:
    response = anonymous.get("/v1/models/x", headers=headers)
    assert response.status_code == 200
    assert response.json()["holder"] == ("admin" if ADMIN_KEY in str(headers) else "holder")


def test_the_application_never_receives_a_key(holder: httpx.Client) -> None:
    seen = holder.post("/v1/echo", json={}, headers={"x-api-key": KEY, "x-other": "1"}).json()["headers"]
    assert "x-other" in seen and not {"authorization", "x-api-key"} & set(seen)


def test_a_401_explains_how_to_send_a_key_and_quotes_none(anonymous: httpx.Client) -> None:
    response = anonymous.get("/metrics", headers={"authorization": "Bearer sk-wrong-and-secret"})
    assert error_of(response)["code"] == "invalid_api_key"
    assert "Authorization: Bearer KEY" in response.text and "sk-" not in response.text
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/requests/7/explain", "/admin/pause", "/admin/pause/", "/admin", "/admin/nothing"])
def test_admin_routes_need_the_admin_key(anonymous: httpx.Client, path: str) -> None:
    assert anonymous.get(path).status_code == 401
    refusal = anonymous.get(path, headers=BEARER)
    assert (refusal.status_code, error_of(refusal)["code"]) == (403, "admin_only")
    assert anonymous.get(path, headers={"x-api-key": ADMIN_KEY}).status_code in (200, 307, 404)


def test_a_server_without_keys_refuses_admin_routes(open_server: RunningServer) -> None:
    with open_server.client() as client:
        assert client.get("/v1/models/x", headers={"authorization": "Bearer none"}).json() == {"holder": "anonymous"}
        refusal = client.get("/admin/pause", headers={"authorization": "Bearer none"})
        assert refusal.status_code == 403 and "--admin-key" in error_of(refusal)["message"]


def test_a_server_of_this_machine_without_keys_explains_requests() -> None:
    """What is read there is the user's own; nothing can be changed."""
    for host, status in (("127.0.0.1", 200), ("::1", 200), ("localhost", 200), ("0.0.0.0", 403), ("box.lan", 403)):
        options = AccessOptions(admin_routes=ADMIN_ROUTES, own_host=host)
        with running_server(keys=KeyRing(), options=options) as server:
            sent = b"%b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            refused = server.send(sent % b"GET /requests/7/explain").startswith(b"HTTP/1.1 403 ")
            assert refused == (status == 403), host
            assert server.send(sent % b"POST /admin/pause").startswith(b"HTTP/1.1 403 ")


def test_an_admin_key_alone_closes_only_admin_routes() -> None:
    with running_server(keys=KeyRing([(ADMIN_KEY, ADMIN)])) as server, server.client() as client:
        assert client.get("/metrics").json() == {"holder": "anonymous"}
        assert client.get("/admin/pause").status_code == 401
        assert client.get("/admin/pause", headers={"x-api-key": ADMIN_KEY}).json() == {"holder": "admin"}


def test_a_root_path_keeps_the_same_routes_closed() -> None:
    with running_server(root_path="/api") as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/admin/pause", headers=BEARER).status_code == 403
        assert client.get("/metrics", headers=BEARER).status_code == 200


# Bodies


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonx", 415),
        ("text/plain; application/json", 415),
    ],
)
def test_a_content_type_is_json_or_absent(holder: httpx.Client, kind: str | None, status: int) -> None:
    response = holder.post("/v1/echo", content=b"{}", headers={"content-type": kind} if kind else {})
    assert response.status_code == status
    if status == 415:
        assert error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("coding", "status"),
    [("", 200), ("identity", 200), ("gzip", 415), ("Deflate", 415), ("gzip, br", 415), ("\xff", 415)],
)
def test_a_compressed_body_is_refused(holder: httpx.Client, coding: str, status: int) -> None:
    response = holder.post("/v1/echo", content=b"{}", headers=[(b"content-encoding", coding.encode("latin-1"))])
    assert response.status_code == status
    if status == 415:
        assert error_of(response)["code"] == "unsupported_media_type"
        assert "Content-Encoding" in error_of(response)["message"]


@pytest.mark.parametrize("headers", [{"content-type": "multipart/form-data; boundary=x"}, {"content-encoding": "gzip"}])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/files", 404), ("PUT", "/v1/echo", 405), ("POST", "/metrics", 405), ("POST", "/v1/echo", 415)],
)
def test_what_is_not_served_is_not_found_whatever_its_body(
    holder: httpx.Client, method: str, path: str, status: int, headers: dict[str, str]
) -> None:
    assert holder.request(method, path, content=b"--x--", headers=headers).status_code == status


def test_a_content_length_above_the_limit_reads_no_body(server: RunningServer, holder: httpx.Client) -> None:
    server.application.num_read = 0
    response = holder.post("/v1/echo", content=b" " * (LIMIT + 1))
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert str(LIMIT) in response.text and server.application.num_read == 0
    assert holder.post("/v1/echo", content=b" " * LIMIT).json()["length"] == LIMIT


def test_a_body_without_a_length_is_read_up_to_the_limit(server: RunningServer) -> None:
    head = (
        b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n"
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        for _ in range(10 * LIMIT // 0x10000):
            connection.sendall(chunk)
        response = first_response(connection)
    assert response.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in response
    assert server.application.num_read <= LIMIT


# Ids


@pytest.mark.parametrize("label", ["mine", "!", "~" * 128, "http://169.254.169.254/", "../../etc"])
def test_the_clients_request_id_is_sent_back(server: RunningServer, holder: httpx.Client, label: str) -> None:
    response = holder.get("/v1/models/x", headers={"x-request-id": label})
    assert response.headers["x-request-id"] == label
    own = response.headers["x-quire-request-id"]
    assert re.fullmatch(r"[a-z0-9]{16}", own)
    assert (server.records[-1].request_id, server.records[-1].label) == (own, label)


@pytest.mark.parametrize("label", [b"", b"a b", b"x" * 129, b"caf\xe9", b"tab\there"])
def test_an_invalid_client_request_id_is_ignored(holder: httpx.Client, label: bytes) -> None:
    response = holder.get("/v1/models/x", headers={b"x-request-id": label})
    assert response.headers["x-request-id"] == response.headers["x-quire-request-id"]


def test_request_ids_are_unique(holder: httpx.Client) -> None:
    ids = {holder.get("/health", headers={"x-request-id": "same"}).headers["x-quire-request-id"] for _ in range(50)}
    assert len(ids) == 50


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/broken", "/v1/full", "/v1/echo", "/admin"])
def test_every_response_has_an_id_and_the_security_headers(holder: httpx.Client, path: str) -> None:
    headers = holder.get(path).headers
    assert headers["x-request-id"] and headers["x-content-type-options"] == "nosniff"
    assert headers.get_list("x-request-id") == [headers["x-request-id"]]


# Errors


def test_an_error_decides_its_status_and_headers(holder: httpx.Client) -> None:
    assert error_of(holder.get("/nowhere"))["message"] == "GET /nowhere is not served here."
    wrong_method = holder.get("/v1/echo")
    assert wrong_method.status_code == 405 and wrong_method.headers["allow"] == "POST"
    assert error_of(wrong_method)["code"] == "not_served"
    full = holder.get("/v1/full")
    assert (full.status_code, error_of(full)["code"]) == (429, "queue_full")
    assert (full.headers["retry-after"], full.headers["retry-after-ms"]) == ("1", "1000")
    assert "x-should-retry" not in full.headers


def test_anthropic_errors_have_their_own_shape_and_no_machine_paths(holder: httpx.Client) -> None:
    response = holder.post("/v1/messages", json={})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["request_id"] == response.headers["x-quire-request-id"]
    assert body["error"]["message"].startswith("A bad prompt from a path at an address: ")
    assert len(response.content) < 4096
    refused = httpx.post(f"{holder.base_url}/v1/messages", json={}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_a_path_of_this_machine_ends_before_the_full_stop() -> None:
    assert sanitized("None at /home/me/a.gguf. Use /tmp/b, or /opt/c.") == "None at a path. Use a path, or a path."


def test_an_internal_error_has_a_fixed_text_and_is_logged_once(holder: httpx.Client, server: RunningServer) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("quire.server")
    logger.addHandler(handler)
    try:
        response = holder.get("/v1/broken")
        with pytest.raises(httpx.RemoteProtocolError):
            holder.get("/v1/broken_stream")
    finally:
        logger.removeHandler(handler)
    own = response.headers["x-quire-request-id"]
    assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
    assert error_of(response)["message"] == (f"The server failed to answer this request; see its log, id {own}.")
    whole, streamed = [json.loads(line) for line in written.getvalue().splitlines()]
    assert whole["id"] == own and "in broken\n" in whole["stack"] and whole["stack"].endswith("builtins.KeyError")
    assert "in pieces\n" in streamed["stack"]
    assert SECRET not in written.getvalue()
    assert [each.status for each in server.records[-2:]] == [500, 500]


# Logs and metrics


def test_metric_labels_come_from_closed_sets(server: RunningServer, anonymous: httpx.Client) -> None:
    routes = {route.path for route in Application().starlette.routes if isinstance(route, Route)}
    for number in range(50):
        anonymous.request("GET", f"/random/{number}")
        anonymous.request("MKCALENDAR" if number % 2 else "SEARCH", f"/v1/models/{number}")
        server.send(b"METHOD%d / HTTP/1.1\r\n\r\n" % number)
    assert {each.route for each in server.records} <= {*routes, OTHER}
    assert {each.method for each in server.records} <= {*METHODS, OTHER}
    assert {each.identity_name for each in server.records} <= {"holder", "admin", "nobody"}
    assert {each.route for each in server.records[-150:]} == {OTHER, "/v1/models/{name:path}"}


def test_a_request_is_reported_once_with_its_tokens(server: RunningServer, holder: httpx.Client) -> None:
    before = len(server.records)
    holder.post("/v1/echo", json={"a": 1})
    (record,) = server.records[before:]
    assert record[:3] == ("/v1/echo", "POST", 200)
    assert (record.identity_name, record.num_prompt_tokens, record.num_completion_tokens) == ("holder", 7, 1)


def test_a_client_that_disconnects_from_a_stream_is_reported_as_499() -> None:
    with running_server() as server:
        with server.client(**BEARER) as client, client.stream("GET", "/v1/endless") as response:
            next(response.iter_raw())
        assert server.application.left.wait(20)
        server.control()
        assert sorted((each.route, each.status) for each in server.records) == [("/v1/echo", 200), ("/v1/endless", 499)]
