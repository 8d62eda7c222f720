"""Real `quire serve` processes for tests: start, requests, memory and metrics, stop."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import httpx

from tests import children

QUIRE = str(Path(sys.executable).with_name("quire"))
PATIENCE_S = 60  # for what must come; a test that waits so long has failed
START_PATIENCE_S = 240  # for a start: on a crowded machine one took more than a minute


class Running:
    """A server that is ready."""

    def __init__(self, *arguments: str, stdout: IO[str] | int = subprocess.DEVNULL) -> None:
        self.output: list[str] = []
        self._ready = threading.Event()
        self.process = children.start(
            [QUIRE, "serve", "--port", "0", *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            if not self._ready.wait(START_PATIENCE_S) or self.process.poll() is not None:
                raise AssertionError("it did not become ready:\n" + "".join(self.output))
            self.url = next(line for line in self.output if line.startswith("Ready")).split()[5]
        except BaseException:
            self._end()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output.append(line)
            if line.startswith("Ready"):
                self._ready.set()
        self._ready.set()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": PATIENCE_S, **options})

    def stop(self) -> int:
        """Stop it by SIGTERM; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # at once, whoever is inside
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its engine too, whatever became of the server
        self.process.wait()
        self._reader.join(PATIENCE_S)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        """The engine process among its children."""
        [engine] = self.children("quire.engine.engine_main")
        return engine

    def children(self, module: str) -> list[int]:
        """The children that run a module."""
        listed = [path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/children")]
        pids = [pid for pids in listed for pid in pids.split()]
        return [int(pid) for pid in pids if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]

    @property
    def resident_bytes(self) -> int:
        """Anonymous memory of the front process, without mapped files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert found is not None, status
        return int(found[1]) << 10

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


@contextlib.contextmanager
def serving(*arguments: str, **streams: Any) -> Iterator[Running]:
    running = Running(*arguments, **streams)
    try:
        yield running
    finally:
        running.stop()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until(holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline_s, "what was waited for did not come"
        time.sleep(0.01)


def load(client: httpx.Client) -> dict[str, Any]:
    return client.get("/load").json()  # type: ignore[no-any-return]


def kv_blocks(client: httpx.Client) -> dict[str, float]:
    """KV blocks by state, from `/metrics`."""
    page = client.get("/metrics").text
    return {state: float(value) for state, value in re.findall(r'quire_kv_blocks\{state="(\w+)"\} (\S+)', page)}


def counted(client: httpx.Client, name: str) -> float:
    """A counter or gauge without labels."""
    found = re.search(rf"^quire_{name} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def wait_until_at_rest(client: httpx.Client) -> None:
    """No request runs or waits, and every KV block is free or cached: nothing has leaked."""

    def at_rest() -> bool:
        load_now = load(client)
        busy = ("server_load", "num_requests", "num_requests_running", "num_requests_waiting", "kv_cache_usage")
        return not any(load_now.get(name, 1) for name in busy) and kv_blocks(client)["held"] == 0

    wait_until(at_rest)  # what has leaked is held for ever
