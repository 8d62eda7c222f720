"""Background responses: generated after their request has been answered, and polled or followed as a stream.

The events of one that is streamed are kept, bounded in bytes, while it is generated. Any number of clients follow
them, from the first event or from a later one; none of them holds it up. Does not depend on HTTP or on storage.
"""

import asyncio
from collections import deque

from quire.core.errors import QuireError
from quire.server.async_engine import SlowReader
from quire.server.chat.session import ChatDelta, ChatStream
from quire.server.context import TextThreads
from quire.server.http.errors import error_body
from quire.server.http.request_context import AdmittedPlace
from quire.server.http.sse import Events, client_error, named_event
from quire.server.openai.responses_output import ResponsesResponse

MAX_EVENT_BYTES = 4 << 20  # of one response: some 10,000 tokens
_SENT_BYTES = 1 << 16  # to a follower at once, and one event
_END = b"\n\n"  # of an event; JSON has no line breaks


class ResponseCancelled(QuireError):
    """A response that was cancelled or deleted while a client followed it."""

    status = 409
    code = "response_cancelled"


class EventLog:
    """The events of one response, by their numbers. The oldest are dropped beyond a number of bytes."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._first = 0  # the number of the oldest event that is kept
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._end: QuireError | None = None
        self._is_closed = False

    def add(self, events: bytes) -> None:
        """One or more events; each is kept by its number."""
        for text in events.split(_END)[:-1]:
            self._events.append(text + _END)
            self._num_bytes += len(text) + len(_END)
        while self._num_bytes > self._max_bytes and len(self._events) > 1:
            self._num_bytes -= len(self._events.popleft())
            self._first += 1
        self._wake()

    def close(self, end: QuireError | None = None) -> None:
        """No more events follow. Followers get the error, if there is one."""
        if not self._is_closed:
            self._is_closed, self._end = True, end
            self._wake()

    async def follow(self, starting_after: int) -> Events:
        """The events after this number, those that are there at once and the others as they come."""
        number = starting_after + 1
        while True:
            if number < self._first:
                raise SlowReader(
                    f"The events before number {self._first} are not kept any more. Continue after a later one, or "
                    f"retrieve the response without stream."
                )
            if ready := self._some(number):
                number += len(ready)
                yield b"".join(ready)
            elif self._is_closed:
                if self._end is not None:
                    raise self._end
                return
            else:
                await self._changed.wait()

    def _some(self, number: int) -> list[bytes]:
        """The next events from this number on: a follower that does not read holds few of them."""
        events: list[bytes] = []
        num_bytes, place = 0, number - self._first
        while num_bytes < _SENT_BYTES and place < len(self._events):
            events.append(self._events[place])
            num_bytes, place = num_bytes + len(events[-1]), place + 1
        return events

    def failed(self, error: Exception) -> bytes:
        """The last event of a follower that cannot follow any further. It is not part of the response."""
        details = error_body(client_error(error))["error"]
        assert isinstance(details, dict)
        body = {name: details[name] for name in ("code", "message", "param")}
        number = self._first + len(self._events)
        return named_event("error", {"type": "error", "sequence_number": number, **body})

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundResponse:
    """A response that is generated after its request has been answered."""

    def __init__(
        self,
        chat: ChatStream,
        response: ResponsesResponse,
        place: AdmittedPlace | None,
        threads: TextThreads,
        *,
        streamed: bool,
    ) -> None:
        self._chat = chat
        self._threads = threads
        self._response = response
        self.log = EventLog() if streamed else None
        if self.log is not None:
            self.log.add(response.queued())
        self._task = asyncio.create_task(self._run() if self.log is None else self._stream(self.log))

        def release(_: "asyncio.Task[None]") -> None:  # of a task that is cancelled before it starts, too
            chat.close()
            if place is not None:
                place.release()

        self._task.add_done_callback(release)

    async def _run(self) -> None:
        try:
            result, num_reasoning = await self._chat.result(), await self._chat.num_reasoning_tokens()
            num_scores = result.output.num_scores
            whole = await self._threads.run_scored(num_scores, lambda: self._response.whole(result, num_reasoning))
            self._response.end(whole)
        except Exception as error:
            self._response.fail(error)

    async def _stream(self, log: EventLog) -> None:
        try:
            async for events in response_events(self._chat, self._response):
                log.add(events)
        except Exception as error:
            log.add(self._response.failed(error))
        log.close()

    def body(self) -> bytes:
        return self._response.without_output("in_progress" if self._chat.started else "queued")

    def cancel(self) -> bytes:
        self._task.cancel()
        if self.log is not None:
            self.log.close(ResponseCancelled("The response was cancelled."))
        return self._response.without_output("cancelled")


async def response_events(chat: ChatStream, response: ResponsesResponse) -> Events:
    while isinstance(update := await chat.receive(), ChatDelta):
        if events := response.events(update):
            yield events
    yield response.last_event(update, await chat.num_reasoning_tokens())
