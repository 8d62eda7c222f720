"""`python -m quire.text.template_worker FD`: renders chat templates in a process that is killed when it takes too much.

The sandbox counts steps and characters, but a template may spend any time and memory inside one operation of Python
(`'%1500000000d' % 1`), and a filter of a constant runs when the template is compiled. So both happen here, under limits
that the kernel enforces. One process serves a program's renderings, in order, and is replaced when it was killed.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quire.core.errors import ChatTemplateError, QuireError
from quire.core.worker_process import WorkerProcess, connect, limit_memory, limit_time, receive_frame, send_frame
from quire.text.template_sandbox import compile_sandboxed, render_sandboxed

CPU_S = 2.0  # for one rendering; a chat of 10,000 messages takes 0.1 s
WALL_S = 20.0  # on a busy machine
NUM_BYTES = 512 << 20  # beyond those of the process at its start; the largest text takes 64 MiB, and there are copies
_GRACE_S = 2.0


class TemplateWorkerLost(QuireError):
    """Something other than its own limits killed the process twice: the cause is the machine, not the template."""

    status = 503
    code = "template_worker_lost"
    retry_after_s = 2.0
    exit_code = 1


class TemplateWorker:
    """The process, started when it is first needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._owner = 0  # the process that started it: after a fork, another one is needed

    def call(self, message: Mapping[str, object]) -> str:
        """The rendered text. Raises `ChatTemplateError`, or `TemplateWorkerLost`."""
        with self._lock:
            for _ in range(2):
                process = self._running()
                reply = _exchange(process, {**message, "cpu_s": CPU_S, "wall_s": WALL_S, "num_bytes": NUM_BYTES})
                if reply is not None:
                    break
                self._process = None
                status = process.close()
                if status in (-signal.SIGPROF, -signal.SIGALRM):
                    raise ChatTemplateError(
                        f"The model's chat template was stopped: it took more than {CPU_S:g} s of CPU time, or "
                        f"{WALL_S:g} s in all."
                    )
            else:
                if status == -signal.SIGKILL:
                    raise TemplateWorkerLost(
                        "The process that renders chat templates was killed twice, as a machine without free memory "
                        "does. Try again."
                    )
                raise ChatTemplateError(
                    f"The model's chat template was stopped: it ended its process twice ({status})."
                )
        if "error" in reply:
            raise ChatTemplateError(reply["error"])
        return str(reply["text"])

    def _running(self) -> WorkerProcess:
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = WorkerProcess("quire.text.template_worker"), os.getpid()
        return self._process


def _exchange(process: WorkerProcess, message: Mapping[str, object]) -> dict[str, Any] | None:
    process.socket.settimeout(WALL_S + _GRACE_S)
    try:
        send_frame(process.socket, message)
        reply: Any = receive_frame(process.socket)
    except OSError:
        return None
    return reply  # type: ignore[no-any-return]


_worker = TemplateWorker()


def render_in_worker(template: str, variables: Mapping[str, object], now: datetime) -> str:
    """Render. Raises `ChatTemplateError`, or `TemplateWorkerLost`."""
    return _worker.call({"template": template, "variables": variables, "now": now.isoformat()})


def check_template(template: str) -> None:
    """Raise `ChatTemplateError` if the template does not compile."""
    _worker.call({"template": template})


def main(descriptor: str) -> None:
    connection = connect(descriptor)
    is_limited = False
    while (message := receive_frame(connection)) is not None:
        job: Any = message
        if not is_limited:
            limit_memory(job["num_bytes"])
            is_limited = True
        limit_time(job["cpu_s"], job["wall_s"])
        try:
            if "variables" in job:
                text = render_sandboxed(job["template"], job["variables"], datetime.fromisoformat(job["now"]))
            else:
                text = ""
                compile_sandboxed(job["template"])
            reply = {"text": text}
        except ChatTemplateError as error:
            reply = {"error": error.message}
        limit_time(0, 0)
        try:
            send_frame(connection, reply)
        except MemoryError:
            send_frame(connection, {"error": "The model's chat template was stopped: its text takes too much memory."})


if __name__ == "__main__":
    main(sys.argv[1])
