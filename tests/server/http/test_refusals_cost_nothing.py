"""The cost of a refusal: nothing is routed, read, parsed or tokenized."""

import asyncio
import json
import os
import time
from collections.abc import Iterator

import pytest
from starlette.types import Message, Scope

from quire.config import EngineConfig
from quire.engine.engine_process import EngineProcess
from quire.engine.stats import EngineInfo, MemoryUsage
from quire.server.admission import AdmissionControl
from quire.server.app import ENDPOINTS, Application, make_app
from quire.server.async_engine import AsyncEngine
from quire.server.context import ServerState
from quire.server.engine_supervisor import Health, Supervisor
from quire.server.fair_shares import Client
from quire.server.http.auth import KeyRing
from quire.server.http.middleware import secure
from quire.server.metrics import Metrics

INFO = EngineInfo("m", 64, 100, 1, 8, 16, "cpu", "float32", MemoryUsage(), 0, os.getpid())  # one row
GENERATING = [endpoint.path for endpoint in ENDPOINTS if endpoint.generates]


@pytest.fixture(scope="module")
def full() -> Iterator[Application]:
    """A server where one request runs and one waits: full. Without a tokenizer, so that tokenizing would fail."""
    child = EngineProcess(lambda message: None, lambda: None)
    child.start()
    engine = AsyncEngine(None, time.monotonic)
    engine.attach(child, INFO)
    admission = AdmissionControl(
        engine, lambda: Health.READY, max_waiting=1, max_waiting_tokens=1000, clock=time.monotonic
    )
    for _ in range(2):
        admission.admit(Client(""), None)
    supervisor = Supervisor(EngineConfig(), None, engine, clock=time.monotonic)
    yield make_app(ServerState(engine, supervisor, admission, Metrics(lambda: None, time.monotonic)))
    child.close()


class AsgiExchange:
    """One request whose body arrives in pieces of 400 bytes; counts the bytes read."""

    def __init__(self, app: Application, path: str) -> None:
        self._app = secure(app, keys=KeyRing([]), admission=app)
        self._path = path
        self.num_read = 0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    def make(self) -> "AsgiExchange":
        headers = [(b"host", b"here"), (b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope: Scope = {"type": "http", "method": "POST", "path": self._path, "headers": headers, "query_string": b""}
        asyncio.run(self._app(scope, self._receive, self._send))  # type: ignore[arg-type]
        return self

    async def _receive(self) -> Message:
        self.num_read += 400
        return {"type": "http.request", "body": b" " * 400, "more_body": True}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")


@pytest.mark.parametrize("path", GENERATING)
def test_a_refused_request_is_neither_read_nor_routed(
    full: Application, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "middleware_stack", None)  # what routes and translates: it would be made anew
    exchange = AsgiExchange(full, path).make()
    assert exchange.status == 429 and int(exchange.headers[b"retry-after"]) >= 1
    assert exchange.num_read == 0
    assert full.middleware_stack is None


@pytest.mark.parametrize("path", ["/docs/", "/v1/completions/", "/health/"])
def test_a_trailing_slash_is_not_redirected(full: Application, path: str) -> None:
    exchange = AsgiExchange(full, path).make()
    assert exchange.status == 404 and b"location" not in exchange.headers
    assert json.loads(exchange.body)["error"]["message"] == f"POST {path} is not served here."
