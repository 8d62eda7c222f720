"""The engine on its own thread, for callers on an event loop. Orders go in through a queue, deltas come back."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from quire.core.errors import EngineFailed, QuireError
from quire.core.sampling import SamplingParams
from quire.engine.front import Front, Prompt, Ticket
from quire.engine.outputs import Delta, RequestOutput

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Caller:
    """Someone on an event loop who waits for one request. The inbox ends with an output or an error."""

    loop: asyncio.AbstractEventLoop
    inbox: "asyncio.Queue[Delta | RequestOutput | QuireError]"
    ticket: Ticket | None = None

    def tell(self, news: Delta | RequestOutput | QuireError) -> None:
        self.loop.call_soon_threadsafe(self.inbox.put_nowait, news)


class Service:
    """Owns the front, and with it the engine, on one thread."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._callers: dict[str, Caller] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: QuireError | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the turn it is in."""
        self._orders.put(None)
        self._thread.join()

    async def stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Delta | RequestOutput]:
        """Deltas as they come, then the whole output. Leaving early aborts the request."""
        caller = Caller(asyncio.get_running_loop(), asyncio.Queue())
        self._orders.put(lambda: self._submit(caller, prompt, params))
        try:
            while True:
                news = await caller.inbox.get()
                if isinstance(news, QuireError):
                    raise news
                yield news
                if isinstance(news, RequestOutput):
                    return
        finally:
            self._orders.put(lambda: self._abort(caller))

    def _submit(self, caller: Caller, prompt: Prompt, params: SamplingParams) -> None:
        if self.failure is not None:
            caller.tell(self.failure)
            return
        try:
            caller.ticket = self._front.submit(prompt, params, streaming=True)
        except QuireError as error:
            caller.tell(error)
        else:
            self._callers[caller.ticket.request_id] = caller

    def _abort(self, caller: Caller) -> None:
        if caller.ticket is not None and self._callers.pop(caller.ticket.request_id, None) is not None:
            self._front.abort(caller.ticket)

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(block=self._front.idle or self.failure is not None)
            except queue.Empty:
                order = self._turn
            if order is None:
                return
            try:
                order()
            except Exception:  # the loop itself broke: nobody's fault, everybody's end
                _log.exception("the engine failed")
                self._fail(EngineFailed("The engine failed; the server's log says how."))

    def _turn(self) -> None:
        for delta in self._front.turn():
            caller = self._callers[delta.request_id]
            caller.tell(delta)
            if delta.finish_reason is not None and caller.ticket is not None and caller.ticket.finished:
                caller.tell(caller.ticket.output())
                del self._callers[delta.request_id]

    def _fail(self, failure: QuireError) -> None:
        self.failure = failure
        for caller in self._callers.values():
            caller.tell(failure)
        self._callers.clear()
