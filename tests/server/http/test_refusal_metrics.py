"""Every refusal is counted once by its code: in the middleware, before the engine, in the engine, in the protocol."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.local_server import LocalServer
from tests.server.many_clients import RawClient, fetch, request
from tests.server.scripted_servers import completion_body, scripted_here
from tests.server.server_process import load, wait_until, wait_until_at_rest


@pytest.fixture(scope="module")
def narrow(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server where one request runs, one waits, and the next is refused."""
    with scripted_here(tmp_path_factory.mktemp("narrow"), "--max-num-seqs", "1", "--max-waiting", "1") as running:
        yield running


def by_code(client: httpx.Client) -> dict[str, float]:
    page = client.get("/metrics").text
    return {code: float(count) for code, count in re.findall(r'requests_refused_total\{code="(\w+)"\} (\S+)', page)}


def gained(client: httpx.Client, before: dict[str, float]) -> dict[str, float]:
    return {code: count - before.get(code, 0) for code, count in by_code(client).items() if count != before.get(code)}


def test_refusals_of_a_full_queue_are_counted(narrow: LocalServer) -> None:
    async def crowd(client: httpx.Client) -> list[int]:
        inside = [
            await RawClient.connect(narrow.port, request(completion_body("endless", stream=True))) for _ in range(2)
        ]
        wait_until(lambda: load(client)["server_load"] == 2)
        refused = [await fetch(narrow.port, request(completion_body("hi"))) for _ in range(5)]
        for raw_client in inside:
            raw_client.disconnect()
        return [response.status for response in refused]

    with narrow.client() as client:
        before = by_code(client)
        assert asyncio.run(crowd(client)) == [429] * 5
        wait_until_at_rest(client)
        assert gained(client, before) == {"queue_full": 5}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (completion_body("hi", n=0), "invalid_parameter"),
        (completion_body("hi", structured_outputs={"regex": "(("}), "invalid_grammar"),
        (completion_body("hi " * 9000), "context_length_exceeded"),
        (completion_body("boom"), "numerical_error"),
        (completion_body("boom", stream=True), "numerical_error"),
    ],
)
def test_a_failure_is_counted_once_wherever_it_happens(narrow: LocalServer, body: dict[str, object], code: str) -> None:
    with narrow.client() as client:
        before = by_code(client)
        client.post("/v1/completions", json=body)
        wait_until(lambda: bool(gained(client, before)))  # it is counted after the response is sent
        assert gained(client, before) == {code: 1}


def test_malformed_http_is_counted_as_it_is_logged(narrow: LocalServer) -> None:
    with narrow.client() as client:
        before = by_code(client)
        assert asyncio.run(fetch(narrow.port, b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n")).status == 400
        wait_until(lambda: bool(gained(client, before)))  # on a busy machine pages are sent again for some ten ms
        assert gained(client, before) == {"other": 1}
        assert 'quire_http_requests_total{method="other",route="other",status="400"}' in client.get("/metrics").text
