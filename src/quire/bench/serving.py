"""What serving costs: the same streams through the engine alone and over HTTP, in turns, with everybody's CPU time.

The server is the one users start, in its own processes; the engine alone and the client have one each. All computing
processes have the same settings and the same number of threads. No prompt comes twice, so that no cache helps anybody.

A program of ours in a process of its own, asked and answered in lines of JSON; and what a process has cost.
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


class LoadProcess:
    """`python -m MODULE`, until it is closed."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: Mapping[str, object]) -> Any:
        self.tell(question)
        return self.hear()

    def tell(self, question: Mapping[str, object]) -> None:
        """A question whose answer is heard later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next answer. What was refused is raised here in its words."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self._module} ended before it had answered; see above.")
        answer = json.loads(line)
        if "problem" in answer:
            raise EngineFailed(answer["problem"])
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def answer_all(answer: Callable[[Any], Mapping[str, object]]) -> None:
    """The other side: one answer for each line of stdin. CPU seconds that it took are told with it."""
    for line in sys.stdin:
        began_s = time.process_time()
        try:
            told: Mapping[str, object] = {**answer(json.loads(line)), "cpu_s": time.process_time() - began_s}
        except QuireError as error:
            told = {"problem": error.message}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def cpu_seconds(pid: int) -> float:
    """What a process has computed in all its threads since it began. Linux alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


_PATIENCE_S = 300  # for a server to be ready
_WARM_UP_TOKENS = 4
_WORDS_IN_PROMPT = 24
_WORDS = ("the", "river", "small", "house", "light", "under", "seven", "green", "walks", "over", "stone", "and",
          "quiet", "morning", "paper", "north", "open", "wind", "carries", "old", "letters", "home")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """What is asked for in each repeat."""

    model: str | None
    num_streams: int
    num_output: int  # tokens of each stream, end tokens or not
    threads: int | None

    @property
    def num_tokens(self) -> int:
        return self.num_streams * self.num_output

    def prompts(self, seed: int) -> list[str]:
        dice = random.Random(seed)
        return [" ".join(dice.choices(_WORDS, k=_WORDS_IN_PROMPT)) for _ in range(self.num_streams)]


@dataclass(frozen=True, slots=True)
class ServingRepeat:
    """One turn of each. CPU seconds are of the turn over HTTP, but for `alone_cpu_s`."""

    alone_s: float
    http_s: float
    alone_cpu_s: float
    client_cpu_s: float
    front_cpu_s: float
    engine_cpu_s: float

    @property
    def ratio(self) -> float:
        """Speed over HTTP, as a share of the engine's alone."""
        return self.alone_s / self.http_s


def median_ratio(repeats: list[ServingRepeat]) -> float:
    return statistics.median(repeat.ratio for repeat in repeats)


def measure_serving(load: ServingLoad, repeats: int, say: Callable[[str], None]) -> list[ServingRepeat]:
    if sys.platform != "linux":
        raise ConfigError("quire bench serve reads CPU times from /proc, which is Linux's alone.")
    say("starting the server and the engine alone")
    with (
        closing(LoadProcess("quire.bench.engine_alone")) as alone,
        closing(LoadProcess("quire.bench.stream_client")) as client,
    ):
        alone.tell({"load": {"model": load.model, "max_num_seqs": load.num_streams, "threads": load.threads}})
        with _served(load) as server:
            alone.hear()
            course = _ServingRun(load, alone, client, server)
            say("warm-up")
            course.run(seed=0, num_output=min(_WARM_UP_TOKENS, load.num_output))
            measured = []
            for number in range(repeats):
                measured.append(course.run(seed=number + 1, num_output=load.num_output))
                say(f"repeat {number + 1} of {repeats}: {measured[-1].ratio:.3f}")
            return measured


@dataclass(frozen=True, slots=True)
class _Server:
    pid: int
    engine_pid: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class _ServingRun:
    """Both ways of computing the same streams."""

    load: ServingLoad
    alone: LoadProcess
    client: LoadProcess
    server: _Server

    def run(self, seed: int, num_output: int) -> ServingRepeat:
        asked = {"prompts": self.load.prompts(seed), "num_output": num_output}
        alone = self.alone.ask(asked)
        before = [cpu_seconds(pid) for pid in (self.server.pid, self.server.engine_pid)]
        over_http = self.client.ask({**asked, "host": self.server.host, "port": self.server.port})
        front_s, engine_s = (
            cpu_seconds(pid) - earlier
            for pid, earlier in zip((self.server.pid, self.server.engine_pid), before, strict=True)
        )
        for told in (alone, over_http):
            if told["tokens"] != self.load.num_streams * num_output:
                raise EngineFailed(f"{told['tokens']} tokens came, not {self.load.num_streams * num_output}.")
        return ServingRepeat(
            alone_s=alone["seconds"],
            http_s=over_http["seconds"],
            alone_cpu_s=alone["cpu_s"],
            client_cpu_s=over_http["cpu_s"],
            front_cpu_s=front_s,
            engine_cpu_s=engine_s,
        )


@contextmanager
def _served(load: ServingLoad) -> Iterator[_Server]:
    """`quire serve` as a user would start it, on a free port, until the end of the block."""
    command = [sys.executable, "-m", "quire", "serve", *([load.model] if load.model is not None else [])]
    command += ["--port", "0", "--max-num-seqs", str(load.num_streams)]
    command += [] if load.threads is None else ["--threads", str(load.threads)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("Ready"):
                ready.set()
        ready.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        ready.wait(_PATIENCE_S)
        address = next((found for line in said if (found := re.search(r"http://([\d.]+):(\d+)", line))), None)
        if address is None:
            raise EngineFailed(f"The server did not become ready; it said: {''.join(said[-5:]).strip()}")
        yield _Server(process.pid, children(process.pid)[0], address[1], int(address[2]))
    finally:
        process.terminate()
        process.wait()
