"""The engine on its own thread, for callers on an event loop. Orders go in through a queue, news come back."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from quire.core.errors import EngineFailed, QuireError
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.engine.failures import failure_of
from quire.engine.local import LocalFront
from quire.engine.outputs import Delta, RequestOutput
from quire.engine.terms import USUAL, Terms
from quire.engine.ticket import Ticket

_log = logging.getLogger(__name__)

News = Delta | RequestOutput


class Stopping(QuireError):
    """The server was told to end."""

    status = 503
    code = "server_stopping"


class Call:
    """Someone on an event loop who waits for one request."""

    __slots__ = ("_inbox", "_loop", "ticket")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[News | QuireError] = asyncio.Queue()
        self.ticket: Ticket | None = None  # the engine's thread alone touches it

    def tell(self, news: News | QuireError) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, news)

    async def hear(self) -> News:
        """The next news; the last is the whole output, or an error that is raised."""
        news = await self._inbox.get()
        if isinstance(news, QuireError):
            raise news
        return news


class Service:
    """Owns the front, and with it the engine, on one thread."""

    def __init__(self, front: LocalFront) -> None:
        self._front = front
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: dict[str, Call] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: QuireError | None = None

    def start(self) -> None:
        self._thread.start()

    def dismiss(self) -> None:
        """Send everyone away, now and from now on, so that nobody keeps the server from ending."""
        self._orders.put(lambda: self._fail(Stopping("The server is stopping; ask again when it is back.")))

    def stop(self) -> None:
        """End the thread after the turn it is in."""
        self._orders.put(None)
        self._thread.join()

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, terms: Terms = USUAL, streaming: bool
    ) -> Call:
        """Order a completion. Whoever does must `leave` the call, however it ends."""
        call = Call()
        self._orders.put(lambda: self._submit(call, prompt_ids, params, terms, streaming))
        return call

    def leave(self, call: Call) -> None:
        """Nobody listens any more: an unfinished request is aborted."""
        self._orders.put(lambda: self._leave(call))

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing left to do."""
        return self._front.idle

    def _submit(
        self, call: Call, prompt_ids: Sequence[int], params: SamplingParams, terms: Terms, streaming: bool
    ) -> None:
        if self.failure is not None:
            call.tell(self.failure)
            return
        try:
            call.ticket = self._front.submit(prompt_ids, params, terms=terms, streaming=streaming)
        except QuireError as error:
            call.tell(error)
        except Exception:  # our mistake, but this request's alone: nothing has begun
            _log.exception("a request broke its own submission")
            call.tell(EngineFailed("The engine could not take this request; the server's log says why."))
        else:
            self._calls[call.ticket.request_id] = call

    def _leave(self, call: Call) -> None:
        if call.ticket is not None and self._calls.pop(call.ticket.request_id, None) is not None:
            self._front.abort(call.ticket)

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
        deltas = self._front.turn()
        for delta in deltas:
            call = self._calls.get(delta.request_id)
            if call is None or call.ticket is None:
                continue
            reason = None if delta.finish_reason is None else FinishReason(delta.finish_reason)
            failure = failure_of(reason, len(call.ticket.prompt_ids), call.ticket.params)
            if failure is None:
                call.tell(delta)
            else:
                self._refuse(delta.request_id, failure)
        for request_id in {delta.request_id for delta in deltas if delta.finish_reason is not None}:
            call = self._calls.get(request_id)
            if call is not None and call.ticket is not None and call.ticket.finished:
                del self._calls[request_id]
                call.tell(call.ticket.output())

    def _refuse(self, request_id: str, failure: QuireError) -> None:
        """One continuation failed, and with it the request: after the first byte that is an error, not an end."""
        call = self._calls.pop(request_id, None)
        if call is not None and call.ticket is not None:
            self._front.abort(call.ticket)
            call.tell(failure)

    def _fail(self, failure: QuireError) -> None:
        self.failure = failure
        for call in self._calls.values():
            call.tell(failure)
        self._calls.clear()
