"""Malformed requests and JSON bombs: always an error of the client's, never one of the server's."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.attack.conftest import HOSTILE, INNOCENT
from tests.chaos.conftest import Dice, Dose, Report
from tests.chaos.test_long import percentile
from tests.server.http.test_json_bombs import BOMBS
from tests.server.many_clients import RawClient, request
from tests.server.scripted_servers import check_control, completion_body
from tests.server.server_process import Running, wait_until_at_rest


def spoilt(chance: random.Random, good: Sequence[bytes]) -> bytes:
    """One of these requests with some bytes changed, cut or doubled."""
    sent = bytearray(chance.choice(good))
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(sent))
        kind = chance.randrange(3)
        if kind == 0:
            sent[place] = chance.randrange(256)
        elif kind == 1:
            del sent[place : place + chance.randrange(1, 8)]
        else:
            sent[place:place] = sent[place : place + chance.randrange(1, 64)]
    return bytes(sent)


@pytest.mark.timeout(0)
def test_malformed_requests(server: Running, report: Report, dose: Dose, dice: Dice) -> None:
    """Good requests with some bytes changed, cut or doubled; after each 1,000 a good one."""
    chance = dice(7)
    good = [
        request(completion_body("hi", max_tokens=2), headers=HOSTILE),
        request({"messages": [{"role": "user"}]}, "/v1/chat/completions", HOSTILE),
        request({"input": "hi", "max_output_tokens": 2}, "/v1/responses", HOSTILE),
        request({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, "/v1/messages", HOSTILE),
        request({"inputs": "hi", "parameters": {"max_new_tokens": 2}}, "/generate", HOSTILE),
        request({"prompt": "hi"}, "/tokenize", HOSTILE),
    ]
    statuses: Counter[int] = Counter()
    seconds: list[float] = []

    async def one() -> None:
        raw_client = await RawClient.connect(server.port, spoilt(chance, good))
        raw_client.end()  # a body that lacks some bytes is not waited for
        response = await raw_client.receive_all()
        statuses[response.status] += 1
        seconds.append(response.seconds)

    async def crowd() -> None:
        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(100)))

    count, engine, before_bytes = dose(10_000), server.engine_pid, server.resident_bytes
    slowest_s: list[float] = []  # p99 of each thousand
    began_s = time.monotonic()
    with server.client(headers=INNOCENT) as client:
        while statuses.total() < count:
            asyncio.run(crowd())
            slowest_s.append(percentile(seconds, 99))
            seconds.clear()
            check_control(client)
            if statuses.total() % 50_000 == 0:
                grown = (server.resident_bytes - before_bytes) >> 20
                print(f"{statuses.total():,} in {time.monotonic() - began_s:.0f} s, {grown} MiB more, {dict(statuses)}")
        for bomb in BOMBS.values():
            assert client.post("/v1/completions", content=bomb).status_code in (400, 413)
        check_control(client)
        wait_until_at_rest(client)
    report(f"{statuses.total():,} malformed requests: statuses (0: hung up)", dict(sorted(statuses.items())))
    report(
        "  p99 of 1,000, 100 at once, ms: median and worst", [round(1000 * percentile(slowest_s, p)) for p in (50, 100)]
    )
    report("  front's memory after them and the bombs, MiB more", (server.resident_bytes - before_bytes) >> 20)
    assert not any(status >= 500 for status in statuses) and server.engine_pid == engine
    assert server.resident_bytes - before_bytes < 128 << 20
