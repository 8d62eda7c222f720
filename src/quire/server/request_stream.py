"""The output of one request as it is generated, until its reader has fetched it. Used on the event loop's thread only.

What a slow reader has not fetched is merged, not queued, and counted in bytes, of each stream and of all.
"""

import asyncio
from collections.abc import Callable

from quire.core.errors import QuireError
from quire.engine.outputs import Delta, RequestOutput
from quire.engine.request_state import RequestState
from quire.server.http.request_context import AdmittedPlace, RequestContext

StreamItem = Delta | RequestOutput

_TOKEN_BYTES, _LOGPROBS_BYTES, _LOGPROB_BYTES = 40, 300, 120  # as objects, measured; of a token's log-probabilities


class PendingOutput:
    """The output of all streams that waits for their readers."""

    __slots__ = ("num_bytes", "streams")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.streams: dict[RequestStream, int] = {}  # with unread output: its size

    def add(self, stream: "RequestStream", num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.streams[stream] = self.streams.get(stream, 0) + num_bytes

    def remove(self, stream: "RequestStream", num_bytes: int | None = None) -> None:
        """So much of a stream is read; or all of it is dropped."""
        held = self.streams.pop(stream, 0)
        read = held if num_bytes is None else num_bytes
        self.num_bytes -= read
        if held > read:
            self.streams[stream] = held - read


class RequestStream:
    """The output of one request as it is generated. Used on the event loop's thread only. Storing wakes no reader:
    the engine client does, for a few streams at a time."""

    __slots__ = ("_close", "_failure", "_is_read", "_output", "_unread", "_waiter", "context", "is_behind", "moved",
                 "num_kept_bytes", "num_waiting_tokens", "on_end", "place", "response_id", "state", "streaming",
                 "unread")  # fmt: skip

    def __init__(
        self,
        state: RequestState,
        context: RequestContext | None,
        close: Callable[["RequestStream"], None],
        *,
        streaming: bool = False,
    ) -> None:
        self.state = state
        self.response_id = state.request_id  # the same for all prompts of one HTTP request
        self.streaming = streaming  # what was read is not kept
        self.num_kept_bytes = 0  # log-probabilities
        self.context = context  # of the HTTP request, which may have several prompts; None if no completion follows
        self.place: AdmittedPlace | None = None
        self.num_waiting_tokens = 0  # of its prompt, until the first token
        self.on_end: Callable[[], object] | None = None  # called when the request ends, however it does
        self._close = close
        self._unread: dict[int, Delta] = {}  # by sequence
        self._output: RequestOutput | None = None
        self._failure: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.unread = PendingOutput()  # of all streams of an engine
        self.is_behind = False  # output came while the reader was not waiting for any: it waits for its client
        self._is_read = False  # a client may have some of the output
        self.moved = False  # to another engine, when the first one was lost

    def put(self, delta: Delta) -> None:
        before = self._unread.get(delta.index)
        self._unread[delta.index] = delta if before is None else before.then(delta)
        self.unread.add(self, self._num_bytes(delta))

    def _num_bytes(self, delta: Delta) -> int:
        """An estimate that adds up when deltas are merged."""
        scored = _scored_bytes(len(delta.logprobs), self.state.params.logprobs)
        return _TOKEN_BYTES * len(delta.token_ids) + len(delta.text) + scored

    def kept_bytes(self, delta: Delta) -> int:
        """The log-probabilities that are kept with a delta; with the first one those of the prompt, too."""
        kept = 0 if self.streaming else _scored_bytes(len(delta.logprobs), self.state.params.logprobs)
        if self.num_kept_bytes == 0 and self.state.prompt_logprobs is not None:
            kept += _scored_bytes(len(self.state.prompt_logprobs), self.state.params.prompt_logprobs)
        return kept

    @property
    def client(self) -> str:
        return self.state.request.options.client

    def finish(self, output: RequestOutput) -> None:
        self._output = output

    def fail(self, error: QuireError) -> None:
        """The first failure counts. Output before it is still read: the speed of a reader does not change what it
        gets."""
        if self._failure is None and self._output is None:
            self._failure = error

    @property
    def over(self) -> bool:
        """All output has come; some of it may be unread."""
        return self._failure is not None or self._output is not None

    async def receive(self) -> StreamItem:
        """The next delta; at the end the whole output, or an error that is raised."""
        self.is_behind = False
        while True:
            if self._unread:
                delta = self._unread.pop(next(iter(self._unread)))
                self.unread.remove(self, self._num_bytes(delta))
                self._is_read = self._is_read or self.streaming
                return delta
            if self._failure is not None:
                raise self._failure
            if self._output is not None:
                return self._output
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None

    async def output(self) -> RequestOutput:
        """The whole output, when all of it has come."""
        while not isinstance(item := await self.receive(), RequestOutput):
            pass
        return item

    @property
    def is_movable(self) -> bool:
        """Whether another engine may begin the request again: no client has any of its output. Once, or a request that
        no engine survives would end all of them."""
        return not (self._is_read or self.moved or self.over)

    def restart(self, state: RequestState, close: Callable[["RequestStream"], None], unread: PendingOutput) -> None:
        """From now on with the output of another engine."""
        self._unread.clear()
        self.unread.remove(self)
        self.state, self._close, self.unread = state, close, unread
        self.is_behind, self.moved = False, True

    def close(self) -> None:
        """Nothing more is read: an unfinished request is aborted. Idempotent."""
        self._close(self)
        self.unread.remove(self)

    def discard(self, failure: QuireError) -> None:
        """Drop the unread output: the reader gets this failure instead."""
        self._unread.clear()
        self.unread.remove(self)
        self._output, self._failure = None, failure

    def wake(self) -> None:
        if self._waiter is None:
            self.is_behind = bool(self._unread)
        elif not self._waiter.done():
            self._waiter.set_result(None)


def _scored_bytes(num_tokens: int, num_alternatives: int | None) -> int:
    """An estimate of the log-probabilities of some tokens."""
    return num_tokens * (_LOGPROBS_BYTES + _LOGPROB_BYTES * (1 + (num_alternatives or 0)))
