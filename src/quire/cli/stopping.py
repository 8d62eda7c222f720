"""Ends a server that was told to end before it had begun to listen for that."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM breaks the block off as Ctrl-C does, so that what was begun in it is undone; neither is an error.

    A server that runs has its own ways with both, and takes them over when it is there.
    """

    def break_off(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, break_off)
    try:
        yield
    except KeyboardInterrupt:
        from quire.cli.console import err

        err.print("Stopped.")
    finally:
        signal.signal(signal.SIGTERM, before)
