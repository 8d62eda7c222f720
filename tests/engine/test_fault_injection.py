"""Faults injected at each site of the loop: the poisoned request fails alone, the others' outputs are unchanged."""

import socket
import threading
import time

import pytest

from quire.config import EngineConfig
from quire.core import fault_injection as faults
from quire.core.fault_injection import FaultSite, armed
from quire.core.sampling import Grammar, GrammarKind, SamplingParams
from quire.core.step_output import StepOutput
from quire.engine.engine import Engine
from quire.engine.engine_server import EngineServer
from quire.engine.grammar_masks import GrammarMasks
from quire.engine.messages import AbortRequest, Accepted, Refused
from quire.engine.open_model import open_model
from quire.engine.oracle_runner import TorchOracleRunner
from quire.engine.output_processor import OutputProcessor
from quire.engine.request_state import RequestState
from quire.engine.request_validator import RequestValidator
from quire.engine.stats import EngineStats
from quire.engine.wire import FrameDecoder, pack, read_for_front
from quire.kv.manager import KVManager
from quire.sched.audit import audit_rest
from quire.sched.scheduler import Scheduler
from tests.llm.tiny import tiny_llama, write_model

NUM_REQUESTS, POISONED = 6, 5  # the last: its sequence has the same number as its request
NUM_BLOCKS, BLOCK_SIZE, ROWS, LENGTH = 64, 4, 4, 96
LETTERS = Grammar(GrammarKind.REGEX, "[a-z ]{400}")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Of a few hundred tokens: with a real vocabulary, each world takes half a second to build and run."""
    return open_model(EngineConfig(model=str(write_model(tmp_path_factory.mktemp("tiny"), tiny_llama()))))


@pytest.fixture(scope="module")
def without_fault() -> dict[tuple[int, bool], dict[int, list[int] | str]]:
    """The outputs without a fault, by depth and grammar."""
    return {}


class EngineHarness:
    """An engine with its server, and an output processor at the other end of the socket."""

    def __init__(self, opened, depth: int, *, masked: bool) -> None:
        self.masked = masked
        vocab_size = opened.checkpoint.spec.vocab_size
        runner = TorchOracleRunner(
            vocab_size=vocab_size,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_host_blocks=0,
            max_rows=ROWS,
            max_length=LENGTH,
        )
        self.engine = Engine(
            Scheduler(KVManager(NUM_BLOCKS, BLOCK_SIZE, ROWS), max_rows=ROWS, max_step_tokens=16),
            runner,
            RequestValidator(vocab_size, (), LENGTH, ROWS, NUM_BLOCKS, BLOCK_SIZE),
            depth=depth,
            seed=0,
            clock=lambda: 0.0,
            grammars=GrammarMasks(opened, vocab_size) if masked else None,
        )
        if self.engine.grammars is not None:
            self.engine.grammars.load_vocabulary()
        self.front = OutputProcessor(opened.tokenizer, lambda: 0.0)

    def run(self) -> dict[int, list[int] | str]:
        """The tokens of each request, or its failure."""
        ours, theirs = socket.socketpair()
        ours.settimeout(60)
        thread = threading.Thread(target=EngineServer(self.engine, theirs, time.monotonic).run)
        with ours, theirs:
            states = [self._open(ours, number) for number in range(NUM_REQUESTS)]
            thread.start()
            outcomes = self._receive(ours, states)
            ours.shutdown(socket.SHUT_RDWR)
            thread.join(60)
        return outcomes

    def _open(self, wire: socket.socket, number: int) -> RequestState:
        params = SamplingParams(
            max_tokens=12,
            temperature=0.0,
            logprobs=1 if number % 2 == 0 else None,
            stop=["no such text"],
            presence_penalty=0.5 if number % 3 == 0 else 0.0,
            grammar=LETTERS if self.masked and number == POISONED else None,
        )
        state = self.front.open([10 * number + 1, 7, number + 3], params, streaming=True)
        wire.sendall(pack(state.request))
        return state

    def _receive(self, wire: socket.socket, states: list[RequestState]) -> dict[int, list[int] | str]:
        unpacker, outcomes = FrameDecoder(), {}
        while len(outcomes) < len(states):
            for frame in unpacker.feed(wire.recv(1 << 16)):
                match message := read_for_front(frame):
                    case Accepted():
                        self.front.accept(message)
                    case Refused():
                        outcomes[message.number] = message.error.code
                    case StepOutput():
                        processed = self.front.process(message)
                        for stop in processed.stops:
                            wire.sendall(pack(stop))
                        for delta in processed.deltas:
                            state = states[int(delta.request_id)]
                            if state.finished and state.number not in outcomes:
                                (sequence,) = state.output().outputs
                                failed = sequence.finish_reason in ("failed", "error")
                                outcomes[state.number] = sequence.finish_reason if failed else sequence.token_ids
                    case EngineStats():
                        pass
        for number, outcome in outcomes.items():
            if isinstance(outcome, str):
                wire.sendall(pack(AbortRequest(number)))
        return outcomes


@pytest.mark.parametrize("site", list(FaultSite), ids=lambda site: site.value)
@pytest.mark.parametrize("depth", [0, 1])
def test_poison_at_each_site_fails_one_request_alone(opened, without_fault, site, depth):
    masked = site in (FaultSite.GRAMMAR_MASK, FaultSite.GRAMMAR_ADVANCE)
    if (depth, masked) not in without_fault:
        without_fault[depth, masked] = EngineHarness(opened, depth, masked=masked).run()
    clean = without_fault[depth, masked]
    assert all(isinstance(outcome, list) and len(outcome) == 12 for outcome in clean.values()), clean
    harness = EngineHarness(opened, depth, masked=masked)
    with armed(site, POISONED):
        outcomes = harness.run()
    assert isinstance(outcomes[POISONED], str), outcomes[POISONED]
    assert {n: o for n, o in outcomes.items() if n != POISONED} == {n: o for n, o in clean.items() if n != POISONED}
    while not harness.engine.idle:
        harness.engine.step()
    audit_rest(harness.engine.scheduler)


def test_fault_injection_is_off_outside_tests():
    assert not faults._armed
    with pytest.raises(faults.InjectedFault), armed(FaultSite.ADD, 1):
        faults.trip(FaultSite.ADD, 1)
    faults.trip(FaultSite.ADD, 1)
