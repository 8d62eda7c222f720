"""The cost of serving: the same streams through the engine alone and over HTTP, interleaved, with CPU times.

The server is `quire serve` in its own processes; the engine alone and the client have one process each. All
engines have the same settings and the same number of threads. No prompt is used twice, so that no prefix cache helps.

Helper processes are `python -m MODULE`: one request and one response per line, as JSON.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError, EngineFailed, QuireError


class HelperProcess:
    """`python -m MODULE`, until it is closed."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, request: Mapping[str, object]) -> Any:
        self.send(request)
        return self.receive()

    def send(self, request: Mapping[str, object]) -> None:
        """Send a request whose response is received later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """The next response. An error of the other side is raised here."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self._module} ended without a response; see above.")
        response = json.loads(line)
        if "problem" in response:
            raise EngineFailed(response["problem"])
        return response

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def serve_stdin(handle: Callable[[Any], Mapping[str, object]]) -> None:
    """The helper's side: one response, with its CPU seconds, for each line of stdin."""
    for line in sys.stdin:
        started_s = time.process_time()
        try:
            response: Mapping[str, object] = {**handle(json.loads(line)), "cpu_s": time.process_time() - started_s}
        except QuireError as error:
            response = {"problem": error.message}
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process since its start. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


_READY_TIMEOUT_S = 300
_WARM_UP_TOKENS = 4
_WORDS_IN_PROMPT = 24
_WORDS = ("the", "river", "small", "house", "light", "under", "seven", "green", "walks", "over", "stone", "and",
          "quiet", "morning", "paper", "north", "open", "wind", "carries", "old", "letters", "home")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """The requests of each repeat."""

    model: str | None
    num_streams: int
    num_output: int  # tokens of each stream; end tokens are ignored
    threads: int | None

    @property
    def num_tokens(self) -> int:
        return self.num_streams * self.num_output

    def prompts(self, seed: int) -> list[str]:
        generator = random.Random(seed)
        return [" ".join(generator.choices(_WORDS, k=_WORDS_IN_PROMPT)) for _ in range(self.num_streams)]


@dataclass(frozen=True, slots=True)
class ServingRepeat:
    """One run of each. CPU seconds are of the run over HTTP, except `alone_cpu_s`."""

    alone_s: float
    http_s: float
    alone_cpu_s: float
    client_cpu_s: float
    front_cpu_s: float
    engine_cpu_s: float

    @property
    def ratio(self) -> float:
        """Throughput over HTTP by that of the engine alone."""
        return self.alone_s / self.http_s


def median_ratio(repeats: list[ServingRepeat]) -> float:
    return statistics.median(repeat.ratio for repeat in repeats)


def measure_serving(load: ServingLoad, repeats: int, say: Callable[[str], None]) -> list[ServingRepeat]:
    if sys.platform != "linux":
        raise ConfigError("quire bench overhead reads CPU times from /proc, which only Linux has.")
    say("starting the server and the engine alone")
    with (
        closing(HelperProcess("quire.bench.engine_alone")) as alone,
        closing(HelperProcess("quire.bench.load_client")) as client,
    ):
        alone.send({"load": {"model": load.model, "max_num_seqs": load.num_streams, "threads": load.threads}})
        with running_server(_arguments(load)) as server:
            alone.receive()
            both = _ServingRun(load, alone, client, server)
            say("warm-up")
            both.run(seed=0, num_output=min(_WARM_UP_TOKENS, load.num_output))
            measured = []
            for number in range(repeats):
                measured.append(both.run(seed=number + 1, num_output=load.num_output))
                say(f"repeat {number + 1} of {repeats}: {measured[-1].ratio:.3f}")
            return measured


@dataclass(frozen=True, slots=True)
class RunningServer:
    """`quire serve` in its own processes."""

    pid: int
    engine_pid: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class _ServingRun:
    """The same streams on the engine alone and over HTTP."""

    load: ServingLoad
    alone: HelperProcess
    client: HelperProcess
    server: RunningServer

    def run(self, seed: int, num_output: int) -> ServingRepeat:
        request = {"prompts": self.load.prompts(seed), "num_output": num_output}
        alone = self.alone.call(request)
        before = [cpu_seconds(pid) for pid in (self.server.pid, self.server.engine_pid)]
        over_http = self.client.call({**request, "host": self.server.host, "port": self.server.port})
        front_s, engine_s = (
            cpu_seconds(pid) - earlier
            for pid, earlier in zip((self.server.pid, self.server.engine_pid), before, strict=True)
        )
        for response in (alone, over_http):
            if response["tokens"] != self.load.num_streams * num_output:
                raise EngineFailed(f"{response['tokens']} tokens came, not {self.load.num_streams * num_output}.")
        return ServingRepeat(
            alone_s=alone["seconds"],
            http_s=over_http["seconds"],
            alone_cpu_s=alone["cpu_s"],
            client_cpu_s=over_http["cpu_s"],
            front_cpu_s=front_s,
            engine_cpu_s=engine_s,
        )


def _arguments(load: ServingLoad) -> list[str]:
    arguments = [] if load.model is None else [load.model]
    arguments += ["--max-num-seqs", str(load.num_streams)]
    return arguments if load.threads is None else [*arguments, "--threads", str(load.threads)]


@contextmanager
def running_server(arguments: list[str]) -> Iterator[RunningServer]:
    """`quire serve` with these arguments on a free port, until the end of the block."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    ready = threading.Event()

    def read_stderr() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("Ready"):
                ready.set()
        ready.set()

    threading.Thread(target=read_stderr, daemon=True).start()
    try:
        ready.wait(_READY_TIMEOUT_S)
        address = next((found for line in lines if (found := re.search(r"http://([\d.]+):(\d+)", line))), None)
        if address is None:
            raise EngineFailed(f"The server did not become ready; its last lines: {''.join(lines[-5:]).strip()}")
        yield RunningServer(process.pid, children(process.pid)[0], address[1], int(address[2]))
    finally:
        process.terminate()
        process.wait()
