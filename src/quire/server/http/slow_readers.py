"""Slow readers: a bound on the output that clients do not read, in time and in bytes. Does not depend on HTTP.

Output waits when it fills the write buffer of a connection, or when the connection closes before it is sent. From then
on the client must accept a number of bytes in each period; a client that accepts less is cut off. So a client that
reads nothing, or a few bytes per second, is cut off one period after its buffers are full. Above a total of all
connections the one with the most unread bytes is cut off, once its output has waited for a while.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

STALLED = "stalled"  # why a reader is cut off: it accepts too little
CONNECTIONS = "connections"  # all connections together have too much unread


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Bounds on one reader, and on all."""

    period_s: float = 25.0  # with half a minute to fill the buffers: within one minute
    period_bytes: int = 12 << 10  # to accept in each period while output waits: between the marks of the write buffer
    crowding_s: float = 5.0  # output that waits for so long crowds out others': a large response that is read does not
    total_bytes: int = 64 << 20  # of all connections where output waits


class WriteBuffer(Protocol):
    """What a watch needs of a transport."""

    def get_write_buffer_size(self) -> int: ...


class _NoBuffer:
    """Of a connection that is gone."""

    def get_write_buffer_size(self) -> int:
        return 0


_NOTHING = _NoBuffer()


class UnreadOutput:
    """The connections where output waits, and how much there was when it began to."""

    def __init__(self, limits: ReaderLimits) -> None:
        self.limits = limits
        self.readers: dict[ReaderWatch, int] = {}

    def cut_largest(self, until_gone: "ReaderWatch") -> None:
        """Cut off crowding readers, those with the most unread bytes first, until the total is within its bound."""
        while until_gone in self.readers and sum(self.readers.values()) > self.limits.total_bytes:
            crowding = (each for each in self.readers if each.is_crowding)
            max(crowding, key=self.readers.__getitem__).cut(CONNECTIONS)


class ReaderWatch:
    """Watches one connection while output waits there. The application adds no more meanwhile."""

    __slots__ = ("_all", "_buffer", "_call_later", "_cut_off", "_timer", "is_crowding")

    def __init__(
        self,
        everything: UnreadOutput,
        buffer: WriteBuffer,
        call_later: Callable[[float, Callable[[], None]], asyncio.Handle],
        cut_off: Callable[[str, int], None],  # gets the reason and the unread bytes
    ) -> None:
        self._all = everything
        self._buffer = buffer
        self._call_later = call_later
        self._cut_off = cut_off
        self._timer: asyncio.Handle | None = None
        self.is_crowding = False  # its output has waited long enough to be cut off for the others'

    @property
    def num_unread(self) -> int:
        return self._buffer.get_write_buffer_size()

    def start(self) -> None:
        """Output may wait from now on. Nothing changes if it does already."""
        if self.num_unread and self not in self._all.readers:
            self._all.readers[self] = self.num_unread
            self._timer = self._call_later(self._all.limits.crowding_s, self._crowd)

    def stop(self) -> None:
        """The output was accepted, or the connection is gone."""
        self._all.readers.pop(self, None)
        self.is_crowding = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """The connection is gone, and nothing here refers to it: it is freed without a garbage collection."""
        self.stop()
        self._buffer = _NOTHING
        del self._call_later, self._cut_off

    def cut(self, reason: str) -> None:
        num_unread = self.num_unread
        self.stop()
        if num_unread:
            self._cut_off(reason, num_unread)

    def _crowd(self) -> None:
        limits = self._all.limits
        self.is_crowding = True
        self._timer = self._call_later(limits.period_s - limits.crowding_s, self._end_period)
        self._all.cut_largest(until_gone=self)

    def _end_period(self) -> None:
        num_accepted = self._all.readers[self] - self.num_unread
        if num_accepted < self._all.limits.period_bytes:
            self.cut(STALLED)
        else:
            self.stop()
            self.start()
