"""Many connections: idle ones, and as many streams as there are rows. `make test-chaos`."""

import asyncio
import contextlib
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.chaos.conftest import Dose, Report
from tests.chaos.test_long import percentile
from tests.server.many_clients import fetch, fetch_all, request
from tests.server.scripted_servers import check_control, completion_body, scripted
from tests.server.server_process import wait_until, wait_until_at_rest

CONTROL_REQUEST = request(completion_body("hi"))


async def controls_s(port: int, count: int) -> list[float]:
    """Seconds of requests, one after another; all are answered."""
    seconds = []
    for _ in range(count):
        response = await fetch(port, CONTROL_REQUEST)
        assert response.status == 200, response
        seconds.append(response.seconds)
    return seconds


def in_ms(seconds: list[float]) -> list[float]:
    """p50 and p99."""
    return [round(1000 * percentile(seconds, share), 1) for share in (50, 99)]


def idle(port: int, count: int, source: str, sent: bytes) -> list[socket.socket]:
    """Connections that send this and no more. Ports of one address do not suffice for more than some 20,000."""
    opened = []
    for _ in range(count):
        with contextlib.suppress(ConnectionError):
            opened.append(socket.create_connection(("127.0.0.1", port), source_address=(source, 0)))
            opened[-1].sendall(sent)
    return opened


def still_open(connections: list[socket.socket]) -> list[socket.socket]:
    """Those that the server has not closed; what it wrote is read."""
    left = []
    for each in connections:
        try:
            while each.recv(4096, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            left.append(each)
        except ConnectionError:
            pass
    return left


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp"], ids=["silent", "half_a_head"])
def test_idle_connections(tmp_path: Path, default_model_path: Path, report: Report, dose: Dose, sent: bytes) -> None:
    """More than the server holds: it keeps its limit, and another address is served. Then it closes them."""
    count = dose(5000)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(count, most - 200)
    with scripted(tmp_path) as server, server.client() as client:
        before_s = asyncio.run(controls_s(server.port, 50))
        before_bytes, num_files = server.resident_bytes, server.num_files
        began_s = time.monotonic()
        connections = idle(server.port, count, "127.0.0.2", sent)
        opened_s = time.monotonic() - began_s
        seconds = asyncio.run(controls_s(server.port, 200))
        held = server.num_files - num_files
        report(f"{count:,} idle connections that sent {len(sent)} bytes: opened in s", round(opened_s, 1))
        report("  held by the server at once, and its MiB more", (held, (server.resident_bytes - before_bytes) >> 20))
        report("  a control request from another address, p50 and p99 in ms; before", (in_ms(seconds), in_ms(before_s)))
        while still_open(connections):
            assert time.monotonic() < began_s + 120
            time.sleep(0.1)
        report("  all closed by the server after, s", round(time.monotonic() - began_s, 1))
        wait_until(lambda: server.num_files <= num_files + 4)
        check_control(client)
        for each in connections:
            each.close()
        assert server.resident_bytes - before_bytes < 128 << 20


@pytest.mark.timeout(600)
def test_streams(tmp_path: Path, default_model_path: Path, report: Report, dose: Dose) -> None:
    """All have rows and blocks at once. The clients share one process: what they see of each other is its time."""
    count = dose(500)
    sent = request(completion_body("endless", max_tokens=200, stream=True))
    sizes = ("--max-num-seqs", str(count + 8), "--max-waiting", "64", "--kv-cache-memory", "64GiB")  # none is allocated
    with scripted(tmp_path, *sizes) as server, server.client() as client:
        before_bytes, began_s = server.resident_bytes, time.monotonic()
        responses = asyncio.run(fetch_all(server.port, [sent] * count))
        seconds, grown_bytes = time.monotonic() - began_s, server.resident_bytes - before_bytes
        num_complete = sum(each.status == 200 and each.complete and not each.failed for each in responses)
        report(f"{count:,} concurrent streams of 200 tokens: complete", num_complete)
        report("  in all, s; front's MiB more", (round(seconds, 1), grown_bytes >> 20))
        wait_until_at_rest(client)
        check_control(client)
        assert num_complete == count
