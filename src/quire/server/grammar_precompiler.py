"""Compiles the grammar of a request before the request is queued, in a process that can be killed.

An accepted grammar is compiled again by the engine; one that takes too much time or memory never reaches it. Clients
take turns: one that sends costly grammars delays its own.
"""

import asyncio
import hashlib
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.core.errors import InvalidGrammar, InvalidParameter, QuireError
from quire.core.sampling import Grammar
from quire.core.worker_process import WorkerProcess, receive_frame, send_frame
from quire.grammar import limits
from quire.grammar.compile_worker import compile_message, error_of, start_message
from quire.server.http.request_context import CURRENT_CONTEXT
from quire.text.tokenizer import Tokenizer

_NUM_JOBS = 2  # at once, of different clients
_MAX_ACCEPTED = 4096  # grammars whose digests are kept
_START_S = 60.0  # a vocabulary is read in about a second
_CHILD_S = 10.0  # to fork takes milliseconds
_GRACE_S = 1.0  # beyond the limit of wall time, which the kernel enforces


class CompilersBusy(QuireError):
    """No process was free to compile a grammar: the cause is load, not the grammar."""

    status = 503
    code = "compilers_busy"
    retry_after_s = 2.0


class FairSlots:
    """At most `num_slots` holders at a time and `num_per_name` of each name. Names that wait take turns. For one event
    loop."""

    def __init__(self, num_slots: int, num_per_name: int = 1) -> None:
        self._num_free = num_slots
        self._num_per_name = num_per_name
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, name: str) -> None:
        """Wait for a slot; `release` it."""
        if not self._waiting and self._has_room(name):
            self._grant(name)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(waiter)
        self._wake()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(name)  # granted and cancelled at once
            self._wake()
            raise

    def num_waiting(self, name: str) -> int:
        """At most: some may have been cancelled."""
        return len(self._waiting.get(name, ()))

    def release(self, name: str) -> None:
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]
        self._num_free += 1
        self._wake()

    def _has_room(self, name: str) -> bool:
        return self._num_free > 0 and self._held[name] < self._num_per_name

    def _grant(self, name: str) -> None:
        self._held[name] += 1
        self._num_free -= 1

    def _wake(self) -> None:
        """Grant free slots to the names that have waited longest since their last one."""
        for name in list(self._waiting):
            waiters = self._waiting[name]
            while waiters and waiters[0].done():  # cancelled
                waiters.popleft()
            if waiters and self._has_room(name):
                self._grant(name)
                waiters.popleft().set_result(None)
                self._waiting.move_to_end(name)
            if not waiters:
                del self._waiting[name]


class CompileWorker:
    """The process that compiles, started when it is first needed and again if it died. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, end_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None

    def start(self) -> WorkerProcess:
        """The running process, with its vocabulary read."""
        with self._lock:
            if self._process is not None and self._process.exit_status() is None:
                return self._process
            if self._tokenizer is None:
                raise InvalidParameter("This model has no tokenizer, so its output cannot be constrained.")
            process = WorkerProcess("quire.grammar.compile_worker")
            process.socket.settimeout(_START_S)
            try:
                send_frame(process.socket, start_message(self._tokenizer, self._end_ids, self._vocab_size))
                reply: Any = receive_frame(process.socket)
            except OSError:
                reply = None
            if reply is None or "error" in reply:
                status = process.close()
                raise error_of(reply or {}) or CompilersBusy(f"The grammar compiler did not start (status {status}).")
            self._process = process
            return process

    def compile(self, grammar: Grammar) -> None:
        """Compile in a new child. Raises InvalidGrammar, also if the child was killed for its CPU time or memory."""
        for _ in range(2):
            process = self.start()
            child = self._child(process)
            if child is not None:
                break
            self._discard(process)  # the worker itself was killed: not the grammar's fault
        else:
            raise CompilersBusy("The grammar compiler was ended twice; try again.")
        begun_s = time.monotonic()
        with child:
            reply = _reply(child, grammar)
        if reply is None and time.monotonic() - begun_s >= limits.COMPILE_WALL_S:
            raise CompilersBusy(
                f"The {grammar.kind.value} was not compiled within {limits.COMPILE_WALL_S:g} s: this machine is busy."
            )
        if reply is None:
            raise InvalidGrammar(
                f"The {grammar.kind.value} is too large: compiling it took more than {limits.COMPILE_CPU_S:g} s of CPU "
                f"time, or {limits.COMPILE_BYTES >> 20} MiB. Make it simpler."
            )
        if error := error_of(reply):
            raise error

    @staticmethod
    def _child(process: WorkerProcess) -> socket.socket | None:
        """The connection to a new child that has begun; None if the worker could not start one."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_CHILD_S)
        try:
            with theirs:
                socket.send_fds(process.socket, [b"."], [theirs.fileno()])
            if receive_frame(ours) is not None:
                return ours
        except OSError:  # also a timeout
            pass
        ours.close()
        return None

    def _discard(self, process: WorkerProcess) -> None:
        with self._lock:
            if self._process is process:
                self._process = None
                process.close()

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()


def _reply(child: socket.socket, grammar: Grammar) -> dict[str, Any] | None:
    child.settimeout(max(limits.COMPILE_WALL_S, 0) + _GRACE_S)
    try:
        send_frame(child, compile_message(grammar))
        reply: Any = receive_frame(child)
    except OSError:
        return None
    return reply  # type: ignore[no-any-return]


class GrammarPrecompiler:
    """Refuses grammars that do not compile. `patience_s` bounds the wait for the grammars of other clients."""

    def __init__(self, worker: CompileWorker, *, patience_s: float = 5.0) -> None:
        self._worker = worker
        self._patience_s = patience_s
        self._slots = FairSlots(_NUM_JOBS)
        self._accepted: OrderedDict[bytes, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_JOBS, thread_name_prefix="grammar")

    def warm(self) -> None:
        """Start the worker. If that fails, the first request with a grammar gets the error."""
        self._threads.submit(self._worker.start)

    def close(self) -> None:
        self._worker.close()
        self._threads.shutdown(wait=False)

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raise if a grammar does not compile; `param` is the field of the request that has it."""
        digest = hashlib.sha256(f"{grammar.kind.value} {grammar.text}".encode("utf-8", "surrogatepass")).digest()
        if digest in self._accepted:
            self._accepted.move_to_end(digest)
            return
        try:
            await self._compile(grammar)
        except QuireError as error:
            error.param = error.param or param
            raise
        self._accepted[digest] = None
        if len(self._accepted) > _MAX_ACCEPTED:
            self._accepted.popitem(last=False)

    async def _compile(self, grammar: Grammar) -> None:
        context = CURRENT_CONTEXT.get()
        client = "" if context is None else context.client
        try:
            await asyncio.wait_for(self._slots.acquire(client), self._patience_s)
        except TimeoutError as error:
            raise CompilersBusy(
                f"The grammars of other requests were being compiled for {self._patience_s:g} s; try again."
            ) from error
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._worker.compile, grammar)
        compiling.add_done_callback(lambda _: self._slots.release(client))  # not before: the client may leave
        await asyncio.shield(compiling)
