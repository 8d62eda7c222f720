"""Async engine client: the requests of an event loop, over an engine in another process.

Requests are opened on the event loop. Messages of the engine are processed, and detokenized, on the thread that reads
them, and delivered to the loop once per message; one lock guards the output processor between the two. Each request has
one buffer of unread output, in its `RequestStream`: what a slow reader has not fetched is merged, not queued. When the
engine is lost, every open request fails at once.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from quire.core.errors import Draining, InvalidParameter, InvalidPrompt, QuireError
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.core.step_output import StepOutput
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import AbortRequest, Accepted, Query, QueryReply, Refused, StopSequence
from quire.engine.output_processor import OutputProcessor
from quire.engine.outputs import EMBEDDING, Delta, RequestOutput, failure_of
from quire.engine.request_options import USUAL, RequestOptions
from quire.engine.request_state import RequestState
from quire.engine.stats import EngineInfo, EngineStats
from quire.engine.wire import ToFront
from quire.server.http.request_context import CURRENT_CONTEXT, RequestContext
from quire.text.tokenizer import Tokenizer

News = Delta | RequestOutput


class RequestStream:
    """The output of one request as it is generated. Used on the event loop's thread only. Storing wakes no reader:
    the engine client does, for a few streams at a time."""

    __slots__ = ("_awaited", "_failure", "_output", "_unread", "context", "ticket")

    def __init__(self, ticket: RequestState, context: RequestContext | None = None) -> None:
        self.ticket = ticket
        self.context = context  # of the HTTP request, which may have several prompts; None if no completion follows
        self._unread: dict[int, Delta] = {}  # by continuation
        self._output: RequestOutput | None = None
        self._failure: QuireError | None = None
        self._awaited: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        before = self._unread.get(delta.index)
        self._unread[delta.index] = delta if before is None else before.then(delta)

    def finish(self, output: RequestOutput) -> None:
        self._output = output

    def fail(self, error: QuireError) -> None:
        """The first failure counts. Output before it is still read: the speed of a reader does not change what it
        gets."""
        if self._failure is None and self._output is None:
            self._failure = error

    async def hear(self) -> News:
        """The next delta; at the end the whole output, or an error that is raised."""
        while True:
            if self._unread:
                return self._unread.pop(next(iter(self._unread)))
            if self._failure is not None:
                raise self._failure
            if self._output is not None:
                return self._output
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited

    def wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)


def terms_for(context: RequestContext | None, said: RequestOptions) -> RequestOptions:
    """The terms that a body asks for, with those of its headers and its key."""
    if context is None:
        return said
    priority = said.priority if context.priority is None else context.priority
    timeout_s = said.timeout_s if context.timeout_s is None else context.timeout_s
    if not context.identity.trusted and (priority != 0 or timeout_s is not None):
        name = "priority" if priority != 0 else "timeout_s"
        raise InvalidParameter(f"{name} is for keys that the operator trusts (see --api-key-file).", param=name)
    return replace(said, priority=priority, timeout_s=timeout_s, tenant=context.identity.tenant)


_REMEMBERED_REQUESTS = 1000  # that can be explained or aborted by their id
_REMEMBERED_ENDS = 256  # finished requests that the drain rate is measured by
WOKEN_AT_ONCE = 8  # streams, before the loop looks at its sockets again: a reader writes to its client when it is woken


class EngineRestarting(QuireError):
    """There is no engine at the moment; one is being started."""

    status = 503
    code = "engine_unavailable"
    retry_after_s = 2.0


class EngineLost(QuireError):
    """The engine died under this request."""

    status = 503
    code = "engine_lost"
    retry_after_s = 2.0


class RequestAborted(QuireError):
    """Somebody with the admin key ended this request."""

    status = 503
    code = "aborted"


class FinishedRequest(NamedTuple):
    """A request that is over, for those who count."""

    ticket: RequestState
    output: RequestOutput | None
    failure: QuireError | None


class AsyncEngine:
    """Open a call, hear it, leave it."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self._front = OutputProcessor(tokenizer, clock)
        self._clock = clock
        self._lock = threading.Lock()  # of the front: the loop opens and drops, the reading thread hears
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: EngineProcess | None = None
        self._calls: dict[int, RequestStream] = {}
        self._to_wake: dict[RequestStream, bool] = {}  # in this order; whether all output of the request has come
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._next_token = 0
        self._latest: dict[str, list[int]] = {}  # what came with the latest requests, by the server's own ids
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)
        self.draining = False
        self.facts: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.beaten_s = clock()
        self.finished: Callable[[FinishedRequest], None] = lambda finished: None
        self.lost: Callable[[], None] = lambda: None
        self.progressed: Callable[[Delta, RequestState], None] = lambda delta, ticket: None

    # Who is behind it.

    def listen(self) -> None:
        """From now on this thread's event loop is where news are told."""
        self._loop = asyncio.get_running_loop()

    def attach(self, child: EngineProcess, facts: EngineInfo) -> None:
        self._child, self.facts, self.beaten_s = child, facts, self._clock()

    def detach(self) -> None:
        """The engine is gone: everybody who waits is told so, and nobody comes until there is another."""
        self.lost()
        self._child, self.stats = None, None
        for call in list(self._calls.values()):
            self._end(call, failure=EngineLost("The engine stopped while it worked on this request; try again."))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineLost("The engine stopped before it could answer; ask again."))
        self._asked.clear()

    @property
    def attached(self) -> bool:
        return self._child is not None

    # Requests come and go.

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        terms: RequestOptions = USUAL,
        streaming: bool,
        without_tokens: bool = False,
    ) -> RequestStream:
        """Open a call. Whoever does must `leave` it, however it ends. Without tokens, the prompt's scores are wanted
        alone."""
        return self._open(prompt, params, terms, streaming=streaming, without_tokens=without_tokens)

    def embed(self, prompt: Sequence[int], *, terms: RequestOptions = USUAL) -> RequestStream:
        """Open a call whose output is the prompt's embedding; else as `submit`."""
        return self._open(prompt, EMBEDDING, terms, pooled=True)

    def _open(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        terms: RequestOptions,
        *,
        streaming: bool = False,
        pooled: bool = False,
        without_tokens: bool = False,
    ) -> RequestStream:
        if self.draining:
            raise Draining()
        if self._child is None:
            raise EngineRestarting("The engine is being started; ask again in a moment.")
        context = CURRENT_CONTEXT.get()
        terms = terms_for(context, terms)
        with self._lock:
            ticket = self._front.open(
                prompt, params, terms=terms, streaming=streaming, pooled=pooled, without_tokens=without_tokens
            )
        call = self._calls[ticket.number] = RequestStream(ticket, None if ticket.request.prompt_alone else context)
        if context is not None:
            self._note_request(context.request_id, ticket.number)
            context.note_prompt(len(prompt))
        try:
            self._child.send(ticket.request)
        except (OverflowError, TypeError, ValueError) as error:  # a number beyond 64 bits, and its like: never sent
            self._end(call)
            raise InvalidPrompt(f"This request holds what cannot be sent to the engine: {error}.") from error
        return call

    def leave(self, call: RequestStream) -> None:
        """Nobody listens any more: an unfinished request is aborted."""
        if self._calls.get(call.ticket.number) is call:
            self._abort(call.ticket)
            self._end(call)

    def abort(self, number: int) -> bool:
        """End a request from outside; whoever waits for it is told. False if it was over."""
        call = self._calls.get(number)
        if call is None:
            return False
        self._abort(call.ticket)
        self._end(call, failure=RequestAborted("This request was ended by the operator."))
        return True

    def dismiss(self, failure: Callable[[], QuireError]) -> None:
        """Everybody who waits is told this, and their requests are given up."""
        for call in list(self._calls.values()):
            self._abort(call.ticket)
            self._end(call, failure=failure())

    def numbers_of(self, request_id: str) -> tuple[int, ...]:
        """The prompts that came with a request, if it is one of the latest."""
        return tuple(self._latest.get(request_id, ()))

    async def ask(self, what: str, number: int = 0) -> bytes:
        """The engine's answer, as JSON."""
        if self._child is None:
            raise EngineRestarting("The engine is being started; ask again in a moment.")
        token, self._next_token = self._next_token, self._next_token + 1
        asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[token] = asked
        try:
            self._child.send(Query(token, what, number))
            return await asked
        finally:
            self._asked.pop(token, None)

    def _note_request(self, request_id: str, number: int) -> None:
        self._latest.setdefault(request_id, []).append(number)
        if len(self._latest) > _REMEMBERED_REQUESTS:
            del self._latest[next(iter(self._latest))]

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def drained_per_s(self) -> float | None:
        """Requests that ended per second, lately; None if too few have."""
        if len(self._ends) < 2:
            return None
        return (len(self._ends) - 1) / max(self._clock() - self._ends[0], 1e-3)

    # What the engine says. On the reading thread.

    def hear(self, said: ToFront) -> None:
        match said:
            case StepOutput():
                self._advance(said)
            case Accepted():
                with self._lock:
                    self._front.accept(said)
            case Refused():
                self._on_loop(self._refused, said.number, said.error)
            case EngineStats():
                self._on_loop(self._note_beat, said)
            case QueryReply():
                self._on_loop(self._answered, said.token, said.body)

    def _advance(self, progress: StepOutput) -> None:
        with self._lock:
            heard = self._front.hear(progress)
        for stop in heard.stops:
            self._send(stop)
        if heard.deltas:
            self._on_loop(self._deliver, heard.deltas, heard.finished)

    def _on_loop(self, verb: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(verb, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            return

    # The same, on the loop.

    def _note_beat(self, stats: EngineStats) -> None:
        self.stats, self.beaten_s = stats, self._clock()

    def _answered(self, token: int, body: bytes) -> None:
        asked = self._asked.get(token)
        if asked is not None and not asked.done():
            asked.set_result(body)

    def _refused(self, number: int | None, error: QuireError) -> None:
        call = None if number is None else self._calls.get(number)
        if call is not None:
            self._end(call, failure=error)

    def _deliver(self, deltas: list[Delta], finished: list[RequestState]) -> None:
        self.beaten_s = self._clock()
        is_waking = bool(self._to_wake)
        for delta in deltas:
            call = self._calls.get(int(delta.request_id))
            if call is not None:
                self._to_wake.setdefault(call, False)
                self._put(call, delta)
        for ticket in finished:
            call = self._calls.get(ticket.number)
            if call is not None:
                self._to_wake[call] = True
        if not is_waking:
            self._wake_some()

    def _put(self, call: RequestStream, delta: Delta) -> None:
        failure = None if delta.finish_reason is None else _failure(delta.finish_reason, call.ticket)
        if failure is None or delta.token_ids or delta.text:
            self.progressed(delta, call.ticket)
            call.put(delta if failure is None else replace(delta, finish_reason=None, stop_reason=None))
        if failure is not None:  # one sequence failed, and with it the request
            self._abort(call.ticket)
            self._end(call, failure=failure)

    def _wake_some(self) -> None:
        """A few streams now, the others in the next iterations of the loop: in between, it serves its sockets."""
        for call in list(islice(self._to_wake, WOKEN_AT_ONCE)):
            is_complete = self._to_wake.pop(call)
            if is_complete and self._calls.get(call.ticket.number) is call:
                self._end(call, output=call.ticket.output())
            call.wake()
        if self._to_wake:
            assert self._loop is not None
            self._loop.call_soon(self._wake_some)

    def _abort(self, ticket: RequestState) -> None:
        self._send(AbortRequest(ticket.number))

    def _send(self, message: StopSequence | AbortRequest) -> None:
        """From any thread. Without an engine it goes nowhere: the engine may be detached at any moment."""
        child = self._child
        if child is not None:
            child.send(message)

    def _end(
        self, call: RequestStream, *, output: RequestOutput | None = None, failure: QuireError | None = None
    ) -> None:
        """A call has one end: an output, a failure, or nobody to tell."""
        ticket = call.ticket
        del self._calls[ticket.number]
        with self._lock:
            self._front.drop(ticket)
        _note_completion(call, output)
        if output is not None:
            call.finish(output)
            self._ends.append(self._clock())
        elif failure is not None:
            call.fail(failure)
        call.wake()
        self.finished(FinishedRequest(ticket, output, failure))


def _note_completion(call: RequestStream, output: RequestOutput | None) -> None:
    """A stream that its reader left, or that failed, has had tokens, too."""
    heard = call.ticket.transcripts if output is None else output.outputs
    num_tokens = sum(len(each.token_ids) for each in heard)
    if call.context is not None and (num_tokens or output is not None):
        call.context.note_completion(num_tokens)


def _failure(reason: str, ticket: RequestState) -> QuireError | None:
    return failure_of(FinishReason(reason), len(ticket.prompt_ids), ticket.params)
