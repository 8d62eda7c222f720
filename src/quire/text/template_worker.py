"""`python -m quire.text.template_worker FD`: renders chat templates in a process that is killed when it takes too much.

The sandbox counts steps and characters, but a template may spend any time and memory inside one operation of Python
(`'%1500000000d' % 1`), and a filter of a constant runs when the template is compiled. So both happen here, under limits
that the kernel enforces. A process renders one text at a time. Where a rendering takes long, the next one gets another
process instead of waiting; one that was killed is replaced.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from quire.core.errors import ChatTemplateError, QuireError
from quire.core.worker_process import WorkerProcess, connect, limit_memory, limit_time, receive_frame, send_frame
from quire.text.template_sandbox import compile_sandboxed, render_sandboxed

_MODULE = "quire.text.template_worker"
CPU_S = 2.0  # for one rendering; a chat of 10,000 messages takes 0.1 s
WALL_S = 20.0  # on a busy machine
NUM_BYTES = 512 << 20  # beyond those of the process at its start; the largest text takes 64 MiB, and there are copies
_GRACE_S = 2.0
# Of which a client has at most nine at once (`TextThreads`: eight short texts, a long one): one is left for others.
_MAX_PROCESSES = 10
_START_AFTER_S = 0.05  # a wait for a busy process before another is started: that takes 0.1 s, a rendering 0.2 ms
_IDLE_S = 60.0  # an unused process is ended after this time, if there is another


class TemplateWorkerLost(QuireError):
    """Something other than its own limits killed the process twice: the cause is the machine, not the template."""

    status = 503
    code = "template_worker_lost"
    retry_after_s = 2.0
    exit_code = 1


class TemplateWorkers:
    """The processes, started when they are first needed. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._idle: list[tuple[WorkerProcess, float]] = []  # and since when, the latest last
        self._num_busy = 0
        self._owner = 0  # the process that started them: after a fork, others are needed

    def call(self, message: Mapping[str, object]) -> str:
        """The rendered text. Raises `ChatTemplateError`, or `TemplateWorkerLost`."""
        process = self._take()
        try:
            for _ in range(2):
                process = process or WorkerProcess(_MODULE)
                reply = _exchange(process, {**message, "cpu_s": CPU_S, "wall_s": WALL_S, "num_bytes": NUM_BYTES})
                if reply is not None:
                    break
                status, process = process.close(), None
                _check_limits(status)
            else:
                raise _lost(status)
        finally:
            self._give_back(process)
        if "error" in reply:
            raise ChatTemplateError(reply["error"])
        return str(reply["text"])

    def _take(self) -> WorkerProcess | None:
        """The process that was used last, since others may then be ended; None: the caller may start one."""
        with self._changed:
            if self._owner != os.getpid():
                self._idle, self._num_busy, self._owner = [], 0, os.getpid()
            if not self._idle and self._num_busy:
                self._changed.wait_for(lambda: self._idle, _START_AFTER_S)
            self._changed.wait_for(lambda: self._idle or self._num_busy < _MAX_PROCESSES)
            self._num_busy += 1
            return self._idle.pop()[0] if self._idle else None

    def _give_back(self, process: WorkerProcess | None) -> None:
        """A process that is free again; None if it was killed."""
        now_s = self._clock()
        unused: list[WorkerProcess] = []
        with self._changed:
            self._num_busy -= 1
            while self._idle and now_s - self._idle[0][1] > _IDLE_S:
                unused.append(self._idle.pop(0)[0])
            if process is not None:
                self._idle.append((process, now_s))
            self._changed.notify()
        for each in unused:
            each.close()


def _check_limits(status: int) -> None:
    """Raise if a process was killed by its own limits."""
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        raise ChatTemplateError(
            f"The model's chat template was stopped: it took more than {CPU_S:g} s of CPU time, or {WALL_S:g} s in all."
        )


def _lost(status: int) -> QuireError:
    """Two processes ended, the second one like this."""
    if status == -signal.SIGKILL:
        return TemplateWorkerLost(
            "The process that renders chat templates was killed twice, as a machine without free memory does. "
            "Try again."
        )
    return ChatTemplateError(f"The model's chat template was stopped: it ended its process twice ({status}).")


def _exchange(process: WorkerProcess, message: Mapping[str, object]) -> dict[str, Any] | None:
    process.socket.settimeout(WALL_S + _GRACE_S)
    try:
        send_frame(process.socket, message)
        reply: Any = receive_frame(process.socket)
    except OSError:
        return None
    return reply  # type: ignore[no-any-return]


_workers = TemplateWorkers()


def render_in_worker(template: str, variables: Mapping[str, object], now: datetime) -> str:
    """Render. Raises `ChatTemplateError`, or `TemplateWorkerLost`."""
    return _workers.call({"template": template, "variables": variables, "now": now.isoformat()})


def check_template(template: str) -> None:
    """Raise `ChatTemplateError` if the template does not compile."""
    _workers.call({"template": template})


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
