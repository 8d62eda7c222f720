"""The engine's end of the wire, over a real socket: requests in, outputs out; a bad request affects no other."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import SimpleNamespace
from typing import cast

import pytest

from quire.config import EngineConfig
from quire.core.errors import InvalidGrammar, UnsupportedModel
from quire.core.sampling import Grammar, GrammarKind, SamplingParams
from quire.core.step import FinishReason, StepPlan
from quire.core.step_output import StepOutput
from quire.engine import engine_server
from quire.engine.engine import Engine
from quire.engine.engine_server import EngineServer
from quire.engine.grammar_masks import GrammarMasks
from quire.engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    Heartbeat,
    Query,
    QueryReply,
    Refused,
    RequestOptions,
    StartEngine,
    StopSequence,
)
from quire.engine.open_model import OpenedModel
from quire.engine.prefix_transfer import ImportDone, PrefixImports
from quire.engine.request_validator import RequestValidator
from quire.engine.stats import EngineStats
from quire.engine.wire import FrameDecoder, Message, ToFront, pack, read_for_front
from quire.grammar.compiler import CompiledGrammar, GrammarCompiler
from quire.kv.manager import KVManager
from quire.sched.cost_model import Constants, CostTable
from quire.sched.loop import Progress
from quire.sched.scheduler import Scheduler
from quire.sim.runners import SimStep, ToyRunner

VOCAB = 50


class Wire:
    """The front process's end, read frame by frame."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unpacker = FrameDecoder()
        self._read: list[ToFront] = []

    def send(self, *messages: Message) -> None:
        self._end.sendall(b"".join(map(pack, messages)))

    def next(self, kind: type) -> ToFront:
        """The next message of a kind; others before it are skipped."""
        while True:
            while self._read:
                said = self._read.pop(0)
                if isinstance(said, kind):
                    return said
            data = self._end.recv(1 << 16)
            assert data, f"the station ended before it said {kind.__name__}"
            self._read += [read_for_front(frame) for frame in self._unpacker.feed(data)]

    def completion(self, first_sequence: int) -> tuple[list[int], FinishReason]:
        tokens: list[int] = []
        while True:
            progress = self.next(StepOutput)
            pairs = zip(progress.sequences.tolist(), progress.tokens.tolist(), strict=True)
            tokens += [token for sequence, token in pairs if sequence == first_sequence]
            for over in progress.finished:
                if over.sequence == first_sequence:
                    assert over.tokens.tolist() == tokens
                    return tokens, over.reason


