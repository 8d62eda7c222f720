"""A 500 leaves exactly one line with its stack in the log, whichever layer failed."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from quire.core.errors import InvalidPrompt, NumericalError
from quire.engine.outputs import Delta
from quire.server.context import ServedModel
from quire.server.http.access import AccessCheck
from quire.server.http.body_budget import BodyBudget
from quire.server.http.request_context import RequestContext, set_context
from quire.server.http.sse import EventStream, error_event
from tests.server.http_app import AUTH_LINE, running_server, status_of
from tests.server.scripted_app import Script, app_over, post

CLOSING = b"Host: x\r\nConnection: close\r\n" + AUTH_LINE
POST = b"POST /v1/echo HTTP/1.1\r\n" + CLOSING + b"Content-Length: 2\r\n\r\n{}"


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.levelno >= logging.ERROR]


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("path", [b"/v1/broken", b"/v1/broken_stream"])
def test_a_handler(caplog: pytest.LogCaptureFixture, path: bytes) -> None:
    with running_server() as server:
        server.send(b"GET " + path + b" HTTP/1.1\r\n" + CLOSING + b"\r\n")
        server.control()
        [record] = [each for each in server.records if each.route == path.decode()]
    [line] = [each for each in failures(caplog) if each.name.startswith("quire")]
    assert line.exc_info and line.__dict__["fields"]["id"] == record.request_id and record.status == 500


@pytest.mark.parametrize(("layer", "name"), [(AccessCheck, "check"), (AccessCheck, "admit"), (AccessCheck, "__call__")])
def test_a_middleware(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, layer: type, name: str
) -> None:
    with running_server() as server:
        monkeypatch.setattr(layer, name, fail)
        assert status_of(server.send(POST)) == 500
        monkeypatch.undo()
        server.control()
    [line] = failures(caplog)
    assert line.exc_info and line.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("name", ["add", "grow", "complete"])
def test_the_protocol(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with running_server() as server:
        monkeypatch.setattr(BodyBudget, name, fail)
        assert status_of(server.send(POST)) == 500
        monkeypatch.undo()
        server.control()
    [line] = failures(caplog)
    assert line.exc_info and line.exc_info[0] is ZeroDivisionError


def test_an_error_that_is_known(caplog: pytest.LogCaptureFixture, model: ServedModel) -> None:
    body: dict[str, object] = {"prompt": "hi"}
    response = post(app_over(Script(failure=NumericalError()), model), "/v1/completions", body)
    assert response.status_code == 500
    [line] = failures(caplog)
    assert line.__dict__["fields"] == {"error": "numerical_error", "id": response.headers["x-quire-request-id"]}
    caplog.clear()
    assert post(app_over(Script(failure=InvalidPrompt("Empty.")), model), "/v1/completions", body).status_code == 400
    assert not failures(caplog)


class Failing(Script):
    """Fails after the first piece."""

    def emit(self, call: Any, ids: list[int], streaming: bool) -> None:
        call.put(Delta("0", 0, "Hello", [0]))
        call.fail(NumericalError())
        call.wake()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_after_its_first_byte(caplog: pytest.LogCaptureFixture, model: ServedModel, path: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 9},
        "/v1/responses": {"input": "hi"},
    }
    response = post(app_over(Failing(), model), path, {**bodies[path], "stream": True})
    assert response.status_code == 200 and "Hello" in response.text and "error" in response.text
    [line] = failures(caplog)
    assert line.__dict__["fields"]["id"] == response.headers["x-quire-request-id"] and line.exc_info


def test_an_error_event_that_fails_is_raised() -> None:
    """The middleware logs it: it must not be lost with the task that sent it."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise ValueError

    async def events() -> None:
        generator = pieces()
        first = asyncio.ensure_future(anext(generator))
        await first
        scope: dict[str, Any] = {}
        set_context(scope, RequestContext("id", 0.0))

        async def receive() -> dict[str, Any]:
            return await asyncio.Event().wait() and {}

        async def send(message: Any) -> None:
            return None

        def failed(error: Exception) -> bytes:
            error_event(error)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await EventStream(first, generator, lambda: None, 60, failed)(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(events())
