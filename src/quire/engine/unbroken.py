"""Ctrl-C waits for the end of a turn: a step that is planned and not taken in would set engine and runner at odds."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def unbroken() -> Iterator[None]:
    """Hold an interrupt back, and pass it on afterwards. Only the main thread is ever interrupted."""
    passed_on = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(passed_on):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, passed_on)
    if held:
        passed_on(*held[0])