class SteppedRunner(ToyRunner):
    """Each step waits until the test lets it continue."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def launch(self, plan: StepPlan) -> SimStep:
        self.begun.release()
        assert self.allowed.acquire(timeout=30)
        return super().launch(plan)


def make_engine(runner: ToyRunner, clock: Callable[[], float], cost: CostTable | None = None) -> Engine:
    door = RequestValidator(vocab_size=VOCAB, end_ids=(), max_length=10_000, max_rows=4, num_blocks=2000, block_size=4)
    scheduler = Scheduler(KVManager(2000, 4, 4), max_rows=4, max_step_tokens=64, cost=cost)
    return Engine(scheduler, runner, door, depth=0, seed=0, clock=clock)


@contextmanager
def serving(engine: Engine) -> Iterator[Wire]:
    ours, theirs = socket.socketpair()
    ticks = iter(range(10**9))
    thread = threading.Thread(target=EngineServer(engine, theirs, lambda: float(next(ticks))).run)
    thread.start()
    with ours, theirs:
        ours.settimeout(30)
        yield Wire(ours)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def wire() -> Iterator[Wire]:
    with serving(make_engine(ToyRunner(VOCAB), lambda: 0.0)) as wire:
        yield wire


def add_request(number: int, prompt: list[int], **params: object) -> Message:
    return AddRequest(number, prompt, SamplingParams(**{"max_tokens": 4, **params}))  # type: ignore[arg-type]


def toy(prompt: list[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(sum(known) % VOCAB)
    return known[len(prompt) :]


def test_a_request_is_accepted_computed_and_finished(wire):
    wire.send(add_request(7, [1, 2]))
    accepted = wire.next(Accepted)
    assert accepted.number == 7
    assert wire.completion(accepted.first_sequence) == (toy([1, 2], 4), FinishReason.LENGTH)


def test_the_loop_sends_heartbeats_with_stats(wire):
    stats = wire.next(EngineStats)
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 2000)
    wire.send(add_request(1, [3], max_tokens=3000))
    while (stats := wire.next(EngineStats)).num_running == 0:
        pass
    assert stats.num_running == 1 and stats.step >= 0


def wait_for(wire: Wire, beat: Heartbeat) -> None:
    until_s = monotonic() + 30
    while (heard := wire.next(Heartbeat)) != beat:
        assert monotonic() < until_s, heard


def test_heartbeats_say_how_long_a_step_takes_and_was_expected_to(monkeypatch):
    """They come while the step runs, from another thread."""
    monkeypatch.setattr(engine_server, "HEARTBEAT_S", 0.001)
    now_s, cost = [100.0], CostTable(Constants(40.0, 0.0, 0.0, 0.0, 0.0))
    runner = SteppedRunner()
    with serving(make_engine(runner, lambda: now_s[0], cost)) as wire:
        wire.send(add_request(1, [3], max_tokens=2))
        for _ in range(2):
            assert runner.begun.acquire(timeout=30)
            now_s[0] += 39.0
            wait_for(wire, Heartbeat(39.0, 40.0))
            runner.allowed.release()
        wait_for(wire, Heartbeat(0.0, 0.0))


class CopiesInParts(PrefixImports):
    """An import that takes five iterations of the loop."""

    def __init__(self) -> None:
        self.num_left = 5
        self.timeouts_s: list[float] = []  # of reads while there is something to copy

    @property
    def idle(self) -> bool:
        return self.num_left == 0

    def advance(self) -> ImportDone | None:
        if self.idle:
            return None
        self.num_left -= 1
        return ImportDone(7, 16, 4096) if self.idle else None


def test_an_engine_without_requests_does_not_wait_for_messages_while_it_copies_a_prefix(monkeypatch):
    """Each part would come half a second after the last, and the prompt would be computed sooner."""
    imports, select_ready = CopiesInParts(), engine_server.select.select

    def selected(reads, writes, errors, timeout_s):
        if not imports.idle:
            imports.timeouts_s.append(timeout_s)
        return select_ready(reads, writes, errors, timeout_s)

    monkeypatch.setattr(engine_server, "select", SimpleNamespace(select=selected))
    engine = make_engine(ToyRunner(VOCAB), monotonic)
    engine.imports = imports
    with serving(engine) as wire:
        assert wire.next(QueryReply).token == 7
    assert imports.timeouts_s == [0.0] * 5


def test_progress_changes_as_a_whole_when_a_step_ends():
    """Else a long step would look like a hang just after its end: its time, and nothing expected."""
    now_s, seen = [100.0], []

    class LongSteps(ToyRunner):
        def launch(self, plan: StepPlan) -> SimStep:
            seen.append(engine.progress)
            now_s[0] += 40.0
            return super().launch(plan)

    engine = make_engine(LongSteps(VOCAB), lambda: now_s[0], CostTable(Constants(40.0, 0.0, 0.0, 0.0, 0.0)))
    engine.submit(AddRequest(1, [3], SamplingParams(max_tokens=2)))
    while not engine.idle:
        engine.step()
        seen.append(engine.progress)
    assert seen == [Progress(100, 40), Progress(140), Progress(140, 40), Progress(180)]


def test_a_refused_and_an_undecodable_request_do_not_affect_others(wire):
    wire.send(add_request(1, [1, 2]), add_request(2, [VOCAB]), add_request(1, [5]))  # at once: the first is still here
    refused, duplicate = wire.next(Refused), wire.next(Refused)
    assert (refused.number, refused.error.status, refused.error.param) == (2, 400, "prompt")
    assert (duplicate.number, duplicate.error.code) == (1, "duplicate_request")
    wire._end.sendall((5).to_bytes(4, "big") + b"\xff\xff\xff\xff\xff")  # no message at all: dropped
    wire.send(StartEngine(EngineConfig(), None))  # a message that a running engine ignores
    wire.send(add_request(3, [2, 2]))
    assert wire.completion(wire.next(Accepted).first_sequence) == (toy([2, 2], 4), FinishReason.LENGTH)


def test_parameters_out_of_bounds_are_refused_by_number(wire):
    frame = bytearray(pack(add_request(9, [1], n=3)))
    place = frame.index(b"\xa1n\x03")
    frame[place + 2] = 0
    wire._end.sendall(bytes(frame))
    refused = wire.next(Refused)
    assert (refused.number, refused.error.param, refused.error.status) == (9, "n", 400)


def test_aborts_and_stops_end_requests_in_any_state(wire):
    wire.send(*(add_request(number, [number], max_tokens=1500) for number in range(6)))  # four rows: two wait
    for _ in range(6):
        wire.next(Accepted)
    wire.send(
        *(AbortRequest(number) for number in (0, 5, 5, 99)), StopSequence(1, 0), StopSequence(1, 0), StopSequence(77, 0)
    )
    wire.send(*(AbortRequest(number) for number in (2, 3, 4)))
    wire.send(Query(3, "drain"))
    assert wire.next(QueryReply).token == 3
    while (stats := wire.next(EngineStats)).num_running or stats.num_waiting:
        pass
    assert stats.num_free_blocks + stats.num_evictable_blocks == 2000
    wire.send(add_request(8, [1]))
    assert wire.next(Refused).error.code == "draining"


def test_explain_over_the_wire(wire):
    wire.send(add_request(4, [1, 2]))
    wire.completion(wire.next(Accepted).first_sequence)
    wire.send(Query(1, "explain", 4), Query(2, "explain", 5), Query(3, "no such thing"))
    told, unknown, nonsense = (wire.next(QueryReply) for _ in range(3))
    assert b"arrived with 2 tokens" in told.body
    assert b"problem" in unknown.body and b"unknown" in unknown.body
    assert b"problem" in nonsense.body


class HeldGrammars(GrammarMasks):
    """Each grammar is compiled when the test lets it, and refused."""

    def __init__(self) -> None:
        super().__init__(cast(OpenedModel, None), VOCAB)  # no vocabulary is read
        self.begun: list[str] = []
        self.allowed = threading.Semaphore(0)

    def prepare(self, grammar: Grammar) -> CompiledGrammar:
        self.begun.append(grammar.text)
        assert self.allowed.acquire(timeout=30)
        raise InvalidGrammar("It is refused.")


def test_clients_take_turns_with_their_grammars_and_those_of_aborted_requests_are_not_compiled():
    grammars = HeldGrammars()
    engine = make_engine(ToyRunner(VOCAB), lambda: 0.0)
    engine.grammars = grammars

    def constrained(number: int, client: str) -> Message:
        params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, f"{client} {number}"))
        return AddRequest(number, [1], params, options=RequestOptions(client=client))

    with serving(engine) as wire:
        wire.send(*[constrained(number, "hostile") for number in range(50)], constrained(50, "other"))
        wire.send(*map(AbortRequest, range(40)), add_request(51, [1, 2]))  # the first is being compiled
        assert wire.next(Accepted).number == 51, "requests without a grammar do not wait"
        grammars.allowed.release(50)
        refused = [wire.next(Refused).number for _ in range(11)]
    assert refused == [40, 50, *range(41, 50)]
    assert grammars.begun == ["hostile 0", *(f"{'other' if each == 50 else 'hostile'} {each}" for each in refused)]


class CountedVocabulary(HeldGrammars):
    """Notes when it is read, and that it cannot be."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events
        self.read = threading.Event()

    def load_vocabulary(self) -> GrammarCompiler:
        self._events.append("vocabulary")
        self.read.set()
        raise UnsupportedModel("This tokenizer does not define the bytes of its tokens.")


