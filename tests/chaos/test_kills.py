"""Signals under 64 streams: the engine is killed or stopped, the server is killed or drained. `make test-chaos`."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from quire.server.engine_supervisor import STABLE_S
from tests.attack.test_advisories import tree
from tests.chaos.conftest import NUM_ROWS, Dose, Report
from tests.server.many_clients import RawClient, RawResponse, fetch_all, request
from tests.server.scripted_servers import CONTROL, check_control, completion_body, scripted
from tests.server.server_process import START_PATIENCE_S, Running, is_alive, wait_until, wait_until_at_rest

ENDLESS = request(completion_body("endless", stream=True))


async def streams(port: int, sent: bytes = ENDLESS) -> list[RawClient]:
    """As many as there are rows; each has begun."""
    raw_clients = [await RawClient.connect(port, sent) for _ in range(NUM_ROWS)]
    for raw_client in raw_clients:
        await raw_client.receive_until(b'"text"')
    return raw_clients


def strike(server: Running, number: int) -> float:
    """A signal to the engine under these streams: seconds until the last client has its error. None looks complete."""

    async def crowd() -> list[float]:
        raw_clients = await streams(server.port)
        os.kill(server.engine_pid, number)
        struck_s = time.monotonic()

        async def outcome(raw_client: RawClient) -> float:
            response = await raw_client.receive_all()
            assert response.failed and not response.complete
            return time.monotonic() - struck_s

        return list(await asyncio.gather(*map(outcome, raw_clients)))

    return max(asyncio.run(crowd()))


def replaced(server: Running) -> float:
    """Seconds until another engine is ready and answers."""
    began_s = time.monotonic()
    with server.client() as client:
        wait_until(lambda: client.get("/ready").status_code == 200, START_PATIENCE_S)
        seconds = time.monotonic() - began_s
        check_control(client)
        wait_until_at_rest(client)
    return seconds


@pytest.mark.parametrize(("number", "most_s"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 35)])
def test_a_signal_to_the_engine(server: Running, report: Report, number: signal.Signals, most_s: float) -> None:
    with server.client() as client:
        wait_until_at_rest(client)
    last_s = strike(server, number)
    report(f"{number.name} under 64 streams: last outcome after, s", round(last_s, 2))
    report("  another engine after, s", round(replaced(server), 2))
    assert last_s < most_s
    responses = asyncio.run(fetch_all(server.port, [request(completion_body("hi"))] * 64))
    assert all(CONTROL.encode() in each.body for each in responses)


@pytest.mark.parametrize("pause_s", [0.0, STABLE_S + 1], ids=["in_a_row", "spaced"])
def test_repeated_kills(tmp_path: Path, default_model_path: Path, report: Report, dose: Dose, pause_s: float) -> None:
    """`kill -9` of the engine, as soon as it is ready again, or when it counts as stable: then no wait grows."""
    count = dose(3 if pause_s == 0 else 1)
    outcomes_s, ready_s, front_kib, files = [], [], [], []
    with scripted(tmp_path, "--max-num-seqs", str(NUM_ROWS)) as server:
        for _ in range(count):
            time.sleep(pause_s)
            outcomes_s.append(strike(server, signal.SIGKILL))
            ready_s.append(replaced(server))
            front_kib.append(server.resident_bytes >> 10)
            files.append(server.num_files)
            print(f"kill {len(files)}: outcome {outcomes_s[-1]:.2f} s, ready {ready_s[-1]:.1f} s, {front_kib[-1]} KiB")
    report(f"{count} kills of the engine, {pause_s:g} s apart: the slowest last outcome, s", round(max(outcomes_s), 2))
    report("  another engine after, s: the first, the slowest", [round(ready_s[0], 2), round(max(ready_s), 2)])
    report("  front's KiB and files after the first and the last", (front_kib[0], front_kib[-1], files[0], files[-1]))
    assert max(outcomes_s) < 1 and files[-1] <= files[0] + 4
    assert max(ready_s) < (30 if pause_s == 0 else 10)


def test_kills_of_the_server(tmp_path: Path, default_model_path: Path, report: Report, dose: Dose) -> None:
    """At any moment, of the start too: no process of it is left 5 s later."""
    chance = random.Random(15)
    seconds = []
    for number in range(dose(2)):
        with scripted(tmp_path, "--max-num-seqs", str(NUM_ROWS)) as server:
            pids = tree(server.process.pid)
            if number % 2:
                asyncio.run(kill_amid(server, chance))
            server.process.kill()
            killed_s = time.monotonic()
            server.process.wait()
            wait_until(lambda pids=pids: not any(map(is_alive, pids)))  # type: ignore[misc]
            seconds.append(time.monotonic() - killed_s)
    report(f"{len(seconds)} kills of the server: no process left after, s (the slowest)", round(max(seconds), 2))
    assert max(seconds) < 5


async def kill_amid(server: Running, chance: random.Random) -> None:
    """In the midst of streams and of a start of another engine."""
    raw_clients = await streams(server.port)
    if chance.random() < 0.5:
        os.kill(server.engine_pid, signal.SIGKILL)
        await asyncio.sleep(chance.random() * 2)
    server.process.kill()
    for raw_client in raw_clients:
        raw_client.disconnect()


def test_drain(tmp_path: Path, default_model_path: Path, report: Report) -> None:
    """SIGTERM under 64 streams: those that end in time are complete; after the limit the others get an error."""

    async def crowd(server: Running, num_tokens: int) -> list[RawResponse]:
        sent = request(completion_body("endless", max_tokens=num_tokens, stream=True))
        raw_clients = await streams(server.port, sent)
        server.process.send_signal(signal.SIGTERM)
        return list(await asyncio.gather(*(raw_client.receive_all() for raw_client in raw_clients)))

    limit_s = 20
    for num_tokens, step_ms, in_time in ((500, 5.0, True), (2000, 50.0, False)):
        options = ("--max-num-seqs", str(NUM_ROWS), "--shutdown-timeout", str(limit_s))
        with scripted(tmp_path, *options, step_ms=step_ms) as server:
            began_s = time.monotonic()
            responses = asyncio.run(crowd(server, num_tokens))
            status = server.process.wait(60)
            seconds = time.monotonic() - began_s
        num_complete = sum(each.complete and not each.failed for each in responses)
        num_errors = sum(each.failed and not each.complete for each in responses)
        report(
            f"SIGTERM under 64 streams of {num_tokens} tokens: complete, with an error, ended after s",
            (num_complete, num_errors, round(seconds, 1)),
        )
        assert status == 0 and (num_complete, num_errors) == ((NUM_ROWS, 0) if in_time else (0, NUM_ROWS))
        assert seconds < limit_s + 4
