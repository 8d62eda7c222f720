"""The state of the engine for many watchers: the engine is asked rarely, and each gets what it has not seen."""

import asyncio
import json
from typing import Any

import pytest

from quire.core.errors import Draining
from quire.server.async_engine import EngineLost
from quire.server.engine_state import EngineState, StateEvent, follow
from tests.server.server_process import PATIENCE_S


class View:
    """An engine that makes one step between two questions."""

    def __init__(self) -> None:
        self.num_asked, self.step, self.now_s = 0, 10, 0.0
        self.first = 0  # step that is recorded
        self.queue = [{"tenant": "a", "num_requests": 1}, {"tenant": "b", "num_requests": 2}]
        self.engine: int | None = None
        self.failure: Exception | None = None
        self.stalled: asyncio.Event | None = None
        self.num_waiting = 0  # questions that are not answered

    async def query(self, what: str, since: int) -> bytes:
        assert what == "view"
        await asyncio.sleep(0)
        self.num_waiting += 1
        if self.stalled is not None:
            await self.stalled.wait()
        self.num_waiting -= 1
        if self.failure is not None:
            raise self.failure
        self.num_asked += 1
        self.step += 1
        steps = [{"step": number} for number in range(max(since + 1, self.first), self.step + 1)]
        named = {} if self.engine is None else {"engine": self.engine}
        return json.dumps({**named, "step": self.step, "queue": self.queue, "steps": steps}).encode()

    async def ask(self, state: EngineState, since: int = -1, own: str | None = None) -> dict[str, Any]:
        return json.loads(await state.describe(since, own))  # type: ignore[no-any-return]


def test_a_flood_of_requests_asks_the_engine_a_few_times_a_second() -> None:
    async def flood() -> int:
        view = View()
        state = EngineState(view.query, lambda: view.now_s)
        for _ in range(100):
            await asyncio.gather(*[view.ask(state) for _ in range(50)])
            view.now_s += 0.01
        return view.num_asked

    assert 20 <= asyncio.run(flood()) <= 26


def test_questions_that_failed_are_no_debt() -> None:
    async def watch() -> None:
        view = View()
        state = EngineState(view.query, lambda: view.now_s)
        view.failure = EngineLost("it loads")
        for _ in range(300):  # while an engine loads
            with pytest.raises(EngineLost):
                await view.ask(state)
        view.failure = None
        for number in range(3):
            view.now_s += 0.1
            assert (await view.ask(state))["step"] == 11 + number

    asyncio.run(watch())


def test_a_reply_is_whole_though_the_next_question_fails() -> None:
    async def watch() -> None:
        view = View()
        state = EngineState(view.query, lambda: view.now_s)
        first = asyncio.ensure_future(view.ask(state))
        await asyncio.sleep(0)
        assert state._reply is not None
        state._reply.add_done_callback(lambda _: setattr(state, "_fields", {}))  # the next question fails at once
        assert (await first)["step"] == 11

    asyncio.run(watch())


def test_a_watcher_gets_each_step_once_and_the_names_of_its_own_requests() -> None:
    async def watch() -> None:
        view = View()
        state = EngineState(view.query, lambda: view.now_s)
        first = await view.ask(state, own="b")
        assert first["step"] == 11 and [each["step"] for each in first["steps"]] == list(range(12))
        assert [entry["tenant"] for entry in first["queue"]] == ["others", "b"]
        later = await view.ask(state, since=11)
        assert [each["step"] for each in later["steps"]] == [12] and later["queue"][0]["tenant"] == "a"
        view.step = 2  # another engine, which has made fewer steps
        assert (await view.ask(state, since=12))["steps"] == []
        assert [each["step"] for each in (await view.ask(state))["steps"]] == list(range(6))
        view.now_s += 60
        assert [each["step"] for each in (await view.ask(state))["steps"]] == list(range(7))

    asyncio.run(watch())


class Streams:
    """Streams over a view, on a clock that moves a period at a time."""

    def __init__(self, number: int, since: int = -1) -> None:
        self.view = View()
        self.state = EngineState(self.view.query, lambda: self.view.now_s, lambda: 30.0)
        self.streams = [follow(lambda: self.state, since, None) for _ in range(number)]

    async def next(self) -> list[StateEvent]:
        """The next event of each stream, a period later."""
        waiting = [asyncio.ensure_future(anext(each)) for each in self.streams]
        await asyncio.sleep(0)  # they wait
        self.view.now_s += 1
        self.state.wake()
        return await asyncio.gather(*waiting)


def test_a_stream_has_the_whole_state_first_and_then_what_changes() -> None:
    async def watch() -> None:
        streams = Streams(1, since=8)
        [first] = await streams.next()
        whole = json.loads(first.body)
        assert first.step == 11 and whole["since"] == 8 and whole["queue"]
        assert [each["step"] for each in whole["steps"]] == [9, 10, 11]
        [second] = await streams.next()
        assert json.loads(second.body) == {"since": 11, "step": 12, "steps": [{"step": 12}]}
        streams.view.queue = []
        [third] = await streams.next()
        assert json.loads(third.body) == {"since": 12, "step": 13, "queue": [], "steps": [{"step": 13}]}

    asyncio.run(watch())


