"""Many short requests, resets at every phase, short bodies that ask for much: another tenant is served meanwhile."""

import asyncio
import gzip
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.attack.conftest import HOSTILE, INNOCENT, NUM_ROWS
from tests.attack.test_floods import report_innocent, served_meanwhile
from tests.chaos.conftest import Report
from tests.server.many_clients import RawClient, RawResponse, fetch, fetch_all, request
from tests.server.scripted_servers import completion_body
from tests.server.server_process import Running, wait_until_at_rest

AT_ONCE = 48
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


def bare(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    """A request of the hostile tenant."""
    lines = [f"{method} {path} HTTP/1.1", "Host: here", "Connection: close", *headers]
    lines += [f"{name}: {value}" for name, value in HOSTILE.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def endure(server: Running, report: Report, what: str, attack: Coroutine[Any, Any, Counter[int]]) -> Counter[int]:
    """An attack beside the innocent tenant's requests: its statuses. Nothing leaks, and the engine is the same."""
    engine, before_bytes = server.engine_pid, server.resident_bytes

    async def both() -> tuple[Counter[int], list[RawResponse]]:
        attacking = asyncio.create_task(attack)
        await asyncio.sleep(0.2)
        served = await served_meanwhile(server.port)
        return await attacking, served

    statuses, served = asyncio.run(both())
    report(f"{what}: answers", dict(statuses))
    report("  front's memory after it, MiB more", (server.resident_bytes - before_bytes) >> 20)
    report_innocent(report, what, served)
    assert max(statuses, default=0) < 500, statuses
    with server.client(headers=INNOCENT) as client:
        wait_until_at_rest(client)
    assert server.engine_pid == engine
    return statuses


async def statuses_of(port: int, sent: list[bytes], at_once: int = AT_ONCE) -> Counter[int]:
    return Counter(each.status for each in await fetch_all(port, sent, at_once))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/metrics", 200),
        ("OPTIONS", "/v1/completions", 405),
        ("TRACE", "/docs", 405),
        ("DELETE", "/v1/responses/resp_0", 404),
    ],
)
def test_a_flood_of_other_methods(server: Running, report: Report, method: str, path: str, status: int) -> None:
    sent = [bare(method, path)] * 500
    assert endure(server, report, f"500 × {method} {path}", statuses_of(server.port, sent)) == {status: 500}


def test_streams_reset_at_every_phase(server: Running, report: Report, dose: Callable[[int], int]) -> None:
    """Before the first byte, in the head, in the body, queued, in prefill, while it streams."""
    whole = request(completion_body("endless", stream=True, max_tokens=7900), headers=HOSTILE)
    body_at = whole.index(b"\r\n\r\n") + 4
    dice, count = random.Random(7), dose(2000)

    async def one(limit: asyncio.Semaphore) -> None:
        cut = dice.choice((0, 20, body_at, len(whole) - 1, len(whole), len(whole)))
        wait_s = dice.choice((0, 0, 0.001, 0.003, 0.01, 0.05))
        async with limit:
            with socket.socket() as each:
                each.setblocking(False)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                await asyncio.get_running_loop().sock_connect(each, ("127.0.0.1", server.port))
                try:
                    await asyncio.get_running_loop().sock_sendall(each, whole[:cut])
                except OSError:
                    return  # refused and closed before all was sent
                await asyncio.sleep(wait_s)

    async def storm() -> Counter[int]:
        limit = asyncio.Semaphore(200)
        await asyncio.gather(*[one(limit) for _ in range(count)])
        return Counter()

    endure(server, report, f"{count} streams, each reset within 50 ms", storm())


def test_pipelined_requests_get_one_answer(server: Running, report: Report) -> None:
    """Each connection brings 300 at once; the first is answered and the others are dropped with the connection."""
    one = request(completion_body("hi", max_tokens=4), headers=HOSTILE).replace(b"Connection: close\r\n", b"")

    async def pipeline() -> Counter[int]:
        responses = await fetch_all(server.port, [one * 300] * 20)
        assert all(each.body.count(b'"id"') == 1 for each in responses)
        return Counter(each.status for each in responses)

    assert endure(server, report, "20 × 300 pipelined requests", pipeline()) == {200: 20}


def test_bodies_that_are_announced_and_compressed_bombs(server: Running, report: Report) -> None:
    """Clients that wait for `100 Continue`, and bodies that would be a thousand times as large."""
    head = bare("POST", "/v1/completions", "Expect: 100-continue", "Content-Type: application/json",
                "Content-Length: 5000000")  # fmt: skip
    bomb = gzip.compress(b'{"prompt": "' + b"a" * 50_000_000 + b'"}')
    packed = {name: {**HOSTILE, "Content-Encoding": name} for name in ("gzip", "deflate", "br", "zstd", "x-gzip")}

    async def attack() -> Counter[int]:
        waiting = [await RawClient.connect(server.port, head) for _ in range(300)]
        for each in waiting:
            await each.receive_until(b"HTTP/1.1 100 Continue\r\n\r\n")
        statuses = await statuses_of(server.port, [request(bomb, headers=each) for each in packed.values()] * 20)
        for each in waiting:
            each.disconnect()
        return statuses

    assert endure(server, report, "300 × Expect: 100-continue, 100 compressed bombs", attack()) == {415: 100}


