"""Long fault tests: disconnects, slow readers, overload, memory. `make test-chaos`."""

import asyncio
import errno
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time

import httpx
import pytest

from tests import children
from tests.chaos.conftest import NUM_ROWS, Dose, Report
from tests.chaos.memory_growth import rounds
from tests.server.many_clients import RawClient, fetch, request
from tests.server.scripted_servers import check_control, completion_body
from tests.server.server_process import Running, load, wait_until, wait_until_at_rest

ENDLESS = request(completion_body("endless", stream=True))
SHORT = request(completion_body("endless", max_tokens=50, stream=True))
LEAST_GOODPUT = 0.9 if (os.cpu_count() or 1) >= 4 else 0.5  # of the peak; on two cores the clients take the server's


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def test_disconnects(server: Running, report: Report) -> None:
    """1,000, at a random moment: on their way in, queued, in their prompt, streaming, plain."""
    chance = random.Random(11)
    kinds = [
        ENDLESS,
        request(completion_body("endless")),
        request(completion_body("endless " * 1500, stream=True)),
        ENDLESS[:-9],
    ]

    async def one() -> None:
        kind = chance.choice(kinds)
        raw_client = await RawClient.connect(server.port, kind)
        if chance.random() < 0.3 and kind is ENDLESS:
            await raw_client.receive_some()
        await asyncio.sleep(chance.random() * 0.3)
        raw_client.disconnect()

    async def crowd() -> None:
        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(100)))

    with server.client() as client:
        wait_until_at_rest(client)
        asyncio.run(crowd())
        began_s = time.monotonic()
        wait_until_at_rest(client)
        report("1,000 disconnects: all blocks back after, s (a beat is 0.5)", round(time.monotonic() - began_s, 2))
        check_control(client)


def never_reading(port: int, sent: bytes) -> socket.socket:
    raw_client = socket.socket()
    raw_client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw_client.connect(("127.0.0.1", port))
    raw_client.sendall(sent)
    return raw_client


async def gaps_s(port: int) -> list[float]:
    """Between the tokens of eight streams that are read as they come."""
    sent = request(completion_body("endless", max_tokens=300, stream=True))

    async def one() -> list[float]:
        raw_client = await RawClient.connect(port, sent)
        await raw_client.receive_until(b"data: ")
        gaps: list[float] = []
        while b"[DONE]" not in raw_client.received:
            before, received_s = len(raw_client.received), time.monotonic()
            await raw_client.receive_some()
            count = raw_client.received.count(b"data: ", before)
            gaps += [(time.monotonic() - received_s) / max(count, 1)] * count
        raw_client.disconnect()
        return gaps

    return [gap for gaps in await asyncio.gather(*(one() for _ in range(8))) for gap in gaps]


async def gaps_beside_s(port: int, num_others: int, reading: bool) -> list[float]:
    """The same in parallel with clients that read or never read; the engine does the same work for both."""
    sent = request(completion_body("endless", max_tokens=300, stream=True))
    if reading:
        others = asyncio.gather(*(fetch(port, sent) for _ in range(num_others)))
        found = await gaps_s(port)
        await others
        return found
    silent = [never_reading(port, sent) for _ in range(num_others)]
    found = await gaps_s(port)
    for each in silent:
        each.close()
    return found


def beside(port: int, *, reading: bool) -> float:
    """p99 in ms, beside 40 others."""
    return round(1000 * percentile(asyncio.run(gaps_beside_s(port, 40, reading)), 99), 2)


def test_slow_readers(server: Running, report: Report) -> None:
    """500 sockets of one address that never read. They hold their places until they are cut off, after 25 s, so they
    come as places are given back. Clients of another address are served meanwhile."""
    sent = request(completion_body("endless", max_tokens=300, stream=True, logprobs=5))
    slow: list[socket.socket] = []
    num_places, batch = 2 * NUM_ROWS, 50  # rows and queue
    with server.client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as client:
        wait_until_at_rest(client)
        report("p99 between tokens, ms: beside 40 who read", [beside(server.port, reading=True) for _ in range(5)])
        before_bytes = server.resident_bytes
        while len(slow) < 500:
            wait_until(lambda: load(client)["server_load"] <= num_places - batch)
            slow += [never_reading(server.port, sent) for _ in range(batch)]
            check_control(client)
        check_control(client)
        grown_bytes = server.resident_bytes - before_bytes
        report("500 slow readers: front's memory, MiB more", grown_bytes >> 20)
        assert grown_bytes < 256 << 20
        began_s = time.monotonic()
        wait_until(lambda: load(client)["server_load"] == 0)  # for one minute at most, as promised
        report("  all cut off after, s", round(time.monotonic() - began_s, 1))
        p99_ms: dict[bool, list[float]] = {True: [], False: []}
        for reading in (True, False) * 5:
            p99_ms[reading].append(beside(server.port, reading=reading))
            wait_until(lambda: load(client)["server_load"] == 0)
        report("the same with the answers of 500 who never do unread", p99_ms[True])
        report("the same beside 40 more who never do instead", p99_ms[False])
        for each in slow:
            each.close()
        wait_until_at_rest(client)
        check_control(client)


