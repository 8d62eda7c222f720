"""A process that does not outlive the one that made it, however that one ends. Knows nothing of either.

Garbage collection in processes that run for long: what is here for good is not looked through again and again.

Python looks through all that lives whenever enough new has come: tens of milliseconds in which nobody gets a token or a
refusal.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # what people send to a terminal's programs; it ends its child itself

_PR_SET_PDEATHSIG = 1
# Found once: a forked child, which may come here, must look for no library.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_parent(parent: int) -> bool:
    """From now on, on Linux. False: the parent with this number is gone already."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


# New objects before the young are looked through, and how often that before the older are. Python's 700 is for small
# programs: a server under load makes so many in a few milliseconds.
_THRESHOLDS = (20_000, 20, 20)


def freeze_heap() -> None:
    """Whatever lives now stays until the process ends. For a process that is ours, once it is ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def gc_frozen_imports() -> Iterator[None]:
    """What is imported meanwhile stays, and is not looked through: a fifth of the imports' time. For a process that is
    ours."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Postponed:
    """Who is in such a moment, of all threads: the first switches collection off, the last on again."""

    __slots__ = ("_lock", "_num_inside", "_was_enabled")

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_inside = 0
        self._was_enabled = False

    def enter(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_inside += 1

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and self._was_enabled:
                gc.enable()


_postponed = _Postponed()


@contextmanager
def gc_postponed() -> Iterator[None]:
    """Garbage stays where it is for a moment in which it may not be freed."""
    _postponed.enter()
    try:
        yield
    finally:
        _postponed.leave()


@contextmanager
def gc_undisturbed() -> Iterator[None]:
    """The same for a while: in somebody else's process, while something is measured."""
    thresholds = gc.get_threshold()
    freeze_heap()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
