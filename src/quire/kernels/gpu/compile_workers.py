"""Worker processes: calls run in forked children, in parallel, for the files they write.

Compiling holds the GIL, so threads would take turns; processes do not. A worker is a forked copy of this process with
one thread. It makes calls and exits at once: what it inherits, GPU contexts and sockets, it neither uses nor closes.
"""

import gc
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from quire.core.process import die_with_parent

_NUMBER_BYTES = 4
_MAX_CALLS = 1000  # call numbers are written to a pipe at once, which holds at least 4 KiB; results to another
_MAX_SILENCE_S = 60.0  # a kernel compiles in a second or two: a worker that is silent for so long hangs
_MAX_FORKING_S = 0.5  # for all workers: one takes 2 ms, or 35 ms if this process has 4 GiB of host memory


class CompileResults(NamedTuple):
    """Outcome of the calls."""

    num_workers: int
    num_true: int


class CompileWorkers:
    """Running worker processes; ended by `collect`."""

    __slots__ = ("_num_calls", "_pids", "_results_fd")

    def __init__(self, pids: list[int], results_fd: int, num_calls: int) -> None:
        self._pids = pids
        self._results_fd = results_fd
        self._num_calls = num_calls

    def collect(self) -> CompileResults:
        """Wait for all results. The timeout on silent workers runs only here."""
        num_workers = len(self._pids)
        try:
            return CompileResults(num_workers, _read_results(self._results_fd, self._num_calls) if num_workers else 0)
        finally:
            self.end()

    def end(self) -> None:
        while self._pids:
            _kill(self._pids[-1])
            self._pids.pop()


@contextmanager
def call_in_workers(calls: Sequence[Callable[[], bool]], max_workers: int) -> Iterator[CompileWorkers]:
    """Each call once, in order, by the next free worker. On exit no worker is left, collected or not.

    A call that raises counts as not made, and so does one that is killed after a minute. Where less than half of the
    workers can be forked in time, none is used: the caller compiles in threads.
    """
    num_calls = min(len(calls), _MAX_CALLS)
    parent, begun_s = os.getpid(), time.monotonic()
    pids: list[int] = []
    with _Pipe() as numbers, _Pipe() as results:
        workers = CompileWorkers(pids, results.reading, num_calls)
        os.write(numbers.writing, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(num_calls)))
        numbers.close_writing()  # end of file after the last number
        try:
            with suppress(OSError):  # no more processes allowed
                while len(pids) < max_workers and time.monotonic() < begun_s + _MAX_FORKING_S:
                    pids.append(_fork_worker(lambda: _work(calls, numbers.reading, results.writing, parent), parent))
            results.close_writing()  # end of file once the last worker has ended
            if 2 * len(pids) < max_workers:
                workers.end()
            yield workers
        finally:
            workers.end()


class _Pipe:
    """Between this process and its workers. Both ends are closed on exit."""

    __slots__ = ("_is_writable", "reading", "writing")

    def __enter__(self) -> "_Pipe":
        self.reading, self.writing = os.pipe()
        self._is_writable = True
        return self

    def close_writing(self) -> None:
        if self._is_writable:
            self._is_writable = False
            os.close(self.writing)

    def __exit__(self, *_: object) -> None:
        self.close_writing()
        os.close(self.reading)


def _fork_worker(work: Callable[[], None], parent: int) -> int:
    """The child never returns into the caller's code, even if a signal arrives between two lines."""
    with warnings.catch_warnings():
        # Python warns that locks of other threads stay locked in the child: it takes none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
            if pid == 0 and die_with_parent(parent):
                work()
            return pid
        finally:
            if os.getpid() != parent:
                os._exit(0)


def _work(calls: Sequence[Callable[[], bool]], numbers: int, results_fd: int, parent: int) -> None:
    """Runs in the worker."""
    gc.disable()  # garbage of the parent must not be freed here: it may hold GPU memory
    while os.getppid() == parent and (number := os.read(numbers, _NUMBER_BYTES)):
        result = False
        with suppress(Exception):
            result = calls[int.from_bytes(number)]()
        os.write(results_fd, bytes([result]))


def _read_results(results_fd: int, num_calls: int) -> int:
    """How many calls returned True."""
    results = b""
    poll = select.poll()
    poll.register(results_fd, select.POLLIN)
    while len(results) < num_calls and poll.poll(1e3 * _MAX_SILENCE_S):
        received = os.read(results_fd, num_calls)
        if not received:
            break
        results += received
    return sum(results)


def _kill(pid: int) -> None:
    """Kill a worker and reap it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # with SIGCHLD ignored there is no child to wait for
        os.waitpid(pid, 0)