def large_bodies() -> dict[str, bytes]:
    """Each nearly as large as a body may be, and within the limits of what it may hold."""
    message = json.dumps({"role": "user", "content": "a" * 440})
    return {
        "one text": b'{"max_tokens": 4, "prompt": "' + b"a b " * 4_000_000 + b'"}',
        "token ids": b'{"max_tokens": 4, "prompt": [' + b",".join([b"7"] * 8_000_000) + b"]}",
        "messages": b'{"max_tokens": 4, "messages": [' + ",".join([message] * 33_000).encode() + b"]}",
    }


@pytest.mark.parametrize("what", ["one text", "token ids", "messages"])
def test_large_bodies_at_once(server: Running, report: Report, what: str) -> None:
    """Eight clients, three bodies of 16 MB each, complete. Each is read by a thread of its own."""
    body = large_bodies()[what]
    path = "/v1/chat/completions" if what == "messages" else "/v1/completions"
    sent = bare("POST", path, "Content-Type: application/json", f"Content-Length: {len(body)}", body=body)

    def post() -> int:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(sent)
            return int(connection.recv(64).split(b" ")[1])

    async def client() -> list[int]:
        return [await asyncio.to_thread(post) for _ in range(3)]

    async def attack() -> Counter[int]:
        return Counter(status for each in await asyncio.gather(*[client() for _ in range(8)]) for status in each)

    statuses = endure(server, report, f"8 × 3 bodies of 16 MB, {what}", attack())
    assert set(statuses) <= {400, 413, 429}, statuses


@pytest.mark.parametrize(
    ("what", "fields", "statuses"),
    [
        ("64 answers with 20 log-probabilities", {"n": NUM_ROWS, "logprobs": 20, "max_tokens": 1000}, {400}),
        (
            "16 scored prompts of 7,000 tokens",
            {"prompt": [[5] * 7000] * 16, "echo": True, "logprobs": 20, "max_tokens": 1},
            {400},
        ),
    ],
)
def test_a_short_body_that_asks_for_much(
    server: Running, report: Report, what: str, fields: dict[str, Any], statuses: set[int]
) -> None:
    """Each would take some hundred MiB in the front process."""
    before_bytes = server.resident_bytes
    sent = [request({**completion_body("endless"), **fields}, headers=HOSTILE)] * 2
    assert set(endure(server, report, f"2 × {what}", statuses_of(server.port, sent))) == statuses
    assert server.resident_bytes - before_bytes < 300 << 20


@pytest.mark.parametrize("fields", [{"n": NUM_ROWS, "max_tokens": 500}, {"n": 8, "max_tokens": 500}])
def test_requests_of_many_rows(server: Running, report: Report, fields: dict[str, Any]) -> None:
    sent = [request(completion_body("endless", **fields), headers=HOSTILE)] * 5
    name = f"5 requests with n = {fields['n']}"
    assert endure(server, report, name, statuses_of(server.port, sent)) == {200: 5}


def test_stored_responses_of_others(server: Running, report: Report) -> None:
    """A thousand stored by one tenant; none of another's can be read, continued, cancelled or deleted."""

    async def attack() -> Counter[int]:
        own = await fetch(server.port, request({"input": "hi", "max_output_tokens": 1}, "/v1/responses", INNOCENT))
        found = json.loads(own.body)
        path, item = f"/v1/responses/{found['id']}", found["output"][0]["id"]
        stored = [request({"input": "y" * 2000, "max_output_tokens": 1}, "/v1/responses", HOSTILE)] * 1000
        assert await statuses_of(server.port, stored) == {200: 1000}
        tries = [bare("GET", path), bare("DELETE", path), bare("GET", path + "?stream=true"),
                 bare("GET", path + "/input_items"), request(b"", path + "/cancel", HOSTILE)]  # fmt: skip
        statuses = await statuses_of(server.port, tries)
        for foreign in ({"input": "hi", "previous_response_id": found["id"]},
                        {"input": [{"type": "item_reference", "id": item}]}):  # fmt: skip
            statuses += await statuses_of(server.port, [request(foreign, "/v1/responses", HOSTILE)])
        kept = await fetch(server.port, bare("GET", path).replace(b"sk-hostile", b"sk-innocent"))
        assert kept.status == 200 and json.loads(kept.body)["id"] == found["id"], "it is still there"
        return statuses

    assert endure(server, report, "1,000 stored responses", attack()) == {404: 5, 400: 2}
