"""CORS, CSRF and DNS rebinding: which web pages may use a server, with and without keys."""

import asyncio
import json

import pytest
from starlette.types import ASGIApp

from quire.core.errors import ConfigError
from quire.server.batch.lines import BatchReply
from quire.server.batch.runner import post
from quire.server.http.access import AccessOptions
from quire.server.http.auth import KeyRing
from quire.server.http.middleware import secure
from tests.server.http_app import BEARER, KEY, KEYED, Application, running_server


def test_no_cors_by_default() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with running_server() as server, server.client() as client:
        response = client.options("/v1/echo", headers=preflight)
    assert response.status_code == 401
    assert not [name for name in response.headers if name.startswith("access-control-")]


def test_an_allowed_origin_gets_cors_headers() -> None:
    with (
        running_server(options=AccessOptions(allowed_origins=("https://a.example",))) as server,
        server.client() as client,
    ):
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        allowed = client.options("/v1/echo", headers={"origin": "https://a.example", **preflight})
        assert allowed.status_code == 200 and allowed.headers["x-request-id"]
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = client.post("/v1/echo", json={}, headers={"origin": "https://a.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
        assert client.options("/v1/echo", headers={"origin": "https://b.example", **preflight}).status_code == 400
        assert client.options("/v1/echo", headers={"origin": "https://a.example"}).status_code == 401
        response = client.post("/v1/echo", json={}, headers={"origin": "https://a.example", **BEARER})
        assert response.status_code == 200 and "x-request-id" in response.headers["access-control-expose-headers"]


def test_a_foreign_origin_is_refused_without_keys() -> None:
    with running_server(keys=KeyRing()) as server, server.client() as client:
        own = f"http://127.0.0.1:{server.port}"
        statuses = {
            origin: client.post("/v1/echo", headers={"origin": origin}).status_code
            for origin in ("https://a.example", "null", "http://127.0.0.1", own)
        }
        assert statuses == {"https://a.example": 403, "null": 403, "http://127.0.0.1": 403, own: 200}


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("evil.example:18001", False),  # a name that its owner lets point here, after the page was loaded
        ("evil.example", False),
        ("localhost.evil.example", False),
        *((f"evil.example{sign}.local", False) for sign in (":80", "%00", "?", "#", "/", "\\", "@", " ", ".")),
        ("evil:80@com", False),
        ("127.0.0.1.evil.example:8000", False),
        ("[::1].evil.example", False),
        ("box.lan:8000", True),  # --host
        ("BOX.lan", True),
        ("models.example:8443", True),  # named by --allowed-origins, at another port
        ("localhost:8000", True),
        ("192.168.1.7:8000", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("quire:8000", True),  # compose, Kubernetes, WINS: a single label is no public name
        ("quire.default.svc.cluster.local:8000", True),
        ("quire.default.svc", True),
        ("host.docker.internal:8000", True),
        ("box.home.arpa", True),
        ("localhost.:8000", True),
        ("evil.example.", False),
        ("4.3.2.1.in-addr.arpa", False),  # the owner of an address block may let it resolve to anything
        ("internal.evil.example", False),
        ("notlocal", True),
        ("evil-local.example", False),
    ],
)
def test_dns_rebinding_is_refused_without_keys(host: str, known: bool) -> None:
    page = {b"host": host.encode(), b"origin": b"http://" + host.encode()}
    options = AccessOptions(allowed_origins=("https://Models.example",), own_host="box.lan")
    app = secure(Application().starlette, keys=KeyRing(), options=options)
    response = posted(app, page)
    assert response.status == (200 if known else 403)
    if not known:
        error = json.loads(response.body)["error"]
        assert error["code"] == "origin_not_allowed" and f"--allowed-origins http://{host} or" in error["message"]
    assert posted(app, {b"host": host.encode()}).status == response.status  # one rule, with and without an origin
    keyed = secure(Application().starlette, keys=KEYED, options=options)
    assert posted(keyed, {**page, b"x-api-key": KEY.encode()}).status == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/models/any", "/"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST", b"OPTIONS", b"DELETE"])
def test_no_method_answers_a_foreign_host_without_keys(path: str, method: bytes) -> None:
    """A GET of a rebound page has no origin: only its Host tells."""
    sent = method + b" %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"
    with running_server(keys=KeyRing()) as server:
        foreign = server.send(sent % (path.encode(), b"evil.example:8000"))
        assert foreign.startswith(b"HTTP/1.1 403 ")
        assert method == b"HEAD" or b"--allowed-origins http://evil.example:8000" in foreign
        assert not server.send(sent % (path.encode(), b"127.0.0.1:8000")).startswith(b"HTTP/1.1 403 ")
        for probe in (b"/health", b"/ready"):
            assert server.send(b"GET " + (sent % (probe, b"evil.example"))[len(method) + 1 :]).startswith(
                b"HTTP/1.1 200 "
            )
    with running_server() as server:
        assert not server.send(sent % (path.encode(), b"evil.example")).startswith(b"HTTP/1.1 403 ")


def test_any_host_may_be_used_where_every_origin_is_allowed() -> None:
    options = AccessOptions(allowed_origins=("*",))
    app = secure(Application().starlette, keys=KeyRing(), options=options)
    assert posted(app, {b"host": b"evil.example", b"origin": b"http://evil.example"}).status == 200


def posted(app: ASGIApp, headers: dict[bytes, bytes]) -> BatchReply:
    return asyncio.run(post(app, "/v1/echo", b"{}", [*headers.items()]))


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/path", "", "javascript:alert(1)", "https://*.b\n"])
def test_invalid_origins_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="not an origin"):
        AccessOptions(allowed_origins=(origin,))
