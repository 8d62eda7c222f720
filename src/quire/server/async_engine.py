"""Async engine client: the requests of an event loop, over an engine in another process.

Requests are opened on the event loop. Messages of the engine are processed, and detokenized, on the thread that reads
them, and delivered to the loop once per message; one lock guards the output processor between the two. Each request has
one buffer of unread output, in its `RequestStream`: what a slow reader has not fetched is merged, not queued, and is
bounded in bytes, for each stream and in all. So are log-probabilities that a response keeps to its end: a short body
can ask for a gigabyte. When the engine is lost, every open request fails at once.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Unpack

from quire.core.errors import Draining, InvalidParameter, InvalidPrompt, QuireError
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.core.step_output import StepOutput
from quire.engine.engine_process import EngineHandle
from quire.engine.messages import (
    DEFAULT_OPTIONS,
    AbortRequest,
    Accepted,
    Heartbeat,
    ImportPrefix,
    LeasePrefix,
    PromptTransfer,
    Query,
    QueryReply,
    Refused,
    ReleaseLease,
    RequestOptions,
    StopSequence,
    SubmitOptions,
)
from quire.engine.output_processor import OutputProcessor
from quire.engine.outputs import Delta, RequestOutput, failure_of
from quire.engine.request_state import RequestState
from quire.engine.stats import EngineInfo, EngineStats
from quire.engine.wire import ToFront
from quire.sched.prompt_split import NO_COSTS, PrefillCosts
from quire.server.fair_shares import ResponseBytes
from quire.server.http.request_context import CURRENT_CONTEXT, AdmittedPlace, RequestContext
from quire.server.request_stream import PendingOutput, RequestStream
from quire.text.tokenizer import Tokenizer

MAX_UNREAD_BYTES = 8 << 20  # of one stream: 200,000 tokens, or 8,000 with five log-probabilities each
MAX_ALL_UNREAD_BYTES = 64 << 20
MAX_KEPT_BYTES = 128 << 20  # log-probabilities of one response: 48,000 tokens with 20 each, 250,000 with one
MAX_ALL_KEPT_BYTES = 256 << 20


class SlowReader(QuireError):
    """The client does not read its response."""

    status = 408
    code = "slow_reader"


class ResponseTooLarge(QuireError):
    """The log-probabilities of a response that is not streamed take too much memory."""

    code = "response_too_large"


class TooManyLogprobs(QuireError):
    """Those of all responses together do, and those of this client the most."""

    status = 503
    code = "too_many_logprobs"
    retry_after_s = 1.0


def options_for(context: RequestContext | None, given: RequestOptions) -> RequestOptions:
    """The options of a body, with those of its headers, as far as its API key allows. Clients without a key share one
    partition of the cache, and each network of theirs has its share of the engine."""
    if context is None:
        return given
    priority = given.priority if context.priority is None else context.priority
    timeout_s = given.timeout_s if context.timeout_s is None else context.timeout_s
    if not context.identity.trusted and (priority != 0 or timeout_s is not None):
        name = "priority" if priority != 0 else "timeout_s"
        raise InvalidParameter(f"{name} is for keys that the operator trusts (see --api-key-file).", param=name)
    if timeout_s is not None and context.waited_s:
        timeout_s = max(timeout_s - context.waited_s, 0.0)
    tenant, client = context.identity.tenant, context.client
    return replace(given, priority=priority, timeout_s=timeout_s, tenant=tenant, client=client)


_PROGRESS = Heartbeat()
_REMEMBERED_REQUESTS = 1000  # that can be explained or aborted by their id
WOKEN_AT_ONCE = 8  # streams, before the loop looks at its sockets again: a reader writes to its client when it is woken


class EngineRestarting(QuireError):
    """There is no engine at the moment; one is being started."""

    status = 503
    code = "engine_unavailable"
    retry_after_s = 2.0


class EngineLost(QuireError):
    """The engine process died while the request was open."""

    status = 503
    code = "engine_lost"
    retry_after_s = 2.0


class RequestAborted(QuireError):
    """This request was aborted with the admin key."""

    status = 503
    code = "aborted"


class FinishedRequest(NamedTuple):
    """A finished request, for metrics and traces."""

    state: RequestState
    output: RequestOutput | None
    failure: QuireError | None


class AsyncEngine:
    """Submit requests, read their streams, close them."""

    def __init__(
        self, tokenizer: Tokenizer | None, clock: Callable[[], float], rank: int = 0, num_replicas: int = 1
    ) -> None:
        self._processor = OutputProcessor(tokenizer, clock, rank, num_replicas)
        self._clock = clock
        self._lock = threading.Lock()  # of the output processor: used by the event loop and the reading thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: EngineHandle | None = None
        self._streams: dict[int, RequestStream] = {}
        self._unread = PendingOutput()
        self._kept = ResponseBytes()  # log-probabilities
        self._to_wake: dict[RequestStream, bool] = {}  # in this order; whether all output of the request has come
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._next_token = 0
        self._waiting: dict[int, int] = {}  # requests without a first token: prompt tokens that they wait for here
        self._latest: dict[str, list[int]] = {}  # what came with the latest requests, by the server's own ids
        self.draining = False
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.costs = NO_COSTS  # of prompts; of engines with a role only
        self.num_waiting_tokens = 0  # of the prompts that it has, and computes before a new one
        self.heartbeat_s = clock()  # when the engine was last heard
        self.progress_s = clock()  # since when its loop does what it does
        self.expected_s = 0.0  # how long that takes, as predicted
        self.finished: Callable[[FinishedRequest], None] = lambda finished: None
        self.lost: Callable[[], None] = lambda: None
        self.slow_reader: Callable[[str], None] = lambda reason: None
        self.progressed: Callable[[Delta, RequestState], None] = lambda delta, state: None
        self.move: Callable[[RequestStream], bool] = lambda stream: False  # a lost request to another engine
        self.moved: Callable[[RequestState], None] = lambda state: None

    # The engine process.

    def listen(self) -> None:
        """Deliver output on this thread's event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def attach(self, process: EngineHandle, info: EngineInfo) -> None:
        self._process, self.info = process, info
        self.note_heartbeat()

    def detach(self) -> None:
        """The engine is gone: every open request fails, unless another engine begins it again, and none is accepted
        until there is another engine."""
        self.lost()
        self._process, self.stats, self.costs = None, None, NO_COSTS
        for stream in list(self._streams.values()):
            if not self._move(stream):
                self._end(stream, failure=EngineLost("The engine stopped while it worked on this request; try again."))
        for reply in self._queries.values():
            if not reply.done():
                reply.set_exception(EngineLost("The engine stopped before it could reply; try again."))
        self._queries.clear()

    def _move(self, stream: RequestStream) -> bool:
        """Whether another engine has begun a request again that is lost here."""
        lost = stream.state
        self._forget_kept(stream)
        if not (stream.is_movable and self.move(stream)):
            return False
        del self._streams[lost.number]
        self._latest.pop(stream.response_id, None)
        with self._lock:
            self._processor.drop(lost)
        self.moved(lost)
        return True

    @property
    def attached(self) -> bool:
        return self._process is not None

    # Requests come and go.

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        held: bool = False,
        **keywords: Unpack[SubmitOptions],
    ) -> RequestStream:
        """Submit a request. The caller must `close` the stream, however it ends. `held`: `send_held` sends it."""
        if self.draining:
            raise Draining()
        if self._process is None:
            raise EngineRestarting("The engine is being started; try again in a moment.")
        context = CURRENT_CONTEXT.get()
        keywords["options"] = options_for(context, keywords.get("options", DEFAULT_OPTIONS))
        with self._lock:
            state = self._processor.open(prompt, params, **keywords)
        context_of_stream = None if state.request.prompt_alone else context
        streaming = keywords.get("streaming", False)
        stream = RequestStream(state, context_of_stream, self._close, streaming=streaming)
        stream.unread = self._unread
        if context is not None:
            stream.response_id = context.request_id
        if context is not None and context.place is not None:
            self._add_prompt(stream, context.place)
        self._streams[state.number] = stream
        self.expect_prompt(stream, 0 if held else len(prompt))
        if context is not None:
            self._remember(context.request_id, state.number)
            context.note_prompt(len(prompt))
        try:
            if not held:
                self._process.send(state.request)
        except (OverflowError, TypeError, ValueError) as error:  # e.g. an integer beyond 64 bits: not sent
            self._end(stream)
            raise InvalidPrompt(f"This request has a value that cannot be sent to the engine: {error}.") from error
        return stream

    def adopt(self, stream: RequestStream) -> None:
        """Begin a request again that another engine has lost; its reader goes on with this one's output."""
        assert self._process is not None
        lost, request, options = stream.state, stream.state.request, stream.state.request.options
        if options.timeout_s is not None:
            waited_s = self._clock() - lost.metrics.arrival_s
            options = replace(options, timeout_s=max(options.timeout_s - waited_s, 0.0))
        if stream.on_end is not None:  # its prompt is being computed elsewhere
            stream.on_end()
            stream.on_end = None
        with self._lock:
            state = self._processor.open(
                request.prompt,
                request.params,
                options=options,
                streaming=stream.streaming,
                pooled=request.pooled,
                without_tokens=request.without_tokens,
            )
        state.prompt, state.metrics.arrival_s = lost.prompt, lost.metrics.arrival_s
        stream.restart(state, self._close, self._unread)
        self._streams[state.number] = stream
        self._remember(stream.response_id, state.number)
        self._process.send(state.request)

    def _remember(self, request_id: str, number: int) -> None:
        self._latest.setdefault(request_id, []).append(number)
        if len(self._latest) > _REMEMBERED_REQUESTS:
            del self._latest[next(iter(self._latest))]

    def send_held(self, stream: RequestStream, transfer: PromptTransfer) -> None:
        """Send a request that was held until now, unless it has ended."""
        if self._streams.get(stream.state.number) is not stream or self._process is None:
            return
        stream.on_end = None
        self.expect_prompt(stream, len(stream.state.prompt_ids) - transfer.num_tokens)
        options = stream.state.request.options
        if options.timeout_s is not None:
            options = replace(options, timeout_s=max(options.timeout_s - transfer.seconds, 0.0))
        try:
            self._process.send(replace(stream.state.request, options=options, transfer=transfer))
        except (OverflowError, TypeError, ValueError) as error:
            failure = InvalidPrompt(f"This request has a value that cannot be sent to the engine: {error}.")
            self._end(stream, failure=failure)

    def expect_prompt(self, stream: RequestStream, num_tokens: int) -> None:
        """How many tokens of its prompt a request waits for here, until its first token."""
        number = stream.state.number
        self.num_waiting_tokens += num_tokens - self._waiting.get(number, 0)
        self._waiting[number] = num_tokens

    @property
    def num_decoding(self) -> int:
        """Requests that have their first token."""
        return len(self._streams) - len(self._waiting)

    def _add_prompt(self, stream: RequestStream, place: AdmittedPlace) -> None:
        num_tokens = len(stream.state.prompt_ids)
        try:
            place.add_prompt(num_tokens)
        except QuireError:
            with self._lock:
                self._processor.drop(stream.state)
            raise
        stream.place, stream.num_waiting_tokens = place, num_tokens

    def _close(self, stream: RequestStream) -> None:
        self._forget_kept(stream)
        if self._streams.get(stream.state.number) is stream:
            self._abort(stream.state)
            self._end(stream)

    def abort(self, number: int) -> bool:
        """Abort a request for the operator. False if it had finished."""
        stream = self._streams.get(number)
        if stream is None:
            return False
        self._abort(stream.state)
        self._end(stream, failure=RequestAborted("This request was ended by the operator."))
        return True

    def fail_all(self, failure: Callable[[], QuireError]) -> None:
        """Fail every open request with this error, and abort it in the engine."""
        for stream in list(self._streams.values()):
            self._abort(stream.state)
            self._end(stream, failure=failure())

    def numbers_of(self, request_id: str) -> tuple[int, ...]:
        """The prompts that came with a request, if it is one of the latest."""
        return tuple(self._latest.get(request_id, ()))

    async def query(self, what: str, number: int = 0) -> bytes:
        """The engine's reply, as JSON."""
        return await self.ask(lambda token: Query(token, what, number))

    async def ask(self, message: Callable[[int], Query | LeasePrefix | ImportPrefix]) -> bytes:
        """The engine's reply, as JSON, to a message that has this token."""
        if self._process is None:
            raise EngineRestarting("The engine is being started; try again in a moment.")
        token, self._next_token = self._next_token, self._next_token + 1
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queries[token] = reply
        try:
            self._process.send(message(token))
            return await reply
        finally:
            self._queries.pop(token, None)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    # Messages of the engine, on the reading thread.

    def receive(self, message: ToFront) -> None:
        match message:
            case StepOutput():
                self._process_output(message)
            case Accepted():
                with self._lock:
                    self._processor.accept(message)
            case Refused():
                self._on_loop(self._refused, message.number, message.error)
            case EngineStats():
                self._on_loop(self._note_stats, message)
            case PrefillCosts():
                self._on_loop(self._note_costs, message)
            case Heartbeat():
                self._on_loop(self.note_heartbeat, message)
            case QueryReply():
                self._on_loop(self._note_reply, message.token, message.body)

    def _process_output(self, output: StepOutput) -> None:
        with self._lock:
            processed = self._processor.process(output)
        for stop in processed.stops:
            self.send(stop)
        started = [first.number for first in output.first_tokens]
        if processed.deltas or started:
            self._on_loop(self._deliver, processed.deltas, processed.finished, started)

    def _on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: no stream is left
            return

    # The same, on the loop.

    def note_heartbeat(self, beat: Heartbeat = _PROGRESS) -> None:
        """The engine was heard. Anything but a heartbeat comes from its loop, which has then made progress."""
        self.heartbeat_s = self._clock()
        self.progress_s, self.expected_s = self.heartbeat_s - beat.running_s, beat.expected_s

    def _note_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        self.note_heartbeat()

    def _note_costs(self, costs: PrefillCosts) -> None:
        self.costs = costs

    def _note_reply(self, token: int, body: bytes) -> None:
        reply = self._queries.get(token)
        if reply is not None and not reply.done():
            reply.set_result(body)

    def _refused(self, number: int | None, error: QuireError) -> None:
        stream = None if number is None else self._streams.get(number)
        if stream is not None:
            self._end(stream, failure=error)

    def _deliver(self, deltas: list[Delta], finished: list[RequestState], started: list[int]) -> None:
        self.note_heartbeat()
        for number in started:
            stream = self._streams.get(number)
            if stream is not None:
                self._start(stream)
        is_waking = bool(self._to_wake)
        for delta in deltas:
            stream = self._streams.get(int(delta.request_id))
            if stream is not None:
                self._to_wake.setdefault(stream, False)
                self._put(stream, delta)
        for state in finished:
            stream = self._streams.get(state.number)
            if stream is not None:
                self._to_wake[stream] = True
        if not is_waking:
            self._wake_some()

    def _start(self, stream: RequestStream) -> None:
        """It has its first token, or ends: its prompt no longer waits."""
        self.num_waiting_tokens -= self._waiting.pop(stream.state.number, 0)
        if stream.place is not None and stream.num_waiting_tokens:
            stream.place.start_prompt(stream.num_waiting_tokens)
            stream.num_waiting_tokens = 0

    def _put(self, stream: RequestStream, delta: Delta) -> None:
        failure = None if delta.finish_reason is None else _failure(delta.finish_reason, stream.state)
        if failure is None or delta.token_ids or delta.text:
            self.progressed(delta, stream.state)
            stream.put(delta if failure is None else replace(delta, finish_reason=None, stop_reason=None))
            if stream.is_behind and failure is None:
                failure = self._bound_unread(stream)
            if failure is None and (kept := stream.kept_bytes(delta)):
                failure = self._bound_kept(stream, kept)
        if failure is not None:  # one sequence failed, and with it the request
            self._abort(stream.state)
            self._end(stream, failure=failure)

    def _bound_unread(self, stream: RequestStream) -> QuireError | None:
        """The failure of a stream whose reader has left too much unread. If all have together, the one with the most
        loses it."""
        if self._unread.streams[stream] > MAX_UNREAD_BYTES:
            self.slow_reader("stream")
            return SlowReader(f"More than {MAX_UNREAD_BYTES} bytes of this response were not read.")
        while self._unread.num_bytes > MAX_ALL_UNREAD_BYTES:
            behind = [each for each in self._unread.streams if each.is_behind]
            worst = max(behind, key=self._unread.streams.__getitem__)
            failure = SlowReader("This response was not read, and the server has too many of these.")
            self.slow_reader("all_streams")
            if self._streams.get(worst.state.number) is worst:
                self._abort(worst.state)
                self._end(worst, failure=failure)
            worst.discard(failure)
            if worst is stream:
                break
        return None

    def _bound_kept(self, stream: RequestStream, num_bytes: int) -> QuireError | None:
        """The failure of a response whose log-probabilities, with these, take too much. If all do together, the largest
        of the client with the most fails."""
        stream.num_kept_bytes += num_bytes
        self._kept.add(stream.client, stream.response_id, num_bytes)
        if self._kept.by_response[stream.response_id] > MAX_KEPT_BYTES:
            return ResponseTooLarge(
                f"The log-probabilities of this response take more than {MAX_KEPT_BYTES >> 20} MiB: stream it, or "
                f"lower logprobs, n, max_tokens or the number of prompts.",
                param="logprobs",
            )
        if self._kept.num_bytes > MAX_ALL_KEPT_BYTES:
            keeping = [each for each in self._streams.values() if each.num_kept_bytes]
            worst = max(keeping, key=lambda each: self._kept.rank(each.client, each.response_id))
            failure = TooManyLogprobs("This server holds too many log-probabilities; try again soon, or stream them.")
            if worst is stream:
                return failure
            self._abort(worst.state)
            self._end(worst, failure=failure)
        return None

    def _forget_kept(self, stream: RequestStream) -> None:
        self._kept.add(stream.client, stream.response_id, -stream.num_kept_bytes)
        stream.num_kept_bytes = 0

    def _wake_some(self) -> None:
        """A few streams now, the others in the next iterations of the loop: in between, it serves its sockets."""
        for stream in list(islice(self._to_wake, WOKEN_AT_ONCE)):
            is_complete = self._to_wake.pop(stream)
            if is_complete and self._streams.get(stream.state.number) is stream:
                self._end(stream, output=stream.state.output())
            stream.wake()
        if self._to_wake:
            assert self._loop is not None
            self._loop.call_soon(self._wake_some)

    def _abort(self, state: RequestState) -> None:
        self.send(AbortRequest(state.number))

    def send(self, message: StopSequence | AbortRequest | ReleaseLease) -> None:
        """Thread-safe. Dropped without an engine, which may be detached at any moment."""
        process = self._process
        if process is not None:
            process.send(message)

    def _end(
        self, stream: RequestStream, *, output: RequestOutput | None = None, failure: QuireError | None = None
    ) -> None:
        """A request ends once: with an output, with a failure, or closed by its reader."""
        state = stream.state
        del self._streams[state.number]
        if output is None:  # else when the response is written
            self._forget_kept(stream)
        with self._lock:
            self._processor.drop(state)
        if stream.on_end is not None:
            stream.on_end()
        self._start(stream)
        if stream.place is not None:
            stream.place.end_prompt()
        processed = state.sequences if output is None else output.outputs
        num_tokens = sum(len(each.token_ids) for each in processed)  # a stream that was left, or failed, had some, too
        if stream.context is not None and (num_tokens or output is not None):
            stream.context.note_completion(num_tokens)
        if output is not None:
            stream.finish(output)
        elif failure is not None:
            stream.fail(failure)
        stream.wake()
        self.finished(FinishedRequest(state, output, failure))


def _failure(reason: str, state: RequestState) -> QuireError | None:
    return failure_of(FinishReason(reason), len(state.prompt_ids), state.params)
