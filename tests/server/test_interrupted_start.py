"""An interrupted start ends quietly: no traceback of the engine."""

import os
import queue
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from quire.config import EngineConfig
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import StartEngine
from quire.engine.startup import StartupPhase
from quire.engine.stats import EngineInfo
from quire.engine.wire import ToFront, pack
from tests import children
from tests.server.server_process import PATIENCE_S, QUIRE, wait_until
from tests.tiers import long_only

LINE = '{"say": "Hello there."}'


@pytest.fixture
def script(tmp_path: Path, default_model_path: Path) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text(LINE)
    return path


def test_an_engine_whose_parent_exits_during_its_start_prints_nothing(script: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "quire.engine.engine_main", str(theirs.fileno()), str(os.getpid())]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        engine = children.start(command, pass_fds=[theirs.fileno()], **pipes)
    try:
        with ours:
            ours.sendall(pack(StartEngine(EngineConfig(), str(script))))
        out, err = engine.communicate(timeout=PATIENCE_S)
    finally:
        children.end(engine)
    assert (engine.returncode, out, err.decode()) == (0, b"", "")


def test_signals_for_the_parent_do_not_end_a_starting_engine(script: Path) -> None:
    messages: queue.SimpleQueue[ToFront | None] = queue.SimpleQueue()
    child = EngineProcess(messages.put, lambda: messages.put(None))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)  # long before it could have installed a handler
    child.start()
    child.send(StartEngine(EngineConfig(), str(script)))
    try:
        while isinstance(output := messages.get(timeout=PATIENCE_S), StartupPhase):
            pass
        assert isinstance(output, EngineInfo)
    finally:
        child.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, *long_only([signal.SIGINT])])
def test_stopping_a_starting_server_is_no_failure(default_model_path: Path, tmp_path: Path, number: int) -> None:
    never = tmp_path / "never.jsonl"
    os.mkfifo(never)  # without a writer: the engine waits for its script forever
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [QUIRE, "serve", "--port", str(port), "--script", str(never)]

    def starting() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready").json() == {"status": "starting"}
        except httpx.TransportError:
            return False

    with children.started(command, stderr=subprocess.PIPE, text=True) as server:
        wait_until(starting)
        server.send_signal(number)
        output = server.communicate(timeout=PATIENCE_S)[1].splitlines()
    assert server.returncode == 0 and len(output) == 2 and output[-1] == "Stopped.", output


@pytest.mark.parametrize("number", [signal.SIGINT, *long_only([signal.SIGTERM])])
def test_stopping_a_server_before_it_listens_is_no_failure(tmp_path: Path, number: int) -> None:
    never = tmp_path / "never.jinja"
    os.mkfifo(never)
    command = [QUIRE, "serve", "--chat-template", str(never)]
    with (
        children.started(command, stderr=subprocess.PIPE, text=True) as server,
        never.open("w"),  # comes back when the server has opened it, and keeps it waiting for a template
    ):
        server.send_signal(number)
        output = server.communicate(timeout=PATIENCE_S)[1].splitlines()
    assert (server.returncode, output) == (0, ["Stopped."])
