"""Standard streams, signals and the status line of a command. Does not depend on the command."""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from quire.core.process import gc_frozen_imports

INTERRUPTED = 130  # the status that shells expect after Ctrl-C
_PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ELOOP,
                errno.ENAMETOOLONG)  # fmt: skip
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_streams() -> None:
    """Replace closed streams (`>&-`) by the null device: a socket would take their descriptor and be written to.

    No stream fails at a character: model output may contain unprintable characters, and a prompt that is not valid text
    is rejected where it is read, with its position.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            null = open(os.devnull, mode)  # noqa: SIM115  # for the life of the process
            os.set_inheritable(null.fileno(), True)
            setattr(sys, name, null)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush stdout before the command ends. A full disk or a closed pipe ends it with status 1, a path that cannot be
    used with status 2, without a traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno in _PATH_ERRORS and error.filename is not None:
            why = f"{error.strerror}. Check the path and its permissions."
            print(f"quire: Cannot use {os.fsdecode(error.filename)}: {why}", file=sys.stderr)
            raise SystemExit(2) from None
        if error.errno not in _DISK_ERRORS:
            raise
        _discard_output()
        where = "what this command prints" if error.filename is None else error.filename
        print(f"quire: Cannot write {where}: {error.strerror}. Make room, or write elsewhere.", file=sys.stderr)
        raise SystemExit(1) from None


def _discard_output() -> None:
    """Without this the interpreter would write the buffered output once more when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


@contextmanager
def stops_on_sigterm() -> Iterator[None]:
    """SIGTERM interrupts the block as Ctrl-C does, so that its cleanup runs; neither is an error.

    For the start of a server: a running server handles both signals itself.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        from quire.cli.console import err

        err.print("Stopped.")
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def loading_status(interrupted: str = "Interrupted.", status: int = INTERRUPTED) -> Iterator[None]:
    """A spinner on a terminal while large libraries are imported. An interrupt ends the process: what is half imported
    may lose an exception (torch then runs without numpy) or turn it into another."""
    with ExitStack() as stack:
        if sys.stderr.isatty():
            from quire.cli.console import err

            if err.is_terminal:
                stack.enter_context(err.status("starting"))
        stack.enter_context(gc_frozen_imports())
        stack.enter_context(_ended_by_signals(interrupted, status))
        yield


@contextmanager
def _ended_by_signals(said: str, status: int) -> Iterator[None]:
    """SIGINT and SIGTERM, where they would interrupt the block, end the process with this line and status."""

    def end(number: int, frame: FrameType | None) -> None:
        try:
            os.write(2, f"{clear}{said}\n".encode())
        finally:  # stderr may be closed
            os._exit(status)

    clear = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""  # the spinner's line, its hidden cursor

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
