"""Engine server: the loop of the engine process. Reads messages, steps the engine, sends step outputs and statistics.

A second thread sends heartbeats, which do not wait for a step: each says how long the current iteration of the loop has
run, and how long the steps in flight were expected to take. A message can fail its own request only.

Reading the vocabulary for grammars blocks all threads, for 0.3 s to about a second. The first token does not need it:
it is read when no message has come for half a second, or for the first grammar.
"""

import logging
import queue
import select
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from quire.core.errors import EngineFailed, QuireError, RequestFailed
from quire.core.fault_injection import FaultSite, trip
from quire.core.ids import RequestId
from quire.core.request import BlockOwner
from quire.core.sampling import Grammar
from quire.core.step_output import StepOutput
from quire.engine.engine import Engine
from quire.engine.engine_view import EngineView
from quire.engine.messages import (
    AbortRequest,
    AddRequest,
    Heartbeat,
    ImportPrefix,
    ImportReply,
    LeasePrefix,
    LeaseReply,
    Query,
    QueryReply,
    Refused,
    ReleaseLease,
    StopSequence,
)
from quire.engine.prefix_transfer import TransferFailed, TransferFailure
from quire.engine.stats import stats_of
from quire.engine.wire import BrokenFrame, FrameDecoder, Message, as_json, pack, read_for_engine, request_number
from quire.kv.block_events import BlockEvent
from quire.sched.journal.recorder import JournaledScheduler
from quire.sched.prompt_split import prefill_costs

if TYPE_CHECKING:
    from quire.grammar.compiler import CompiledGrammar

HEARTBEAT_S = 0.5  # between two heartbeats; between two statistics, unless a step takes longer
_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class EventPublisher(Protocol):
    """Where events of the prefix cache go: `kv_event_publisher.py`, if they are asked for."""

    def publish(self, events: Sequence[BlockEvent]) -> None: ...

    def close(self) -> None: ...


