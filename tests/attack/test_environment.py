"""Around requests: a disk that takes nothing, a clock that jumps, an engine that does not start, and many threads."""

import asyncio
import itertools
import os
import random
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from quire.config import EngineConfig
from quire.engine.open_model import open_model
from tests.architecture.test_trust import calls, offenders
from tests.architecture.tree import dotted
from tests.attack.conftest import INNOCENT
from tests.attack.test_advisories import tree
from tests.chaos.conftest import Report
from tests.server.many_clients import fetch_all, request
from tests.server.scripted_servers import check_control, completion_body, scripted, scripted_here
from tests.server.server_process import Running, counted, wait_until

NUM_THREADS, NUM_TEXTS = 32, 10_000
NUM_EQUAL_IDS = 200
HOUR_S = 3600.0
# Who may read the wall clock: stamps that clients and logs see.
WALL_CLOCK = {"server", "cli", "bench", "text"}


def test_one_tokenizer_and_many_threads(default_model_path: Path, report: Report) -> None:
    tokenizer = open_model(EngineConfig(str(default_model_path))).tokenizer
    assert tokenizer is not None
    chance = random.Random(27)
    texts = [" ".join(chance.choices(["alpha", "βήτα", "😀", "12", "\n", "日本"], k=6)) for _ in range(200)]
    expected = [(tokenizer.encode(text), text) for text in texts]

    def one(seed: int) -> int:
        mine = random.Random(seed)
        wrong = 0
        for _ in range(NUM_TEXTS):
            ids, text = expected[mine.randrange(len(expected))]
            wrong += tokenizer.encode(text) != ids or tokenizer.decode(ids) != text
        return wrong

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        wrong = sum(pool.map(one, range(NUM_THREADS)))
    report(f"tokenizer, {NUM_THREADS} threads × {NUM_TEXTS:,} texts there and back: wrong", wrong)
    assert wrong == 0


def test_equal_request_ids(server: Running, report: Report) -> None:
    """Each response has the prompt of its own request."""
    headers = {**INNOCENT, "X-Request-Id": "the-same"}
    bodies = [completion_body(f"number {number}", max_tokens=3, echo=True) for number in range(NUM_EQUAL_IDS)]
    sent = [request(body, headers=headers) for body in bodies]
    responses = asyncio.run(fetch_all(server.port, sent, at_once=50))
    wrong = [n for n, each in enumerate(responses) if f'"text":"number {n}Hello'.encode() not in each.body]
    own = {line for each in responses for line in each.head.splitlines() if line.startswith(b"x-quire-request-id: ")}
    report(f"{NUM_EQUAL_IDS} equal request ids: wrong pairings", len(wrong))
    assert not wrong and len(own) == NUM_EQUAL_IDS


def limit_files(pids: list[int], num_bytes: int) -> None:
    """The longest file that these processes may write: with 0 each write to a file fails, as on a full disk."""
    for pid in pids:
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, most))


def test_no_file_can_be_written(tmp_path: Path, default_model_path: Path, report: Report) -> None:
    """From one moment to the next, for all processes of a server whose log is a file; then it can be written again."""
    log = tmp_path / "log"
    with log.open("w") as out, scripted(tmp_path, stdout=out) as server, server.client() as client:
        check_control(client)
        wait_until(lambda: log.stat().st_size > 0)
        limit_files(tree(server.process.pid), 0)
        for _ in range(200):
            check_control(client)
        wait_until(lambda: counted(client, "log_lines_lost_total") > 0)
        lost, size = counted(client, "log_lines_lost_total"), log.stat().st_size
        limit_files(tree(server.process.pid), resource.RLIM_INFINITY)
        check_control(client)
        wait_until(lambda: log.stat().st_size > size)
    report("200 requests while no file can be written: failed; lines of the log lost, and counted", (0, int(lost)))


def test_a_clock_that_jumps(tmp_path: Path, default_model_path: Path, report: Report) -> None:
    """±1 h at each look, for both halves of a server: no request fails or expires, no counter goes down."""
    jumps = itertools.cycle((0.0, HOUR_S, -HOUR_S, 1.0, -1.0))
    wall_clock = time.time
    with patch("time.time", lambda: wall_clock() + next(jumps)), scripted_here(tmp_path) as server:
        sent = [request(completion_body("hi", timeout_s=30, stream=number % 2 == 0)) for number in range(200)]
        responses = asyncio.run(fetch_all(server.port, sent, at_once=20))
        with server.client() as client:
            check_control(client)
            values = [line.rpartition(" ")[2] for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
    report(
        "200 requests with deadlines while the clock jumps ±1 h: failed", sum(not each.complete for each in responses)
    )
    assert all(each.status == 200 and each.complete for each in responses)
    assert not [value for value in values if value.startswith("-")]


def test_the_scheduler_and_the_engine_read_no_wall_clock() -> None:
    looks = ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now")
    assert not offenders(
        lambda tree: [dotted(call.func) for call in calls(tree) if dotted(call.func) in looks], WALL_CLOCK
    )


@pytest.mark.timeout(300)
def test_an_engine_that_cannot_start_again(tmp_path: Path, default_model_path: Path, report: Report) -> None:
    """Its cause is in /health, without the paths of this machine, and it starts when the cause is gone."""
    with scripted(tmp_path) as server, server.client() as client:
        script = next(tmp_path.glob("script-*.jsonl"))
        lines = script.read_text()
        script.write_text("{}")
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: "say" in client.get("/health").json().get("reason", ""))
        health = client.get("/health")
        script.write_text(lines)
        wait_until(lambda: client.get("/ready").status_code == 200)
        restarts = counted(client, "engine_restarts_total")
        check_control(client)
    report(
        "an engine that cannot start: status of /health; restarts until the cause was gone",
        (health.status_code, restarts),
    )
    assert health.status_code == 503 and "\n" not in health.json()["reason"] and str(tmp_path) not in health.text
