"""Overload: full queues, limits per key, deadlines, disconnects."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.local_server import LocalServer
from tests.server.many_clients import RawClient, RawResponse, fetch, fetch_all, request
from tests.server.scripted_servers import CONTROL, check_control, completion_body, scripted_here
from tests.server.server_process import counted, load, wait_until, wait_until_at_rest
from tests.tiers import examples

NUM_ROWS, NUM_WAITING = 4, 4
ENDLESS = request(completion_body("endless", max_tokens=6000, stream=True), headers={"Authorization": "Bearer sk-ops"})
LIMITED = {"Authorization": "Bearer sk-limited"}
OPS = {"Authorization": "Bearer sk-ops"}


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A small server: four requests run, four may wait, and one of its keys may have two open."""
    folder = tmp_path_factory.mktemp("crowds")
    (folder / "keys").write_text("sk-ops name=ops trusted\nsk-limited name=limited max_open=2\n")
    starts = ("--max-num-seqs", str(NUM_ROWS), "--max-waiting", str(NUM_WAITING))
    with scripted_here(folder, *starts, "--api-key-file", str(folder / "keys")) as running:
        yield running


async def fill(server: LocalServer, num_visitors: int) -> list[RawClient]:
    """So many open requests; those that run have received output."""
    raw_clients = [await RawClient.connect(server.port, ENDLESS) for _ in range(NUM_ROWS)]
    for raw_client in raw_clients:
        await raw_client.receive_until(b'"text"')
    raw_clients += [await RawClient.connect(server.port, ENDLESS) for _ in range(num_visitors - NUM_ROWS)]
    with server.client(headers=OPS) as client:
        await asyncio.to_thread(wait_until, lambda: load(client)["num_requests"] == num_visitors)
    return raw_clients


def disconnect(raw_clients: list[RawClient]) -> None:
    for raw_client in raw_clients:
        raw_client.disconnect()


def test_a_full_queue_refuses_before_the_body_is_read(server: LocalServer) -> None:
    async def crowd() -> list[RawResponse]:
        inside = await fill(server, NUM_ROWS + NUM_WAITING)
        head, _, _ = request(completion_body("hi"), headers=OPS).partition(
            b"\r\n\r\n"
        )  # a body is announced, and never sent
        responses = await fetch_all(server.port, [head + b"\r\n\r\n"] * 20)
        disconnect(inside)
        return responses

    responses = asyncio.run(crowd())
    assert all(each.status == 429 and b'"queue_full"' in each.body for each in responses)
    assert all(each.retry_after_s is not None and each.retry_after_s >= 1 for each in responses)
    with server.client(headers=OPS) as client:
        wait_until_at_rest(client)
        check_control(client)


def test_a_key_has_a_concurrency_limit(server: LocalServer) -> None:
    async def crowd() -> tuple[RawResponse, RawResponse]:
        mine = [
            await RawClient.connect(server.port, request(completion_body("endless", stream=True), headers=LIMITED))
            for _ in "12"
        ]
        for raw_client in mine:
            await raw_client.receive_until(b'"text"')
        refused = await fetch(server.port, request(completion_body("hi"), headers=LIMITED))
        other = await fetch(server.port, request(completion_body("hi"), headers=OPS))
        disconnect(mine)
        return refused, other

    refused, other = asyncio.run(crowd())
    assert refused.status == 429 and b'"share_exhausted"' in refused.body and refused.retry_after_s
    assert other.status == 200
    with server.client(headers=LIMITED) as client:
        wait_until_at_rest(client)
        check_control(client)


def test_a_deadline_that_expires_in_the_queue_computes_nothing(server: LocalServer) -> None:
    async def crowd() -> RawResponse:
        inside = await fill(server, NUM_ROWS)
        impatient = request(completion_body("hi " * 500), headers={**OPS, "X-Quire-Timeout-S": "0.2"})
        responses = await fetch(server.port, impatient)
        disconnect(inside)
        return responses

    with server.client(headers=OPS) as client:
        wait_until_at_rest(client)
        before = counted(client, "prompt_tokens_total")
        responses = asyncio.run(crowd())
        assert responses.status == 504 and b'"deadline_expired"' in responses.body
        wait_until_at_rest(client)
        assert counted(client, "prompt_tokens_total") - before < 500
        check_control(client)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-quire-priority", "nan"),
        ("x-quire-priority", "1.5"),  # as in a body: no class lies between two
        ("x-quire-priority", "1_0"),
        ("x-quire-timeout-s", "inf"),
        ("x-quire-priority", "1e999"),
        ("x-quire-priority", "urgent"),
    ],
)
def test_a_header_that_is_not_a_number_is_refused(server: LocalServer, header: str, value: str) -> None:
    responses = asyncio.run(fetch(server.port, request(completion_body("hi"), headers={**OPS, header: value})))
    assert responses.status == 400 and header.encode() in responses.body


@pytest.mark.parametrize("state", ["queued", "prefill", "streaming", "plain", "half a body"])
def test_nothing_leaks_when_clients_disconnect(server: LocalServer, state: str) -> None:
    """Twelve disconnects in each state, or forty: 60 or 200 in all."""
    plain, long = (
        request(completion_body("endless"), headers=OPS),
        request(completion_body("endless " * 1500), headers=OPS),
    )

    async def crowd(client: httpx.Client) -> None:
        inside = await fill(server, NUM_ROWS) if state == "queued" else []
        for _ in range(examples(3, 10)):
            sent = {"prefill": long, "plain": plain, "half a body": plain[:-20]}.get(state, ENDLESS)
            raw_clients = [await RawClient.connect(server.port, sent) for _ in range(NUM_WAITING)]
            for raw_client in raw_clients if state == "streaming" else ():
                await raw_client.receive_until(b'"text"')
            if state == "half a body":  # it takes no place
                assert load(client)["server_load"] == 0
            else:
                await asyncio.to_thread(wait_until, lambda: load(client)["num_requests"] > len(inside))
            disconnect(raw_clients)
            await asyncio.to_thread(wait_until, lambda: load(client)["server_load"] <= len(inside))
        disconnect(inside)

    with server.client(headers=OPS) as client:
        wait_until_at_rest(client)
        asyncio.run(crowd(client))
        wait_until_at_rest(client)
        check_control(client)


def test_refused_clients_retry_and_are_served(server: LocalServer) -> None:
    async def crowd() -> list[RawResponse]:
        return await fetch_all(server.port, [request(completion_body("secret"), headers=OPS)] * 100)

    responses = asyncio.run(crowd())
    assert {each.status for each in responses} <= {200, 429}
    assert all("日本語".encode() in each.body if each.status == 200 else each.retry_after_s for each in responses)
    with server.client(headers=OPS) as client:
        wait_until_at_rest(client)
        assert client.post("/v1/completions", json=completion_body("hi")).json()["choices"][0]["text"] == CONTROL