class NotedSteps(ToyRunner):
    """Notes each step."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(VOCAB)
        self._events = events

    def launch(self, plan: StepPlan) -> SimStep:
        self._events.append("step")
        return super().launch(plan)


def test_the_vocabulary_is_read_once_when_no_message_has_come_for_half_a_second(monkeypatch):
    events: list[str] = []
    engine = make_engine(NotedSteps(events), lambda: 0.0)
    waiting, waits = threading.Semaphore(0), threading.Semaphore(0)
    engine.grammars = vocabulary = CountedVocabulary(events)
    select_ready = engine_server.select.select

    def selected(reads, writes, errors, timeout_s):
        """An idle engine waits until the test lets it continue; then its half second is over."""
        assert timeout_s in (0.0, engine_server.HEARTBEAT_S)
        if timeout_s:
            waiting.release()
            assert waits.acquire(timeout=30)
        return select_ready(reads, writes, errors, 0)

    monkeypatch.setattr(engine_server, "select", SimpleNamespace(select=selected))
    with serving(engine) as wire:
        wire.send(Query(5, "nonsense"))  # a message after which the engine is idle, too
        waits.release()
        wire.next(QueryReply)
        assert waiting.acquire(timeout=30) and waiting.acquire(timeout=30), "it waits again"
        wire.send(add_request(7, [1, 2]))
        waits.release()
        wire.completion(wire.next(Accepted).first_sequence)
        waits.release()
        assert vocabulary.read.wait(30)
        wire.send(add_request(8, [1, 2]))  # a failure ends nothing, and it is not tried again
        waits.release(1000)
        wire.completion(wire.next(Accepted).first_sequence)
    assert events.count("vocabulary") == 1
    assert events.index("vocabulary") == 4, "after the four steps of the first request"
