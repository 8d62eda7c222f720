"""The application in this process, around a stand-in that says exact pieces of text: for tests of how it writes them.

What an engine does is tested with a real one: see `scripting.py`.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import httpx
from starlette.types import ASGIApp

from quire.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.engine.messages import RequestOptions
from quire.engine.output_processor import OutputProcessor
from quire.engine.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from quire.engine.stats import EngineInfo, MemoryUsage
from quire.server.admission import AdmissionControl
from quire.server.app import make_app
from quire.server.async_engine import AsyncEngine
from quire.server.context import ServedModel, ServerState
from quire.server.engine_supervisor import Supervisor
from quire.server.http.auth import KeyRing
from quire.server.http.middleware import secure
from quire.server.metrics import Metrics
from quire.server.request_stream import RequestStream

T = TypeVar("T")


class Script:
    """A fake engine with exact deltas: each choice has its own pieces, one token each."""

    def __init__(self, *choices: Sequence[str], reason: str = "stop", failure: QuireError | None = None) -> None:
        self.choices = choices
        self.reason = reason
        self.failure = failure  # in the place of all that
        self.submitted: list[tuple[list[int], SamplingParams, RequestOptions]] = []
        self.calls: list[RequestStream] = []
        self.num_left = 0
        self.attached, self.draining = True, False
        self.heartbeat_s, self.progress_s, self.expected_s = math.inf, math.inf, 0.0
        self.info = EngineInfo("script", 1024, 49152, 64, 64, 16, "script", "none", MemoryUsage(), 1, 0)
        self.stats = None

    def submit(
        self, ids: list[int], params: SamplingParams, *, options: RequestOptions, streaming: bool, without_tokens: bool
    ) -> RequestStream:
        self.submitted.append((ids, params, options))
        request = OutputProcessor(None, time.monotonic).open(ids, params, options=options, streaming=streaming)
        call = RequestStream(request, None, self.close)
        self.calls.append(call)
        self.emit(call, ids, streaming)
        return call

    def emit(self, call: RequestStream, ids: list[int], streaming: bool) -> None:
        if self.failure is not None:
            call.fail(self.failure)
            call.wake()
            return
        for place in range(max(map(len, self.choices), default=0)) if streaming else ():
            for index, pieces in enumerate(self.choices):
                if place < len(pieces):
                    reason = self.reason if place == len(pieces) - 1 else None
                    call.put(Delta("0", index, pieces[place], [place], reason))
        outputs = [
            CompletionOutput(index, "".join(pieces), list(range(len(pieces))), self.reason)
            for index, pieces in enumerate(self.choices)
        ]
        call.finish(RequestOutput("0", None, ids, outputs, RequestMetrics(0.0, 0), finished=True))
        call.wake()

    def close(self, call: RequestStream) -> None:
        self.num_left += 1


def app_over(script: Script, model: ServedModel | None, keep_alive_s: float = 60.0) -> ASGIApp:
    """The real application in the real middleware, over a fake engine."""
    engine = cast(AsyncEngine, script)
    supervisor = Supervisor(EngineConfig(), None, engine, clock=time.monotonic)
    admission = AdmissionControl(
        engine, lambda: supervisor.health, max_waiting=64, max_waiting_tokens=10**6, clock=time.monotonic
    )
    metrics = Metrics(lambda: None, time.monotonic)
    state = ServerState(engine, supervisor, admission, metrics, keep_alive_s, loaded=model)
    app = make_app(state)
    return secure(app, keys=KeyRing(), admission=app)


def events(app: ASGIApp, talk: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Run a client against the application in this process."""

    async def run() -> T:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=60) as client:
            return await talk(client)

    return asyncio.run(run())


def post(app: ASGIApp, path: str, body: dict[str, object]) -> httpx.Response:
    return events(app, lambda client: client.post(path, json=body))


def bodies(stream: str) -> list[dict[str, Any]]:
    """The JSON of the events of a stream, which must end with [DONE]."""
    *events, done, nothing = stream.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