class EngineServer:
    """Runs until the front process closes the connection."""

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        clock: Callable[[], float],
        publisher: EventPublisher | None = None,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._socket = connection
        self._clock = clock
        self._decoder = FrameDecoder()
        self._buffer = memoryview(bytearray(_READ_BYTES))  # for all messages, see `FrameConnection`
        self._stats_s = -HEARTBEAT_S
        self._costs_version = -1  # of those that were sent
        self._view = EngineView(engine, clock)
        self._ended = threading.Event()
        self._sending = threading.Lock()  # the loop and the heartbeats write to one socket
        self._closed = False
        self._vocabulary_due = True  # whether it may still have to be read
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._is_compiling = False  # one grammar at a time
        self._to_compile: OrderedDict[str, deque[AddRequest]] = OrderedDict()  # by client: they take turns
        self._compiling: set[int] = set()  # requests whose grammar is compiled, or waits for that
        self._compiled: queue.SimpleQueue[tuple[AddRequest, Future[CompiledGrammar]]] = queue.SimpleQueue()
        self._wakeup, self._woken = socket.socketpair()

    def run(self) -> None:
        """The main loop of the engine process."""
        beating = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        beating.start()
        try:
            while True:
                is_quiet = self._read()
                if self._closed:
                    return
                self._move_prefixes()
                if not self._engine.idle:
                    self._step()
                elif not self._is_copying:
                    self._engine.prepare()
                    if is_quiet:
                        self._read_vocabulary()
                if self._publisher is not None:
                    self._publish_events(self._publisher)
                self._send_stats()
                self._engine.note_progress()
        finally:
            self._ended.set()
            beating.join(HEARTBEAT_S)
            if self._publisher is not None:
                self._publisher.close()
            if isinstance(self._engine.scheduler, JournaledScheduler):
                self._engine.scheduler.journal.close()

    def _move_prefixes(self) -> None:
        """Between two steps: copy some blocks of another engine, and end leases whose time is over."""
        if self._engine.exports is not None:
            self._engine.exports.expire()
        done = None if self._engine.imports is None else self._engine.imports.advance()
        if done is not None:
            reply = ImportReply(done.num_tokens, done.num_bytes, done.failure, done.copy_s)
            self._send(QueryReply(done.token, as_json(reply)))

    @property
    def _is_copying(self) -> bool:
        return self._engine.imports is not None and not self._engine.imports.idle

    def _lease(self, message: LeasePrefix) -> None:
        reply = LeaseReply(failure=TransferFailure.NOT_CACHED)
        if self._engine.exports is not None:
            try:
                reply = LeaseReply(self._engine.exports.lease(message.partition, message.prompt))
            except TransferFailed as failed:
                reply = LeaseReply(failure=failed.reason)
        self._send(QueryReply(message.token, as_json(reply)))

    def _import(self, message: ImportPrefix) -> None:
        """The reply follows when all is copied."""
        owner = BlockOwner(RequestId(message.number), message.partition, message.priority)
        try:
            if self._engine.imports is None:
                raise TransferFailed(TransferFailure.LAYOUT)
            self._engine.imports.begin(message.token, owner, message.prompt, message.lease)
        except TransferFailed as failed:
            self._send(QueryReply(message.token, as_json(ImportReply(failure=failed.reason))))

    def _publish_events(self, publisher: EventPublisher) -> None:
        tree = self._engine.scheduler.kv.tree
        if tree is not None and tree.events is not None and (events := tree.events.take()):
            publisher.publish(events)

    def _send_heartbeats(self) -> None:
        """Kernels release the GIL, so no step delays a heartbeat."""
        while not self._ended.wait(HEARTBEAT_S):
            now_s = self._engine.clock()  # before the progress, which may change in between: never too long a time
            since_s, expected_s = self._engine.progress
            self._send(Heartbeat(max(now_s - since_s, 0.0), expected_s))

    def _step(self) -> None:
        started_s = self._clock()
        output = self._engine.step()
        self._view.note_step(started_s)
        if output is not None and not output.empty:
            self._send_output(output)

    def _send_output(self, output: StepOutput) -> None:
        """A request whose output cannot be encoded fails alone; the output of the others is sent without it."""
        try:
            self._send(output)
        except Exception as error:
            numbers = output.numbers(self._engine.number_of)
            if len(numbers) == 1:
                (number,) = numbers
                _log.exception("the output of request %s could not be sent", number)
                self._engine.abort(number)
                self._refuse(number, RequestFailed())
            elif numbers:
                for number in numbers:
                    self._send_output(output.only(number, self._engine.number_of))
            else:
                raise error

    def _send_stats(self) -> None:
        now_s = self._clock()
        if now_s - self._stats_s >= HEARTBEAT_S:
            self._stats_s = now_s
            self._send(stats_of(self._engine))
            if self._engine.exports is not None or self._engine.imports is not None:
                self._send_costs()

    def _send_costs(self) -> None:
        """What prompts take, whenever measured steps have changed it: the front decides where they are computed."""
        cost, kv = self._engine.scheduler.cost, self._engine.scheduler.kv
        if cost.version != self._costs_version:
            self._costs_version = cost.version
            self._send(prefill_costs(cost, kv.pool.num_blocks * kv.block_size))

    def _read(self) -> bool:
        """Handle every message that has arrived; when idle, wait for one until the next statistics. Whether none came
        in that time."""
        is_idle = self._engine.idle and self._engine.prepared and not self._is_copying
        timeout_s = HEARTBEAT_S if is_idle else 0.0
        while ready := select.select([self._socket, self._woken], [], [], timeout_s)[0]:
            timeout_s = 0.0
            if self._woken in ready:
                self._woken.recv_into(self._buffer)
                self._take_compiled()
            if self._socket not in ready:
                continue
            num_bytes = self._socket.recv_into(self._buffer)
            if not num_bytes:
                self._closed = True
                return False
            for frame in self._decoder.feed(self._buffer[:num_bytes]):
                self._handle(frame)
        return timeout_s > 0.0

    def _handle(self, frame: bytes) -> None:
        number = request_number(frame)
        try:
            if number is not None:
                trip(FaultSite.DECODE_FRAME, number)
            self._dispatch(read_for_engine(frame))
        except BrokenFrame as error:
            _log.error("a frame could not be read and was dropped: %.200s", error)
            self._refuse(number, EngineFailed("The engine could not read this request; see the server's log."))
        except QuireError as error:
            self._refuse(number, error)
        except Exception:  # internal error, of this request only: it was not queued
            _log.exception("a message could not be handled")
            self._refuse(number, EngineFailed("The engine could not handle this request; see the server's log."))

    def _dispatch(self, message: object) -> None:
        match message:
            case AddRequest() if message.params.grammar is not None:
                self._compile(message, message.params.grammar)
            case AddRequest():
                self._submit(message)
            case AbortRequest():
                self._compiling.discard(message.number)
                self._engine.abort(message.number)
            case StopSequence():
                self._engine.stop(message.number, message.continuation)
            case LeasePrefix():
                self._lease(message)
            case ReleaseLease():
                if self._engine.exports is not None:
                    self._engine.exports.release(message.slot, message.generation)
            case ImportPrefix():
                self._import(message)
            case Query():
                self._send(QueryReply(message.token, self._reply(message)))
            case _:
                raise BrokenFrame(f"unexpected message {type(message).__name__}")

    def _submit(self, message: AddRequest) -> None:
        self._send(self._engine.submit(message))

    def _compile(self, message: AddRequest, grammar: Grammar) -> None:
        """Compile a grammar on a thread: it may take long. The request is submitted afterwards; others continue."""
        if self._engine.grammars is None or self._engine.grammars.knows(grammar):
            self._submit(message)  # without grammars, it raises the reason
            return
        self._compiling.add(message.number)
        self._to_compile.setdefault(message.options.client, deque()).append(message)
        self._compile_next()

    def _compile_next(self) -> None:
        """One grammar of the client that waits longest; those of requests that were aborted are dropped."""
        while self._to_compile and not self._is_compiling:
            client, waiting = self._to_compile.popitem(last=False)
            message = waiting.popleft()
            if waiting:
                self._to_compile[client] = waiting
                self._to_compile.move_to_end(client, last=message.number in self._compiling)
            if message.number in self._compiling:
                self._is_compiling = True
                self._start_compiling(message)

    def _read_vocabulary(self) -> None:
        """Once, on the thread that compiles. If it fails, each request with a grammar is refused with the reason."""
        if self._vocabulary_due and self._engine.grammars is not None:
            self._vocabulary_due = False
            self._pool.submit(self._engine.grammars.load_vocabulary)

    def _start_compiling(self, message: AddRequest) -> None:
        assert self._engine.grammars is not None and message.params.grammar is not None
        compiling = self._pool.submit(self._engine.grammars.prepare, message.params.grammar)
        compiling.add_done_callback(lambda done: self._compiled_now(message, done))

    def _compiled_now(self, message: AddRequest, done: "Future[CompiledGrammar]") -> None:
        """Called on the compiler thread: wakes the loop."""
        self._compiled.put((message, done))
        self._wakeup.send(b"!")

    def _take_compiled(self) -> None:
        while not self._compiled.empty():
            message, done = self._compiled.get()
            self._is_compiling = False
            if message.number not in self._compiling:  # aborted meanwhile
                continue
            self._compiling.discard(message.number)
            try:
                done.result()
                self._submit(message)
            except QuireError as error:
                self._refuse(message.number, error)
            except Exception:
                _log.exception("compiling a grammar failed")
                self._refuse(message.number, EngineFailed("The grammar of this request could not be compiled."))
        self._compile_next()

    def _reply(self, query: Query) -> bytes:
        """The result of a query as JSON, or its error."""
        try:
            return as_json(self._query_result(query))
        except QuireError as error:
            problem = {"message": error.message, "status": error.status, "code": error.code, "param": error.param}
            return as_json({"problem": problem})

    def _query_result(self, query: Query) -> object:
        match query.what:
            case "explain":
                explanation = self._engine.explain(RequestId(query.number))
                return {"lines": explanation.lines(), "explanation": explanation}
            case "view":
                return self._view.describe(query.number)
            case "reset_prefix_cache":
                return {"freed_blocks": self._engine.scheduler.reset_cache()}
            case "drain":
                self._engine.scheduler.drain()
                return {}
        raise EngineFailed(f"The engine has no answer to {query.what!r:.40}.")

    def _refuse(self, number: int | None, error: QuireError) -> None:
        if number is not None:
            self._send(Refused(number, error))

    def _send(self, message: Message) -> None:
        """Thread-safe."""
        frame = pack(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError:
            self._closed = True
