"""In-process engine client: output processor and engine in one process, for `LLM`. Threads share one engine.

`PendingOutputs` waits for several requests, `DeltaStream` reads one as it is generated; any waiting thread may step the
engine for all. Ctrl-C is deferred to the end of a step: a step that is planned and not absorbed would leave scheduler
and runner in different states. A process forked from one that ran a model is refused: torch's worker threads do not
survive fork().
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import FrameType
from typing import Unpack

from quire.core.errors import EngineFailed
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.messages import SubmitOptions
from quire.engine.output_processor import OutputProcessor, Prompt
from quire.engine.outputs import Delta
from quire.engine.request_state import RequestState
from quire.text.tokenizer import Tokenizer


class LocalClient:
    """Submit requests, step the engine, read deltas. Thread-safe; several calls that belong together hold the lock."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.lock = RLock()
        self._engine = engine
        self._processor = OutputProcessor(tokenizer, engine.clock)

    def submit(self, prompt: Prompt, params: SamplingParams, **keywords: Unpack[SubmitOptions]) -> RequestState:
        """Queue a prompt. A `QuireError` means that nothing happened."""
        with self.lock:
            state = self._processor.open(prompt, params, **keywords)
            try:
                accepted = self._engine.submit(state.request)
            except BaseException:
                self._processor.drop(state)
                raise
            self._processor.accept(accepted)
            return state

    def abort(self, state: RequestState) -> None:
        """Give up a request; what it has so far stays readable."""
        with self.lock:
            self._engine.abort(state.number)
            self._processor.drop(state)

    def step(self) -> list[Delta]:
        """One step of the engine; the deltas of streamed and of finished requests."""
        with self.lock:
            output = self._engine.step()
            if output is None:
                return []
            processed = self._processor.process(output)
            for number, index in processed.stops:
                self._engine.stop(number, index)
            return processed.deltas

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its ids."""
        return self._processor.encode(prompt)

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def now(self) -> float:
        """The clock that metrics are read on, in seconds."""
        return self._processor.now()


class PendingOutputs:
    """Counts unfinished requests."""

    def __init__(self, states: Iterable[RequestState]) -> None:
        self._pending = {state.request_id: state for state in states}
        self.num_tokens = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def ready(self) -> bool:
        return not self._pending

    @property
    def num_unread(self) -> int:
        return 0  # read at once

    def put(self, delta: Delta) -> None:
        """A delta of one of the requests, from the thread that stepped the engine."""
        self.num_tokens += len(delta.token_ids)
        state = self._pending.get(delta.request_id)  # of several sequences, the first delta may have ended all
        if state is not None and state.finished:
            del self._pending[delta.request_id]


class DeltaStream(Iterator[Delta]):
    """The deltas of a request, in order. Closing or dropping it aborts the request, as does the end of a `with`."""

    def __init__(
        self,
        client: LocalClient,
        state: RequestState,
        step: Callable[["DeltaStream"], None],
        abandoned: deque[RequestState],
    ) -> None:
        self._client = client
        self._request_state = state
        self._step = step  # must `put` its output for this request, until it is served
        self._abandoned = abandoned  # requests that the next step must abort
        self._unread: deque[Delta] = deque()

    def __enter__(self) -> "DeltaStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, delta: Delta) -> None:
        self._unread.append(delta)

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    @property
    def ready(self) -> bool:
        """Whether there is something to read, or nothing more will come."""
        return bool(self._unread) or self._request_state.finished

    def __next__(self) -> Delta:
        try:
            while not self.ready:
                self._step(self)
        except BaseException:
            self.close()
            raise
        if not self._unread:
            raise StopIteration
        return self._unread.popleft()

    def close(self) -> None:
        self._unread.clear()
        if not self._request_state.finished:
            self._client.abort(self._request_state)

    def __del__(self) -> None:
        # Garbage is collected anywhere, also in the middle of a step: only enqueue the abort.
        self._abandoned.append(self._request_state)


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Hold interrupts back, and pass them on afterwards, or when the function is called that this gives: between two
    steps of a loop. Only the main thread is ever interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    held: deque[tuple[int, FrameType | None]] = deque(maxlen=1)

    def pass_on() -> None:
        if held and callable(handler):
            handler(*held.pop())

    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield pass_on
        return
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield pass_on
    finally:
        signal.signal(signal.SIGINT, handler)
    pass_on()


_num_built = 0  # engines of this process and of those it was forked from
_was_forked = False  # from a process that had built an engine, since this process built one


def _note_fork() -> None:
    global _was_forked
    _was_forked = _num_built > 0


os.register_at_fork(after_in_child=_note_fork)


def check_not_forked() -> None:
    """Continuing would hang or crash: torch's threads do not exist after fork()."""
    if _was_forked:
        raise EngineFailed(
            "This process was forked from one that had loaded a model, and cannot compute. Start it another way, as "
            'multiprocessing.get_context("spawn") does, or load models only in the forked processes.'
        )


def note_engine_process() -> None:
    global _num_built, _was_forked
    _num_built, _was_forked = _num_built + 1, False
