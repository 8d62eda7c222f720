"""A server whose stdout and stderr are blocked, closed or full serves on and stops normally."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import children
from tests.server.server_process import PATIENCE_S, QUIRE, START_PATIENCE_S, counted, wait_until
from tests.tiers import long_only


@contextlib.contextmanager
def serving_into(
    script: Path, out: int, err: int, closed: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A ready server with these as stdout and stderr, or with some of them closed, as a shell does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script.write_text('{"say": "Hello there."}')
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", QUIRE, "serve", "--port", str(port), "--script", str(script)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as most have it
    server = children.start(command, stdout=out, stderr=err, env=buffered)

    def is_ready(client: httpx.Client) -> bool:
        assert server.poll() is None, f"it ended with status {server.returncode}"
        with contextlib.suppress(httpx.TransportError):
            return client.get("/ready").status_code == 200
        return False

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            wait_until(lambda: is_ready(client), START_PATIENCE_S)
            yield server, client
    finally:
        children.end(server)


def check_responses(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "Hello there."


def full_pipe() -> tuple[int, int]:
    """A pipe that is full: the next write would block."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    return reading, writing


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("report", long_only(["closed", "full"]))
def test_a_full_disk_drops_log_lines_only(tmp_path: Path, default_model_path: Path, report: str) -> None:
    """The log on a full disk; the report of the start there too, or in a pipe that nobody reads any more."""
    full = os.open("/dev/full", os.O_WRONLY)
    err = full if report == "full" else closed_pipe()
    with serving_into(tmp_path / "script.jsonl", full, err) as (server, client):
        check_responses(client)
        wait_until(lambda: counted(client, "log_lines_lost_total") > 0)
        check_responses(client)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    for each in {full, err}:
        os.close(each)


@pytest.mark.long  # a closed pipe and a full disk are in one test above
def test_a_closed_log_pipe_drops_log_lines_only(tmp_path: Path, default_model_path: Path) -> None:
    writing = closed_pipe()
    with serving_into(tmp_path / "script.jsonl", writing, writing) as (server, client):
        check_responses(client)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    os.close(writing)


def test_a_blocked_log_reader_delays_no_request(tmp_path: Path, default_model_path: Path) -> None:
    out, err = full_pipe(), full_pipe()
    with serving_into(tmp_path / "script.jsonl", out[1], err[1]) as (server, client):
        check_responses(client)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    for each in (*out, *err):
        os.close(each)


@pytest.mark.parametrize("closed", [">&- 2>&-", *long_only([">&-"])])
def test_a_server_without_stdout_serves(tmp_path: Path, default_model_path: Path, closed: str) -> None:
    """Otherwise a socket would get its file descriptor, and log lines would be written to it."""
    nowhere = subprocess.DEVNULL
    with serving_into(tmp_path / "script.jsonl", nowhere, nowhere, closed) as (server, client):
        check_responses(client)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
