"""Processes that tests start. None outlives its test, nor pytest, however either ends."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from quire.core.process import die_with_parent

_PYTEST = os.getpid()


def prepare() -> None:
    """In the child, before its program begins: it dies with pytest, and Ctrl-C ends it even where pytest ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not die_with_parent(_PYTEST):
        os._exit(1)


def start(command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
    """For the tests that end what they start in a `finally`; `started` for the others."""
    return subprocess.Popen(command, preexec_fn=prepare, process_group=0, **options)


@contextlib.contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Killed at the end with all that it started, unless it has ended by then."""
    process = start(command, **options)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and the processes of its group, and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()


def run(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, of a child that dies with pytest."""
    return subprocess.run(command, preexec_fn=prepare, **options)