def test_streams_share_each_reply_and_nothing_asks_when_all_are_closed() -> None:
    async def watch() -> None:
        streams = Streams(20)
        for number in range(1, 10):
            events = await streams.next()
            assert streams.view.num_asked == number, "one question, however many streams"
            assert number == 1 or all(event is events[0] for event in events), "encoded once"
        for each in streams.streams:
            await each.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left that could ask"

    asyncio.run(watch())


def test_a_stream_between_two_questions_sends_the_last_reply() -> None:
    async def watch() -> None:
        streams = Streams(2)
        both = streams.streams
        await streams.next()
        for _ in range(5):
            streams.view.now_s += 30
            for streams.streams in ([both[0]], [both[1]]):  # a second after the other
                await streams.next()
        assert streams.view.num_asked == 6

    asyncio.run(watch())


def test_a_slow_reader_gets_one_event_of_all_that_it_missed() -> None:
    async def watch() -> None:
        streams = Streams(2)
        slow = streams.streams.pop()
        await anext(slow)
        for _ in range(100):
            await streams.next()
        streams.streams = [slow]
        last = json.loads((await streams.next())[0].body)
        assert last["step"] == streams.view.step and len(last["steps"]) == streams.view.step - 11

    asyncio.run(watch())


def test_a_stream_begins_again_with_another_engine() -> None:
    async def watch() -> None:
        streams = Streams(1)
        for _ in range(5):
            [event] = await streams.next()
        assert event.step == 15
        streams.view.step = 2  # it has made fewer steps
        [event] = await streams.next()
        again = json.loads(event.body)
        assert again["since"] == -1 and [each["step"] for each in again["steps"]] == list(range(5)), "asked again"
        [event] = await streams.next()
        assert json.loads(event.body)["since"] == 4

    asyncio.run(watch())


def test_a_stream_begins_again_with_an_engine_that_has_made_more_steps() -> None:
    async def watch() -> None:
        streams = Streams(1)
        streams.view.engine = 1
        for _ in range(3):
            [event] = await streams.next()
        assert event.step == 13
        streams.view.engine, streams.view.step, streams.view.first = 2, 5000, 4999
        [event] = await streams.next()
        again = json.loads(event.body)
        assert again["since"] == -1 and [each["step"] for each in again["steps"]] == [4999, 5000, 5001, 5002]

    asyncio.run(watch())


def test_a_stream_that_sends_when_it_is_woken_does_not_wait() -> None:
    async def watch() -> None:
        view = View()
        state = EngineState(view.query, lambda: view.now_s, lambda: 3600.0)
        stream = follow(lambda: state, -1, None)
        await anext(stream)
        state.wake()  # its event is being written
        view.now_s += 1
        await asyncio.wait_for(anext(stream), PATIENCE_S)
        await stream.aclose()

    asyncio.run(watch())


def test_a_step_from_before_a_lost_engine_is_never_sent_with_those_of_the_next() -> None:
    async def watch() -> None:
        streams = Streams(1)
        await streams.next()
        streams.view.failure = EngineLost("It is gone.")
        with pytest.raises(EngineLost):
            await streams.next()
        streams.view.failure, streams.view.first = None, 500  # what it recorded before is not there
        streams.view.step = 600
        later = await anext(follow(lambda: streams.state, -1, None))
        assert [each["step"] for each in json.loads(later.body)["steps"]] == list(range(500, 602))

    asyncio.run(watch())


def test_a_stream_goes_on_with_the_engine_that_is_found() -> None:
    async def watch() -> None:
        here, there = Streams(0), Streams(0)
        now = here
        stream = follow(lambda: now.state, 5, None)
        assert json.loads((await anext(stream)).body)["since"] == 5
        there.view.step, now = 70, there
        next_event = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        here.state.wake()
        event = json.loads((await next_event).body)
        assert event["since"] == -1 and event["step"] == 71 and "queue" in event, "it is whole again"

    asyncio.run(watch())


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "waiting"])
def test_closing_ends_every_stream_at_once(asked: bool) -> None:
    """Also one that waits for an engine that does not reply."""

    async def watch() -> None:
        streams = Streams(3)
        await streams.next()
        streams.view.stalled = asyncio.Event()
        waiting = [asyncio.ensure_future(anext(each)) for each in streams.streams]
        await asyncio.sleep(0)
        if asked:
            streams.view.now_s += 1
            streams.state.wake()
            while streams.view.num_waiting == 0:
                await asyncio.sleep(0)
        streams.state.close()
        for each in waiting:
            with pytest.raises(Draining):
                await asyncio.wait_for(each, PATIENCE_S / 2)
        with pytest.raises(Draining):
            await anext(follow(lambda: streams.state, -1, None))
        streams.view.stalled.set()

    asyncio.run(watch())


def test_a_flood_of_streams_asks_the_engine_a_few_times_a_second() -> None:
    async def flood() -> int:
        view = View()
        state = EngineState(view.query, lambda: view.now_s, lambda: 0.0)  # nothing is fresh
        for _ in range(100):
            for _ in range(20):
                stream = follow(lambda: state, -1, None)
                assert json.loads((await anext(stream)).body)["queue"]
                await stream.aclose()
            view.now_s += 0.01
        return view.num_asked

    assert 20 <= asyncio.run(flood()) <= 26
