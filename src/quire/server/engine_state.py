"""The state of the engine for the page /engine and `quire top`: one description for any number of watchers.

The engine describes itself between two steps, in some milliseconds. It is asked at most some times per second, however
many requests and streams there are: those in between share a reply. Streams ask twice a second in all, and nothing asks
while none is open. Recent steps are kept here, so that each is sent by the engine once. Does not depend on HTTP.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from quire.core.errors import Draining

_QUESTIONS_PER_S, _QUESTIONS_AT_ONCE = 20.0, 5.0
_FORGOTTEN_S = 5.0  # without a question: then the engine forgets its steps
_MAX_STEPS = 512
_OTHERS = "others"  # instead of the names of other clients
_FRESH = 0.9  # of a period: a stream sends a reply to another stream that is not older
STREAM_PERIOD_S = 0.5  # between two events of a stream


class _Step(msgspec.Struct):
    """The number of a step."""

    step: int


_Fields = dict[str, msgspec.Raw]


class _Sent(NamedTuple):
    """What a stream has sent: the state of a version, and the steps up to one."""

    version: int
    fields: _Fields
    step: int


class StateEvent(NamedTuple):
    """One event of a stream. The stream can be resumed after `step`."""

    step: int
    body: bytes  # JSON


class EngineState:
    """Asks the engine for its state, by `query(what, number)`, and keeps the last reply."""

    def __init__(
        self,
        query: Callable[[str, int], Awaitable[bytes]],
        clock: Callable[[], float],
        period_s: Callable[[], float] = lambda: STREAM_PERIOD_S,
    ) -> None:
        self._query = query
        self._clock = clock
        self._period_s = period_s
        self._fields: _Fields = {}
        self._steps: deque[tuple[int, msgspec.Raw]] = deque(maxlen=_MAX_STEPS)
        self._version = 0  # of the fields: the number of replies
        self._asked_s = clock()
        self._num_allowed = _QUESTIONS_AT_ONCE
        self._reply: asyncio.Future[_Fields] | None = None  # that is awaited
        self._asking: asyncio.Task[None] | None = None
        self._events: dict[tuple[int, int, str | None], tuple[_Sent, StateEvent]] = {}  # of this version
        self._wake = asyncio.Event()  # of streams that wait
        self._num_wakes = 0
        self._closed = False

    async def describe(self, since: int, own: str | None) -> bytes:
        """The state and the steps after `since`, as JSON. `own` is the one client whose name is shown; None: all."""
        fields = await self._refresh()
        described: dict[str, object] = {**fields, "queue": _queue(fields, own)}
        return msgspec.json.encode({**described, "steps": self._steps_after(since)})

    def wake(self) -> None:
        """Let the streams send the next event now."""
        self._num_wakes += 1
        self._wake.set()
        self._wake = asyncio.Event()

    def close(self) -> None:
        """End the streams with an error, also those that wait for the engine. No further one begins."""
        self._closed = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(Draining())
        self.wake()

    @property
    def num_wakes(self) -> int:
        return self._num_wakes

    async def pause(self, num_wakes: int) -> None:
        """Wait for the time of the next event, unless there were more wakes than this since."""
        if self._num_wakes > num_wakes:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._period_s()):
                await self._wake.wait()

    async def next_event(self, sent: _Sent, own: str | None) -> tuple[_Sent, StateEvent] | None:
        """What is new to a stream: the fields that have changed, and the steps. None: too many questions were asked."""
        if self._closed:
            raise Draining
        is_old, fields = self._clock() - self._asked_s >= _FRESH * self._period_s(), self._fields
        if is_old or not fields or self._version == sent.version:
            fields = await self._refresh()
        return None if self._version == sent.version else self._difference(sent, fields, own)

    def _difference(self, sent: _Sent, fields: _Fields, own: str | None) -> tuple[_Sent, StateEvent]:
        """What a stream sends next. Streams that have sent the same share it."""
        key = (sent.version, sent.step, own)
        if (known := self._events.get(key)) is not None:
            return known
        changed: dict[str, object] = {name: raw for name, raw in fields.items() if raw != sent.fields.get(name)}
        if "queue" in changed:
            changed["queue"] = _queue(fields, own)
        is_same = sent.fields.get("engine") in (None, fields.get("engine"))  # or not known
        since = sent.step if is_same and sent.step <= msgspec.json.decode(fields["step"]) else -1
        steps = self._steps_after(since)
        newest = max(self._steps[-1][0] if steps else -1, since)
        body = msgspec.json.encode({"since": since, **changed, "steps": steps})
        event = (_Sent(self._version, fields, newest), StateEvent(newest, body))
        if sent.version >= 0:  # first events are as many as there are requests
            self._events[key] = event
        return event

    def _steps_after(self, since: int) -> list[msgspec.Raw]:
        return [step for number, step in self._steps if number > since]

    async def _refresh(self) -> _Fields:
        """Ask the engine, or await the reply to an earlier question. Too many questions: the state stays as it is."""
        if self._reply is None and self._may_ask():
            self._reply = asyncio.get_running_loop().create_future()
            self._asking = asyncio.create_task(self._ask(self._reply))
        return self._fields if self._reply is None else await asyncio.shield(self._reply)

    def _may_ask(self) -> bool:
        earned = _QUESTIONS_PER_S * (self._clock() - self._asked_s)
        return not self._fields or self._num_allowed + earned >= 1

    async def _ask(self, reply: "asyncio.Future[_Fields]") -> None:
        """Ask the engine, and tell those that wait. It may be lost meanwhile."""
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())  # all may have left
        try:
            await self._read()
        except Exception as error:
            self._fields = {}
            self._steps.clear()  # the next engine numbers its steps anew
            if not reply.done():
                reply.set_exception(error)
        else:
            if not reply.done():
                reply.set_result(self._fields)
        finally:
            reply.cancel()  # only if this task was cancelled
            self._reply = None

    async def _read(self) -> None:
        now_s = self._clock()
        since_s, self._asked_s = now_s - self._asked_s, now_s
        earned = min(self._num_allowed + _QUESTIONS_PER_S * since_s, _QUESTIONS_AT_ONCE)
        self._num_allowed = max(earned - 1, 0.0)  # without a state more are asked than are earned
        if since_s > _FORGOTTEN_S:
            self._steps.clear()
        last = self._steps[-1][0] if self._steps else -1
        fields = msgspec.json.decode(await self._query("view", last), type=_Fields)
        is_other = fields.get("engine") != self._fields.get("engine") and last >= 0
        if is_other or msgspec.json.decode(fields["step"]) < last:  # or a replay that went back
            self._steps.clear()
            fields = msgspec.json.decode(await self._query("view", -1), type=_Fields)
        steps = fields.pop("steps")
        numbers = msgspec.json.decode(steps, type=list[_Step])
        texts = msgspec.json.decode(steps, type=list[msgspec.Raw])
        self._steps.extend((number.step, text) for number, text in zip(numbers, texts, strict=True))
        self._fields = fields
        self._version += 1
        self._events.clear()


def _queue(fields: _Fields, own: str | None) -> object:
    if own is None:
        return fields["queue"]
    queue = msgspec.json.decode(fields["queue"])
    return [{**entry, "tenant": own if entry["tenant"] == own else _OTHERS} for entry in queue]


async def follow(find: Callable[[], EngineState], since: int, own: str | None) -> AsyncGenerator[StateEvent, None]:
    """The events of a stream: the whole state with the steps after `since`, then what changes. Each is made when it can
    be sent, so a slow reader gets fewer. `find` gives what is followed now: of several models the engine changes."""
    state, sent = find(), _Sent(-1, {}, since)
    while True:
        num_wakes = state.num_wakes
        if (new := await state.next_event(sent, own)) is not None:
            sent, event = new
            yield event
        await state.pause(num_wakes)
        before, state = state, find()
        if state is not before:
            sent = _Sent(-1, {}, -1)
