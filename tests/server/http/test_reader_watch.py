"""The rule about slow readers, on paper: buffers that drain at a rate, and timers in simulated time."""

import asyncio
import heapq
import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from quire.server.http.slow_readers import ReaderLimits, ReaderWatch, UnreadOutput

LIMITS = ReaderLimits()
KIB = 1 << 10


class Clock:
    """Runs timers in order of their time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()

    def call_later(self, delay_s: float, then: Callable[[], None]) -> asyncio.Handle:
        handle = asyncio.Handle(then, (), self._loop)
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._numbers), handle))
        return handle

    def run_until(self, end_s: float) -> None:
        while self._timers and self._timers[0][0] <= end_s:
            self.now_s, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                handle._run()
        self.now_s = end_s

    def close(self) -> None:
        self._loop.close()


class Reader:
    """A client that accepts output at a rate, from a buffer that was full at `since_s`."""

    def __init__(self, clock: Clock, everything: UnreadOutput, num_bytes: int, rate: float, since_s: float = 0.0):
        self._clock, self._everything = clock, everything
        self._num_bytes, self._rate, self._since_s = num_bytes, rate, since_s
        self.cut: tuple[str, float] | None = None
        self.watch = ReaderWatch(everything, self, clock.call_later, self._cut_off)
        clock.call_later(since_s, self.watch.start)

    def _crowding(self) -> list[ReaderWatch]:
        return [each for each in self._everything.readers if each.is_crowding]

    def get_write_buffer_size(self) -> int:
        return max(0, self._num_bytes - int(self._rate * (self._clock.now_s - self._since_s)))

    def _cut_off(self, reason: str, num_unread: int) -> None:
        assert num_unread == self.get_write_buffer_size() > 0
        if reason == "connections":  # it had to be
            assert sum(self._everything.readers.values()) + num_unread > self._everything.limits.total_bytes
            assert num_unread == max([num_unread, *(self._everything.readers[each] for each in self._crowding())])
        self.cut = (reason, self._clock.now_s)


@given(st.floats(0, 2000), st.integers(1, 200 * KIB))
def test_a_reader_is_cut_exactly_if_it_is_below_the_rate(rate: float, num_bytes: int) -> None:
    """In the first period in which it accepts too little; one that accepts enough, or all there is, never."""
    clock, everything = Clock(), UnreadOutput(LIMITS)
    reader = Reader(clock, everything, num_bytes, rate)
    expected_s, left = 0.0, num_bytes
    while left > 0:
        expected_s += LIMITS.period_s
        after = max(0, num_bytes - int(rate * expected_s))
        if left - after < LIMITS.period_bytes:
            break
        left = after
    clock.run_until(expected_s + 1.0)
    is_cut = left > 0 and num_bytes - int(rate * expected_s) > 0
    assert reader.cut == (("stalled", expected_s) if is_cut else None)
    assert not everything.readers
    clock.close()


def test_a_reader_that_stops_being_watched_is_forgotten() -> None:
    clock, everything = Clock(), UnreadOutput(LIMITS)
    reader = Reader(clock, everything, 16 * KIB, 0.0)
    clock.run_until(LIMITS.crowding_s)
    assert reader.watch.is_crowding
    reader.watch.stop()
    assert not everything.readers and not reader.watch.is_crowding
    clock.run_until(1000.0)
    assert reader.cut is None
    clock.close()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20), st.integers(0, 400))
def test_the_total_is_kept_by_cutting_the_largest(sizes: list[int], total: int) -> None:
    clock, everything = Clock(), UnreadOutput(ReaderLimits(total_bytes=total))
    readers = [Reader(clock, everything, size, 0.0) for size in sizes]
    clock.run_until(LIMITS.crowding_s - 0.1)
    assert not any(reader.cut for reader in readers)  # a response that is read takes moments
    clock.run_until(LIMITS.crowding_s)
    kept = [reader for reader in readers if reader.cut is None]
    assert sum(reader.get_write_buffer_size() for reader in kept) <= total
    assert {reader.cut[0] for reader in readers if reader.cut is not None} <= {"connections"}
    clock.close()


def test_of_those_that_wait_for_long_the_largest_is_cut() -> None:
    clock, everything = Clock(), UnreadOutput(ReaderLimits(total_bytes=90))
    readers = [Reader(clock, everything, size, 0.0, since_s) for size, since_s in ((30, 0.0), (50, 1.0), (20, 7.0))]
    clock.run_until(7.0 + LIMITS.crowding_s)
    assert [reader.cut for reader in readers] == [None, ("connections", 7.0 + LIMITS.crowding_s), None]
    clock.close()


def test_readers_at_10_bytes_per_second_are_gone_within_a_minute() -> None:
    """500 beside 64 rows: the buffers of the last are full after half a minute, since its request has to wait first."""
    clock, everything = Clock(), UnreadOutput(LIMITS)
    readers = [Reader(clock, everything, 24 * KIB, 10.0, since_s=30.0 * number / 499) for number in range(500)]
    clock.run_until(60.0)
    assert {reader.cut[0] for reader in readers if reader.cut is not None} == {"stalled"}
    assert all(reader.cut is not None for reader in readers)
    clock.close()
