"""Clients that hang up, an engine that breaks, a server that is told to end."""

import asyncio
import signal
import socket
import time
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from quire.core.errors import EngineFailed, InvalidPrompt
from quire.core.sampling import SamplingParams
from quire.engine.front import Front
from quire.engine.terms import Terms
from quire.server.app import make_app
from quire.server.served import Served
from quire.server.service import Service
from tests.server.conftest import Running, start_server

ENDLESS = {"prompt": "hi", "max_tokens": 1000, "ignore_eos": True}
DEADLINE_S = 60


def wait_until(http: httpx.Client, load: dict[str, object]) -> None:
    """Ask until the server carries exactly this."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (seen := http.get("/load").json()) != load:
        assert time.monotonic() < deadline_s, seen


def test_leaving_a_stream_frees_the_engine(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True, "n": 2}) as answer:
        next(answer.iter_lines())
        assert http.get("/load").json() == {"requests": 1, "idle": False}
    wait_until(http, {"requests": 0, "idle": True})


def test_leaving_a_plain_request_frees_the_engine(http: httpx.Client, server: Running) -> None:
    request = httpx.Request("POST", f"{server.url}/v1/completions", json=ENDLESS)
    lines = [f"{request.method} {request.url.path} HTTP/1.1", *(f"{k}: {v}" for k, v in request.headers.items())]
    with socket.create_connection((request.url.host, request.url.port or 80)) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + request.content)
        wait_until(http, {"requests": 1, "idle": False})
    wait_until(http, {"requests": 0, "idle": True})


def test_a_sealed_fate_for_a_stream_when_the_server_is_told_to_end(default_model_path: object) -> None:
    url, process = start_server()
    with httpx.stream("POST", f"{url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=DEADLINE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    assert "The server is stopping" in last and "server_stopping" in last
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert said == "Stopped.\n"


class Breaking:
    """A front whose engine breaks at the first step, and which refuses, or trips over, some prompts."""

    def __init__(self) -> None:
        self.idle = True

    def submit(self, prompt: list[int], params: SamplingParams, *, terms: Terms, streaming: bool) -> SimpleNamespace:
        if prompt == [0]:
            raise InvalidPrompt("no")
        if prompt == [1]:
            raise ZeroDivisionError
        self.idle = False
        return SimpleNamespace(request_id="0", finished=False)

    def turn(self) -> list[object]:
        raise ZeroDivisionError


def test_a_request_that_trips_does_not_take_others_along_and_a_broken_engine_says_so() -> None:
    async def story() -> list[int]:
        front = cast(Front, Breaking())
        service = Service(front)
        app = make_app(Served("m", None, None, SamplingParams(), 64, 100, created=0), service)
        service.start()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m") as client:
            health = []
            for prompt, expected in (([0], InvalidPrompt), ([1], EngineFailed), ([2], EngineFailed)):
                with pytest.raises(expected):
                    await service.submit(prompt, SamplingParams(), streaming=True).hear()
                health.append((await client.get("/health")).status_code)
        service.stop()
        return health

    assert asyncio.run(story()) == [200, 200, 503]
