"""The events of a background response: kept by number, bounded in bytes, followed by any number of clients."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.async_engine import SlowReader
from quire.server.openai.background import EventLog, ResponseCancelled


def event(number: int, size: int = 20) -> bytes:
    return b"data: %d" % number + b"." * (size - 8 - len(str(number))) + b"\n\n"


def numbers(chunks: list[bytes]) -> list[int]:
    return [int(text.strip(b".data: ")) for text in b"".join(chunks).split(b"\n\n")[:-1]]


async def follow(log: EventLog, after: int) -> list[bytes]:
    return [chunk async for chunk in log.follow(after)]


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(-1, 40), st.integers(0, 8))
def test_a_follower_gets_each_event_once_and_in_order(sizes: list[int], after: int, joins: int) -> None:
    """Whenever it joins, and whichever event it starts after."""

    async def run() -> list[bytes]:
        log, total, follower = EventLog(), 0, None
        for place, size in enumerate([*sizes, 0]):
            if place == min(joins, len(sizes)):
                follower = asyncio.ensure_future(follow(log, after))
            log.add(b"".join(event(total + i) for i in range(size)))
            total += size
            await asyncio.sleep(0)
        log.close()
        assert follower is not None
        return await follower

    assert numbers(asyncio.run(run())) == list(range(after + 1, sum(sizes)))


def test_a_follower_that_does_not_read_holds_few_events() -> None:
    async def run() -> list[bytes]:
        log = EventLog()
        log.add(b"".join(event(number, size=20 << 10) for number in range(100)))
        log.close()
        return await follow(log, 9)

    chunks = asyncio.run(run())
    assert numbers(chunks) == list(range(10, 100)) and max(map(len, chunks)) == 80 << 10


def test_what_is_dropped_cannot_be_followed() -> None:
    async def run() -> None:
        log = EventLog(max_bytes=100)
        for number in range(20):
            log.add(event(number, size=20))
        log.close()
        assert numbers(await follow(log, 14)) == [15, 16, 17, 18, 19]
        with pytest.raises(SlowReader, match="before number 15"):
            await follow(log, 13)

    asyncio.run(run())


def test_a_follower_that_is_overtaken_ends_and_holds_up_nothing() -> None:
    async def run() -> None:
        log = EventLog(max_bytes=100)
        log.add(event(0))
        slow = log.follow(-1)
        assert numbers([await anext(slow)]) == [0]
        for number in range(1, 20):
            log.add(event(number))
        with pytest.raises(SlowReader):
            await anext(slow)
        assert b'"code":"slow_reader"' in log.failed(SlowReader("late"))

    asyncio.run(run())


def test_the_end_of_a_cancelled_response_comes_after_its_events() -> None:
    async def run() -> None:
        log = EventLog()
        log.add(event(0))
        log.close(ResponseCancelled("cancelled"))
        log.close()
        follower = log.follow(-1)
        assert numbers([await anext(follower)]) == [0]
        with pytest.raises(ResponseCancelled):
            await anext(follower)

    asyncio.run(run())
