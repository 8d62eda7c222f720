"""The server around a script: exact pieces of text come from it, in a known order, over the real calls."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import httpx
from starlette.applications import Starlette

from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.engine.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from quire.engine.terms import Terms
from quire.server.app import make_app
from quire.server.served import Served
from quire.server.service import Call, Service

T = TypeVar("T")


class Script:
    """In the engine's place: each choice says its pieces, one token each, the choices in turns."""

    def __init__(self, *choices: Sequence[str], reason: str = "stop", failure: QuireError | None = None) -> None:
        self.choices = choices
        self.reason = reason
        self.told_failure = failure  # after the pieces, in the place of an end
        self.asked: list[tuple[list[int], SamplingParams, Terms]] = []
        self.calls: list[Call] = []
        self.num_left = 0
        self.failure: QuireError | None = None

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def submit(self, ids: list[int], params: SamplingParams, *, terms: Terms, streaming: bool) -> Call:
        self.asked.append((ids, params, terms))
        call = Call()
        self.calls.append(call)
        self.speak(call, ids, streaming)
        return call

    def speak(self, call: Call, ids: list[int], streaming: bool) -> None:
        for place in range(max(map(len, self.choices), default=0)) if streaming else ():
            for index, pieces in enumerate(self.choices):
                if place < len(pieces):
                    last = place == len(pieces) - 1 and self.told_failure is None
                    call.tell(Delta("0", index, pieces[place], [place], self.reason if last else None))
        if self.told_failure is not None:
            call.tell(self.told_failure)
            return
        outputs = [
            CompletionOutput(index, "".join(pieces), list(range(len(pieces))), self.reason)
            for index, pieces in enumerate(self.choices)
        ]
        call.tell(RequestOutput("0", None, ids, outputs, RequestMetrics(0.0, 0), finished=True))

    def leave(self, call: Call) -> None:
        self.num_left += 1


def app_over(script: Script, served: Served, keep_alive_s: float = 60.0) -> Starlette:
    return make_app(served, cast(Service, script), keep_alive_s=keep_alive_s)


def story(app: Starlette, tell: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Run a client's story against the app in this process."""

    async def run() -> T:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=60) as client:
            return await tell(client)

    return asyncio.run(run())


def post(app: Starlette, path: str, body: dict[str, object]) -> httpx.Response:
    return story(app, lambda client: client.post(path, json=body))


def bodies(stream: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, which must end as streams do."""
    *events, done, nothing = stream.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
