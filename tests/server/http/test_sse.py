"""Event streams that wait, fail and are aborted: what a client reads, byte by byte."""

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from quire.core.errors import EngineFailed, InvalidPrompt, NumericalError
from quire.engine.outputs import Delta
from quire.server.context import ServedModel
from quire.server.http.request_context import RequestContext, set_context
from quire.server.http.sse import DONE, KEEP_ALIVE, EventStream, error_event
from quire.server.request_stream import RequestStream
from tests.server.local_server import LocalServer
from tests.server.scripted_app import Script, app_over, post
from tests.server.scripted_servers import completion_body

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
Message = dict[str, Any]


class Silent(Script):
    """Emits nothing until `say` is called with text."""

    def emit(self, call: RequestStream, ids: list[int], streaming: bool) -> None:
        self.emit_all = lambda: super(Silent, self).emit(call, ids, streaming)


async def call(app: Any, sent: list[Message], on_send: Any, gone: asyncio.Event | None = None) -> None:
    """One request over bare ASGI: each message is seen when it is sent."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": CHAT,
        "raw_path": CHAT.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": [],
        "server": ("here", 80), "client": ("there", 1),
    }  # fmt: skip
    body = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            for _ in range(10):  # a middleware may be slow: nothing may overtake it
                await asyncio.sleep(0)
        sent.append(message)
        on_send(message)

    await app(scope, receive, send)


def test_unread_output_is_not_encoded_after_a_disconnect() -> None:
    """Encoding logprobs may take long and would delay other requests."""
    bodies_sent: list[bytes] = []
    made: list[bytes] = []

    async def events() -> AsyncGenerator[bytes]:
        for event in (b"first", b"second", b"third", b"fourth"):
            made.append(event)
            yield event

    async def life() -> None:
        reads, gone, pieces = asyncio.Event(), asyncio.Event(), events()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            bodies_sent.append(message.get("body", b"start"))
            if message.get("body") == b"second":  # from here on it reads no more
                asyncio.get_running_loop().call_soon(disconnect)
                await reads.wait()

        def disconnect() -> None:
            """The message of a lost connection."""
            gone.set()
            reads.set()

        first = asyncio.ensure_future(anext(pieces))
        await first
        await EventStream(first, pieces, lambda: None, 60, error_event)({}, receive, send)

    asyncio.run(asyncio.wait_for(life(), 60))
    assert (bodies_sent, made) == ([b"start", b"first", b"second"], [b"first", b"second"])


@pytest.mark.parametrize(("error", "code"), [(NumericalError(), NumericalError.code), (KeyError(), "engine_failed")])
def test_the_error_that_ended_a_stream_is_in_its_context(error: Exception, code: str) -> None:
    context = RequestContext("an id", 0.0)
    scope: Message = {}
    set_context(scope, context)

    async def events() -> AsyncGenerator[bytes]:
        yield b"first"
        raise error

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    async def life() -> None:
        pieces = events()
        first = asyncio.ensure_future(anext(pieces))
        await EventStream(first, pieces, lambda: None, 60, error_event)(scope, receive, send)

    asyncio.run(asyncio.wait_for(life(), 60))
    assert context.error_code == code


def test_keep_alive_comments_precede_a_late_response(model: ServedModel) -> None:
    script = Silent(["hello"])
    sent: list[Message] = []

    def on_send(message: Message) -> None:
        if [each.get("body") for each in sent].count(KEEP_ALIVE) == 3 and message.get("body") == KEEP_ALIVE:
            script.emit_all()

    asyncio.run(asyncio.wait_for(call(app_over(script, model, keep_alive_s=0.01), sent, on_send), 60))
    assert (sent[0]["type"], sent[0]["status"]) == ("http.response.start", 200)
    bodies_sent = [each["body"] for each in sent[1:]]
    assert bodies_sent[:3] == [KEEP_ALIVE] * 3
    assert b"".join(bodies_sent).endswith(DONE) and b'"content":"hello"' in b"".join(bodies_sent)
    assert sent[-1]["more_body"] is False


def test_an_error_after_a_comment_is_an_event_and_a_close(model: ServedModel) -> None:
    script = Silent(failure=EngineFailed("It broke."))
    sent: list[Message] = []
    asyncio.run(call(app_over(script, model, keep_alive_s=0.01), sent,
                    lambda message: message.get("body") == KEEP_ALIVE and script.emit_all()))  # fmt: skip
    bodies_sent = b"".join(each["body"] for each in sent[1:])
    assert sent[0]["status"] == 200
    last = json.loads(bodies_sent.split(b"data: ")[-1])
    assert last["error"] == {"message": "It broke.", "type": "server_error", "param": None, "code": "engine_failed"}
    assert DONE not in bodies_sent


@pytest.mark.parametrize(
    ("failure", "status"), [(InvalidPrompt("no"), 400), (EngineFailed("no"), 500), (NumericalError(), 500)]
)
def test_an_error_before_the_first_byte_keeps_its_status(model: ServedModel, failure: Any, status: int) -> None:
    script = Script(failure=failure)
    response = post(app_over(script, model), CHAT, BODY)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert response.json()["error"]["code"] == failure.code
    assert script.num_left > 0


def test_an_error_in_the_middle_ends_without_done(scripted_server: LocalServer) -> None:
    with scripted_server.client() as client:
        response = client.post("/v1/completions", json=completion_body("boom", stream=True))
    assert response.status_code == 200
    assert '"text":" bang"' in response.text and '"numerical_error"' in response.text
    assert "[DONE]" not in response.text and '"finish_reason":"' not in response.text


class Tripping(Script):
    """A response that an internal error breaks, at once or after a delta."""

    at_once = True

    def emit(self, call: RequestStream, ids: list[int], streaming: bool) -> None:
        if self.at_once:
            raise ZeroDivisionError("somewhere")
        call.put(Delta("0", 0, "hello", [1]))
        call.put(Delta("0", 99, "there is no such choice", [1]))


@pytest.mark.parametrize("stream", [False, True])
def test_an_internal_error_has_a_fixed_text(model: ServedModel, stream: bool) -> None:
    response = post(app_over(Tripping(), model), CHAT, {**BODY, "stream": stream})
    assert response.status_code == 500
    assert "see its log" in response.text and "somewhere" not in response.text


def test_an_internal_error_in_the_middle_is_an_event(model: ServedModel) -> None:
    script = Tripping()
    script.at_once = False
    response = post(app_over(script, model), CHAT, BODY)
    assert response.status_code == 200
    assert '"content":"hello"' in response.text and "see its log" in response.text
    assert "[DONE]" not in response.text
    assert script.num_left > 0


def test_nothing_overtakes_the_headers(model: ServedModel) -> None:
    sent: list[Message] = []
    asyncio.run(call(app_over(Script(["a", "b"]), model), sent, lambda message: None))
    assert [each["type"] for each in sent].index("http.response.start") == 0
    assert b"".join(each["body"] for each in sent[1:]).endswith(DONE)


@pytest.mark.parametrize("started", [False, True])
def test_a_disconnect_ends_the_stream(model: ServedModel, started: bool) -> None:
    """Before the first event, and in the middle."""
    script = Silent(["hello"], failure=None)

    async def send_noted() -> int:
        gone = asyncio.Event()
        sent: list[Message] = []
        asking = asyncio.ensure_future(
            call(app_over(script, model, keep_alive_s=0.01 if started else 60), sent, lambda _: gone.set(), gone)
        )
        while not script.calls:
            await asyncio.sleep(0)
        if not started:
            gone.set()
        await asyncio.wait_for(asking, 60)
        return script.num_left

    assert asyncio.run(send_noted()) > 0