@pytest.mark.timeout(300)
def test_readers_at_10_bytes_per_second(server: Running, report: Report) -> None:
    """500 that read ten bytes in each second, 50 after another; each that is admitted is reset within a minute."""
    sent = request(completion_body("endless", max_tokens=300, stream=True, logprobs=5))
    opened: dict[socket.socket, float] = {}
    num_refused = 0
    reset_s: list[float] = []

    def read_a_little() -> None:
        for each in list(opened):
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET:
                reset_s.append(time.monotonic() - opened.pop(each))
                each.close()
            else:
                each.recv(10, socket.MSG_DONTWAIT)

    with server.client() as client:
        wait_until_at_rest(client)
        before_bytes = server.resident_bytes
        for _ in range(10):
            began_s = time.monotonic()
            slow = [never_reading(server.port, sent) for _ in range(50)]
            for each in slow:
                if each.recv(12) == b"HTTP/1.1 200":
                    opened[each] = began_s
                else:  # those before it have all places
                    num_refused += 1
                    each.close()
            read_a_little()
        grown_bytes = server.resident_bytes - before_bytes
        while opened and time.monotonic() < max(opened.values()) + 60:
            time.sleep(1)  # their rate
            read_a_little()
        report("500 readers at 10 bytes/s: admitted, and refused", [len(opened) + len(reset_s), num_refused])
        figures = (min(reset_s), statistics.median(reset_s), max(reset_s))
        report("  reset after, s: the first, the median, the last", [round(seconds, 1) for seconds in figures])
        report("  front's memory, MiB more", grown_bytes >> 20)
        assert not opened and grown_bytes < 100 << 20
        check_control(client)


def test_overload(server: Running, report: Report, dose: Dose) -> None:
    """Five and ten times as many clients as rows, for `--dose` seconds: no fewer responses per second."""
    seconds = dose(10)

    async def loaded(num_clients: int, seconds: float) -> tuple[int, list[float]]:
        refusals_s: list[float] = []
        answered = 0
        until_s = time.monotonic() + seconds

        async def client(chance: random.Random) -> None:
            nonlocal answered
            await asyncio.sleep(chance.random())  # arrivals are not synchronized
            while time.monotonic() < until_s:
                response = await fetch(server.port, SHORT)
                if response.complete:
                    answered += time.monotonic() < until_s
                else:
                    assert response.status == 429 and response.retry_after_s, response
                    refusals_s.append(response.seconds)
                    await asyncio.sleep(chance.uniform(0.75, 1.25))  # Retry-After, with jitter as clients have

        await asyncio.gather(*(client(random.Random(number)) for number in range(num_clients)))
        return answered, refusals_s

    with server.client() as client:
        wait_until_at_rest(client)
        peak, _ = asyncio.run(loaded(NUM_ROWS, 10))
        report("peak, answers/s with as many clients as rows", peak / 10)
        for times in (5, 10):
            command = [sys.executable, "-m", "tests.chaos.prober", str(server.port), str(seconds)]
            with children.started(command, stdout=subprocess.PIPE, text=True) as prober:
                answered, refusals_s = asyncio.run(loaded(times * NUM_ROWS, seconds))
                probed = json.loads(prober.communicate(timeout=60)[0])
            began_s = time.monotonic()
            wait_until_at_rest(client)
            check_control(client)
            report(f"{times}× overload, answers/s", round(answered / seconds, 1))
            report("  recovery after it, s", round(time.monotonic() - began_s, 2))
            for what, taken_s in {"refusal, in the crowd's process": refusals_s, **probed}.items():
                figures = [round(1000 * percentile(taken_s, share), 1) for share in (50, 90, 99)]
                report(f"  {what}: number; p50, p90 and p99 in ms", (len(taken_s), *figures))
            assert answered / seconds >= LEAST_GOODPUT * peak / 10


def test_soak(server: Running, report: Report) -> None:
    """Rounds of requests of which a fifth is left early: what the front holds must not grow from round to round."""
    chance = random.Random(3)

    async def one() -> None:
        raw_client = await RawClient.connect(server.port, SHORT)
        if chance.random() < 0.2:
            await raw_client.receive_some()
            raw_client.disconnect()
        else:
            assert (await raw_client.receive_all()).complete

    async def round_of(num_requests: int) -> None:
        starts = asyncio.Semaphore(NUM_ROWS)

        async def assigned() -> None:
            async with starts:
                await one()

        await asyncio.gather(*(assigned() for _ in range(num_requests)))

    held: list[tuple[int, int, int]] = []
    with server.client() as client:
        for _ in range(8):
            asyncio.run(round_of(500))
            wait_until_at_rest(client)
            held.append((server.resident_bytes >> 10, server.num_files, server.num_threads))
    report("soak of 4,000 with 20 % aborts: (KiB, files, threads) after half and at the end", (held[3], held[-1]))
    assert statistics.median(kib for kib, _, _ in held[4:]) < statistics.median(kib for kib, _, _ in held[:4]) + 8192
    assert held[-1][1] <= held[3][1] + 4 and held[-1][2] <= held[3][2]


def test_memory_does_not_grow_with_requests(server: Running, report: Report) -> None:
    held = [each >> 10 for each in rounds(server, 4)]
    report("KiB after each 10,000 of 40,000 mixed requests", held)
    assert held[-1] - held[1] < 1024, "51 bytes per request"
