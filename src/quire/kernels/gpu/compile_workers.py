"""Calls made in children of this process, side by side, for what they leave on disk. Knows nothing of what is called.

Threads take turns wherever Python is run; children do not. A child is a copy of this process with one thread, which
makes calls and ends at once: what it inherits, be it the card or a socket, it neither uses nor closes.
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
_MOST_CALLS = 1000  # their numbers wait in a pipe, which holds 4 KiB at the least, and their answers in another
_LONGEST_SILENCE_S = 60.0  # a kernel takes a second or two: whoever is at it for so long is stuck
_LONGEST_FORKING_S = 0.5  # for all children: 2 ms for one, but 35 if this process has 4 GiB of its own on the host


class CompileResults(NamedTuple):
    """What came of the calls."""

    num_children: int
    num_true: int


class CompileWorkers:
    """They are at their calls, and gone when they were heard."""

    __slots__ = ("_hearing", "_num_calls", "_pids")

    def __init__(self, pids: list[int], hearing: int, num_calls: int) -> None:
        self._pids = pids
        self._hearing = hearing
        self._num_calls = num_calls

    def hear(self) -> CompileResults:
        """Wait for what they have not answered yet. Only while somebody hears them is silence too long."""
        num_children = len(self._pids)
        try:
            return CompileResults(num_children, _hear(self._hearing, self._num_calls) if num_children else 0)
        finally:
            self.end()

    def end(self) -> None:
        while self._pids:
            _end(self._pids[-1])
            self._pids.pop()


@contextmanager
def calling_in_children(calls: Sequence[Callable[[], bool]], most_children: int) -> Iterator[CompileWorkers]:
    """Each call once, the first ones first, by whichever child is free. Behind it no child is left, heard or not.

    A call that raises is as one that was not made. So is one that takes a minute, which is broken off. Where not even
    half of the children can be made in little time, none does anything: whoever asks has other ways.
    """
    num_calls = min(len(calls), _MOST_CALLS)
    parent, begun_s = os.getpid(), time.monotonic()
    pids: list[int] = []
    with _Pipe() as numbers, _Pipe() as answers:
        children = CompileWorkers(pids, answers.reading, num_calls)
        os.write(numbers.writing, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(num_calls)))
        numbers.close_writing()  # behind the last number is the end
        try:
            with suppress(OSError):  # no room for another
                while len(pids) < most_children and time.monotonic() < begun_s + _LONGEST_FORKING_S:
                    pids.append(_new_child(lambda: _work(calls, numbers.reading, answers.writing, parent), parent))
            answers.close_writing()  # when the last child has ended, there is nothing more to hear
            if 2 * len(pids) < most_children:
                children.end()
            yield children
        finally:
            children.end()


class _Pipe:
    """Between this process and its children. Both ends are closed behind it."""

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


def _new_child(work: Callable[[], None], parent: int) -> int:
    """Whatever happens in it, and be it a signal between two lines, the child comes back to nobody."""
    with warnings.catch_warnings():
        # Python warns of threads whose locks nobody gives back in the child: it takes none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            child = os.fork()
            if child == 0 and die_with_parent(parent):
                work()
            return child
        finally:
            if os.getpid() != parent:
                os._exit(0)


def _work(calls: Sequence[Callable[[], bool]], numbers: int, telling: int, parent: int) -> None:
    """In the child."""
    gc.disable()  # what the parent has let go of is not ours to free: it may lie on the card
    while os.getppid() == parent and (number := os.read(numbers, _NUMBER_BYTES)):
        answer = False
        with suppress(Exception):
            answer = calls[int.from_bytes(number)]()
        os.write(telling, bytes([answer]))


def _hear(hearing: int, num_calls: int) -> int:
    """How many were answered with True."""
    answers = b""
    poll = select.poll()
    poll.register(hearing, select.POLLIN)
    while len(answers) < num_calls and poll.poll(1e3 * _LONGEST_SILENCE_S):
        told = os.read(hearing, num_calls)
        if not told:
            break
        answers += told
    return sum(answers)


def _end(child: int) -> None:
    """It has said all that it will."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # whoever leaves all children to the system has none to wait for
        os.waitpid(child, 0)
