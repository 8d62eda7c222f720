"""The state of the engine for the page /engine, for any number of watchers.

The engine describes itself between two steps, in some milliseconds. It is asked at most some times per second, however
many requests come: those in between share a reply. Recent steps are kept here, so that each is sent by the engine once.
Does not depend on HTTP.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

_QUESTIONS_PER_S, _QUESTIONS_AT_ONCE = 20.0, 5.0
_FORGOTTEN_S = 5.0  # without a question: then the engine forgets its steps
_MAX_STEPS = 512
_OTHERS = "others"  # instead of the names of other clients


class _Step(msgspec.Struct):
    """The number of a step."""

    step: int


class EngineState:
    """Asks the engine for its state, by `query(what, number)`, and keeps the last reply."""

    def __init__(self, query: Callable[[str, int], Awaitable[bytes]], clock: Callable[[], float]) -> None:
        self._query = query
        self._clock = clock
        self._fields: dict[str, msgspec.Raw] = {}
        self._steps: deque[tuple[int, msgspec.Raw]] = deque(maxlen=_MAX_STEPS)
        self._asked_s = clock()
        self._num_allowed = _QUESTIONS_AT_ONCE
        self._asking: asyncio.Future[None] | None = None

    async def describe(self, since: int, own: str | None) -> bytes:
        """The state and the steps after `since`, as JSON. `own` is the one client whose name is shown; None: all."""
        if self._asking is None and self._may_ask():
            self._asking = asyncio.ensure_future(self._ask())
        if self._asking is not None:
            await asyncio.shield(self._asking)
        fields: dict[str, object] = dict(self._fields)
        if own is not None:
            queue = msgspec.json.decode(self._fields["queue"])
            fields["queue"] = [{**entry, "tenant": own if entry["tenant"] == own else _OTHERS} for entry in queue]
        return msgspec.json.encode({**fields, "steps": [step for number, step in self._steps if number > since]})

    def _may_ask(self) -> bool:
        earned = _QUESTIONS_PER_S * (self._clock() - self._asked_s)
        return not self._fields or self._num_allowed + earned >= 1

    async def _ask(self) -> None:
        try:
            now_s = self._clock()
            since_s, self._asked_s = now_s - self._asked_s, now_s
            self._num_allowed = min(self._num_allowed + _QUESTIONS_PER_S * since_s, _QUESTIONS_AT_ONCE) - 1
            if since_s > _FORGOTTEN_S:
                self._steps.clear()
            last = self._steps[-1][0] if self._steps else -1
            fields = msgspec.json.decode(await self._query("view", last), type=dict[str, msgspec.Raw])
            if msgspec.json.decode(fields["step"]) < last:  # another engine
                self._steps.clear()
            steps = fields.pop("steps")
            numbers = msgspec.json.decode(steps, type=list[_Step])
            texts = msgspec.json.decode(steps, type=list[msgspec.Raw])
            self._steps.extend((number.step, text) for number, text in zip(numbers, texts, strict=True))
            self._fields = fields
        finally:
            self._asking = None
