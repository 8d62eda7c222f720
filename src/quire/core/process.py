"""This process: its cores, its lifetime, its garbage collection. A child exits with its parent, and there are no long
collections while serving.

A full collection of a large heap takes tens of milliseconds, in which no request gets a token or a response. So objects
that live until the process ends are frozen (`gc.freeze`), and collections are rarer.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # sent to a terminal's process group; the parent ends its child

_PR_SET_PDEATHSIG = 1
# Loaded once: a forked child, which may call it, must load no library.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_parent(parent: int) -> bool:
    """Kill this process when its parent dies (Linux only). False: the parent with this id is gone already."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def signals_held() -> Iterator[None]:
    """A child started inside has the parent's signals blocked until it ignores them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """In a child that was started with `signals_held`."""
    for number in PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)


# Allocations per collection of generation 0, and collections of each generation per one of the next. Python's 700 suits
# small programs: a server under load allocates that many objects in a few milliseconds.
_THRESHOLDS = (20_000, 20, 20)


def freeze_heap() -> None:
    """Collect once and freeze the heap. For quire's own processes, when they are ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def gc_frozen_imports() -> Iterator[None]:
    """No collection during imports, which saves a fifth of their time; then a frozen heap. For quire's processes."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _PostponedCollection:
    """Counts the threads inside: the first switches collection off, the last switches it on again."""

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


_postponed = _PostponedCollection()


@contextmanager
def gc_postponed() -> Iterator[None]:
    """No collection inside the block, in any thread."""
    _postponed.enter()
    try:
        yield
    finally:
        _postponed.leave()


@contextmanager
def gc_undisturbed() -> Iterator[None]:
    """A frozen heap inside the block only: for measurements in a process that is not quire's own."""
    thresholds = gc.get_threshold()
    freeze_heap()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
