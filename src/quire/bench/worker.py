"""A program of ours in a process of its own, asked and answered in lines of JSON; and what a process has cost."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import EngineFailed, QuireError


class Worker:
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
