"""One tenant takes all it can get: places, bodies that never end, answers that are never read. Another is served."""

import asyncio
import socket
import time
from collections import Counter

import pytest

from tests.attack.conftest import HOSTILE, INNOCENT, NUM_ROWS
from tests.chaos.conftest import Report
from tests.chaos.test_long import never_reading, percentile
from tests.server.many_clients import RawClient, RawResponse, fetch, request
from tests.server.scripted_servers import check_control, completion_body
from tests.server.server_process import Running, load, wait_until, wait_until_at_rest

INNOCENT_REQUEST = request(completion_body("hi", max_tokens=4), headers=INNOCENT)
NUM_INNOCENT = 60


async def served_meanwhile(port: int) -> list[RawResponse]:
    """Requests of the innocent tenant, one after another."""
    return [await fetch(port, INNOCENT_REQUEST) for _ in range(NUM_INNOCENT)]


def report_innocent(report: Report, during: str, responses: list[RawResponse]) -> None:
    seconds = [response.seconds for response in responses]
    report(f"{during}: another tenant's {NUM_INNOCENT} requests", dict(Counter(each.status for each in responses)))
    report("  their p50 and p99, ms", [round(1000 * percentile(seconds, share)) for share in (50, 99)])
    assert {each.status for each in responses} == {200}


@pytest.mark.parametrize("num_body_bytes", [0, 1, -1])
def test_bodies_that_never_end(server: Running, report: Report, num_body_bytes: int) -> None:
    """More sockets than there are places, each with headers and a part of its body."""
    whole = request(completion_body("hi", max_tokens=4), headers=HOSTILE)
    begin = whole.index(b"\r\n\r\n") + 4
    part = whole[: begin + num_body_bytes] if num_body_bytes >= 0 else whole[:num_body_bytes]

    async def attack() -> list[RawResponse]:
        sockets = [await RawClient.connect(server.port, part) for _ in range(4 * NUM_ROWS)]
        responses = await served_meanwhile(server.port)
        for each in sockets:
            each.disconnect()
        return responses

    report_innocent(report, f"{4 * NUM_ROWS} bodies that never end ({num_body_bytes} bytes)", asyncio.run(attack()))
    with server.client(headers=INNOCENT) as client:
        wait_until_at_rest(client)


def test_one_key_takes_every_place(server: Running, report: Report) -> None:
    endless = request(completion_body("endless", stream=True), headers=HOSTILE)

    async def attack() -> list[RawResponse]:
        async def client() -> None:
            while True:  # without regard to Retry-After
                await fetch(server.port, endless)
                await asyncio.sleep(0.25)

        clients = [asyncio.create_task(client()) for _ in range(160)]
        await asyncio.sleep(1)
        responses = await served_meanwhile(server.port)
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return responses

    report_innocent(report, "160 clients of one key, endless answers", asyncio.run(attack()))
    with server.client(headers=INNOCENT) as client:
        wait_until_at_rest(client)


@pytest.mark.timeout(600)
def test_readers_that_never_read(server: Running, report: Report) -> None:
    """Each is cut when its share of memory or time is used up; nothing more is computed for it."""
    fields = {"n": 8, "logprobs": 5, "max_tokens": 7900, "stream": True}
    sent = request(completion_body("endless", **fields), headers=HOSTILE)
    with server.client(headers=INNOCENT) as client:
        wait_until_at_rest(client)
        before_bytes, began_s = server.resident_bytes, time.monotonic()
        silent: list[socket.socket] = [never_reading(server.port, sent) for _ in range(6)]
        wait_until(lambda: load(client)["num_requests"] > 0)
        check_control(client)
        most_bytes = 0

        def are_cut() -> bool:
            nonlocal most_bytes
            most_bytes = max(most_bytes, server.resident_bytes - before_bytes)
            return load(client)["num_requests"] == 0

        wait_until(are_cut, patience_s=180)
        report(
            "6 readers that never read, 8 answers of 7,900 tokens with log-probabilities: all cut after, s",
            round(time.monotonic() - began_s),
        )
        report("  front's memory meanwhile, MiB more at most", most_bytes >> 20)
        assert most_bytes < 100 << 20
        for each in silent:
            each.close()
        wait_until_at_rest(client)
        check_control(client)
