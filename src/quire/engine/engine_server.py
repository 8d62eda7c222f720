"""The engine's end of the wire: reads orders, turns the engine, sends what each turn brought, and beats.

The loop itself says that it is alive: a beat is sent by the thread that turns the engine and by nobody else. Whatever
one order asks for can fail that order alone.
"""

import logging
import queue
import select
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from quire.core.errors import EngineFailed, QuireError, RequestFailed
from quire.core.fault_injection import FaultSite, trip
from quire.core.ids import RequestId
from quire.core.sampling import Grammar
from quire.core.step_output import StepOutput
from quire.engine.engine import Engine
from quire.engine.messages import AbortRequest, AddRequest, Query, QueryReply, Refused, StopSequence
from quire.engine.stats import stats_of
from quire.engine.wire import BrokenFrame, FrameDecoder, Message, as_json, pack, read_for_engine, request_number

if TYPE_CHECKING:
    from quire.grammar.compiler import CompiledGrammar

BEAT_S = 0.5  # between two beats, unless a step takes longer
_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class EngineServer:
    """Runs until the front hangs up."""

    def __init__(self, engine: Engine, wire: socket.socket, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._wire = wire
        self._clock = clock
        self._unpacker = FrameDecoder()
        self._beaten_s = -BEAT_S
        self._hung_up = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiling: set[int] = set()
        self._compiled: queue.SimpleQueue[tuple[AddRequest, Future[CompiledGrammar]]] = queue.SimpleQueue()
        self._bell, self._heard_bell = socket.socketpair()

    def run(self) -> None:
        """The whole life of an engine process."""
        while True:
            self._read()
            if self._hung_up:
                return
            if not self._engine.idle:
                self._turn()
            else:
                self._engine.prepare()
            self._beat()

    def _turn(self) -> None:
        progress = self._engine.turn()
        if progress is not None and not progress.empty:
            self._tell(progress)

    def _tell(self, progress: StepOutput) -> None:
        """What cannot be written fails its own request; the rest is told without it."""
        try:
            self._send(progress)
        except Exception as error:
            numbers = progress.numbers(self._engine.number_of)
            if len(numbers) == 1:
                (number,) = numbers
                _log.exception("what request %s said could not be sent", number)
                self._engine.abort(number)
                self._refuse(number, RequestFailed())
            elif numbers:
                for number in numbers:
                    self._tell(progress.only(number, self._engine.number_of))
            else:
                raise error

    def _beat(self) -> None:
        now_s = self._clock()
        if now_s - self._beaten_s >= BEAT_S:
            self._beaten_s = now_s
            self._send(stats_of(self._engine))

    def _read(self) -> None:
        """Every order that has come; with nothing to compute or prepare, wait for one until the next beat."""
        patience_s = BEAT_S if self._engine.idle and self._engine.prepared else 0.0
        while ready := select.select([self._wire, self._heard_bell], [], [], patience_s)[0]:
            patience_s = 0.0
            if self._heard_bell in ready:
                self._heard_bell.recv(_READ_BYTES)
                self._take_compiled()
            if self._wire not in ready:
                continue
            data = self._wire.recv(_READ_BYTES)
            if not data:
                self._hung_up = True
                return
            for frame in self._unpacker.feed(data):
                self._obey(frame)

    def _obey(self, frame: bytes) -> None:
        number = request_number(frame)
        try:
            if number is not None:
                trip(FaultSite.DECODE_FRAME, number)
            self._follow(read_for_engine(frame))
        except BrokenFrame as error:
            _log.error("a frame could not be read and was dropped: %.200s", error)
            self._refuse(number, EngineFailed("The engine could not read this request; the server's log says why."))
        except QuireError as error:
            self._refuse(number, error)
        except Exception:  # our mistake, but this request's alone: nothing has begun
            _log.exception("an order broke its own handling")
            self._refuse(number, EngineFailed("The engine could not take this request; the server's log says why."))

    def _follow(self, order: object) -> None:
        match order:
            case AddRequest() if order.params.grammar is not None:
                self._compile(order, order.params.grammar)
            case AddRequest():
                self._submit(order)
            case AbortRequest():
                self._compiling.discard(order.number)
                self._engine.abort(order.number)
            case StopSequence():
                self._engine.stop(order.number, order.continuation)
            case Query():
                self._send(QueryReply(order.token, self._answer(order)))
            case _:
                raise BrokenFrame(f"an engine at work has no use for {type(order).__name__}")

    def _submit(self, order: AddRequest) -> None:
        self._send(self._engine.submit(order))

    def _compile(self, order: AddRequest, grammar: Grammar) -> None:
        """A grammar may take long to compile: meanwhile the others go on, and the order waits at the door."""
        if self._engine.grammars is None:
            self._submit(order)  # which says why not
            return
        self._compiling.add(order.number)
        compiling = self._pool.submit(self._engine.grammars.prepare, grammar)
        compiling.add_done_callback(lambda done: self._compiled_now(order, done))

    def _compiled_now(self, order: AddRequest, done: "Future[CompiledGrammar]") -> None:
        """On the compiler's thread: the loop is woken, wherever it waits."""
        self._compiled.put((order, done))
        self._bell.send(b"!")

    def _take_compiled(self) -> None:
        while not self._compiled.empty():
            order, done = self._compiled.get()
            if order.number not in self._compiling:  # aborted meanwhile
                continue
            self._compiling.discard(order.number)
            try:
                done.result()
                self._submit(order)
            except QuireError as error:
                self._refuse(order.number, error)
            except Exception:
                _log.exception("a grammar broke its own compilation")
                self._refuse(order.number, EngineFailed("The grammar of this request could not be compiled."))

    def _answer(self, asked: Query) -> bytes:
        """A question's answer as JSON; what is wrong with the question is an answer too."""
        try:
            return as_json(self._answers(asked))
        except QuireError as error:
            problem = {"message": error.message, "status": error.status, "code": error.code, "param": error.param}
            return as_json({"problem": problem})

    def _answers(self, asked: Query) -> object:
        match asked.what:
            case "explain":
                explanation = self._engine.explain(RequestId(asked.number))
                return {"lines": explanation.lines(), "explanation": explanation}
            case "reset_prefix_cache":
                return {"freed_blocks": self._engine.scheduler.reset_cache()}
            case "drain":
                self._engine.scheduler.drain()
                return {}
        raise EngineFailed(f"The engine has no answer to {asked.what!r:.40}.")

    def _refuse(self, number: int | None, error: QuireError) -> None:
        if number is not None:
            self._send(Refused(number, error))

    def _send(self, message: Message) -> None:
        try:
            self._wire.sendall(pack(message))
        except OSError:
            self._hung_up = True
