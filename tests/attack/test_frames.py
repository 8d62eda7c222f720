"""Mutated frames between front and engine: no code is run, nothing else is raised, and other requests are served."""

import pickle
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.core.step_output import FinishedSequence, FirstToken, StepOutput
from quire.engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    Heartbeat,
    Query,
    QueryReply,
    RequestOptions,
    StopSequence,
)
from quire.engine.wire import BrokenFrame, FrameDecoder, Message, pack, read_for_engine, read_for_front, request_number
from quire.sim.runners import ToyRunner
from tests.attack.advisories import Bomb
from tests.chaos.conftest import Report
from tests.engine.test_engine_server import VOCAB, Wire, add_request, make_engine, serving, toy

NUM_FRAMES = 100_000
NUM_SENT = 10_000  # of them over a socket to an engine that works

TO_ENGINE: list[Message] = [
    AddRequest(5, [1, 2, 49_151], SamplingParams(n=3, stop=["a"], logit_bias={7: -1.5}, seed=2**62), ((1, 2),)),
    AddRequest(6, [3] * 40, SamplingParams(temperature=0.5), options=RequestOptions(tenant="t", timeout_s=1.5)),
    AbortRequest(5), StopSequence(5, 0), Query(1, "explain", 5),
]  # fmt: skip
TO_FRONT: list[Message] = [
    StepOutput(
        3, np.array([1, 2], np.int64), np.array([7, 8], np.int32), (FirstToken(1, 0.5, 0),),
        (FinishedSequence(1, 0, FinishReason.LENGTH, np.array([7], np.int32), None, 0, False),),
    ),
    Accepted(5, 0, 1), Heartbeat(1.0, 2.0), QueryReply(1, b"{}"),
]  # fmt: skip


def bombs(canary: Path) -> list[bytes]:
    """A pickle as a frame, as a message of each tag, and as an extension type of msgpack, as others unwrap it."""
    code = pickle.dumps(Bomb(str(canary)))
    wrapped = [msgspec.msgpack.encode(msgspec.msgpack.Ext(kind, code)) for kind in (0, 1, 2, 42, 127)]
    tagged = [bytes([tag]) + body for tag in range(16) for body in (code, msgspec.msgpack.encode(code), *wrapped)]
    return [code, *wrapped, *tagged]


class Mutator:
    """Good frames with bytes changed, cut, doubled, exchanged, or with lengths of msgpack that are too large."""

    def __init__(self, messages: list[Message], canary: Path, seed: int) -> None:
        self._chance = random.Random(seed)
        self._good = [next(iter(FrameDecoder().feed(pack(message)))) for message in messages]
        self._bombs = bombs(canary)

    def frame(self) -> bytes:
        chance = self._chance
        if chance.random() < 0.02:
            return chance.choice(self._bombs)
        frame = bytearray(chance.choice(self._good))
        for _ in range(chance.randrange(1, 5)):
            place = chance.randrange(len(frame) + 1)
            match chance.randrange(6):
                case 0:
                    frame[place : place + 1] = bytes([chance.randrange(256)])
                case 1:
                    del frame[place : place + chance.randrange(1, 9)]
                case 2:
                    frame[place:place] = frame[place : place + chance.randrange(1, 64)]
                case 3:
                    other = chance.choice(self._good)
                    frame[place:] = other[chance.randrange(len(other)) :]
                case 4:  # an array, a map, a text or bytes of 4 GiB
                    frame[place : place + 5] = bytes([chance.choice((0xDD, 0xDF, 0xDB, 0xC6))]) + b"\xff" * 4
                case 5:
                    frame[place : place + 9] = b"\xcb" + struct.pack(">d", chance.choice((np.nan, np.inf, 1e308)))
        return bytes(frame)


@pytest.fixture
def executed() -> Iterator[list[str]]:
    """What was unpickled or run meanwhile, by Python's own audit events."""
    seen: list[str] = []
    watching = [True]

    def hook(event: str, _: object) -> None:
        if watching and event in ("pickle.find_class", "marshal.loads", "os.system", "subprocess.Popen"):
            seen.append(event)

    sys.addaudithook(hook)  # cannot be removed
    yield seen
    watching.clear()


def test_mutated_frames_are_decoded_or_refused(tmp_path: Path, executed: list[str], report: Report) -> None:
    canary = tmp_path / "canary"
    outcomes: Counter[str] = Counter()
    for read, messages in ((read_for_engine, TO_ENGINE), (read_for_front, TO_FRONT)):
        mutator = Mutator(messages, canary, seed=20)
        for _ in range(NUM_FRAMES // 2):
            frame = mutator.frame()
            try:
                request_number(frame)
                read(frame)
                outcomes["decoded"] += 1
            except BrokenFrame:
                outcomes["broken"] += 1
            except QuireError:
                outcomes["out of bounds"] += 1
    report(f"{NUM_FRAMES:,} mutated frames, both directions", dict(outcomes))
    report("  executed or unpickled", len(executed) + canary.exists())
    assert not executed and not canary.exists()
    assert min(outcomes.values()) > NUM_FRAMES // 1000, "the mutations reach each outcome"


def test_an_engine_serves_between_mutated_frames(tmp_path: Path, executed: list[str], report: Report) -> None:
    canary = tmp_path / "canary"
    mutator = Mutator(TO_ENGINE, canary, seed=21)
    engine = make_engine(ToyRunner(VOCAB), lambda: 0.0)
    served = 0
    with serving(engine) as wire:
        for number in range(NUM_SENT // 100):
            send_frames(wire, [frame for _ in range(100) if not adds_request(frame := mutator.frame())])
            wire.send(add_request(10**9 + number, [1, 2]))
            accepted = next_accepted(wire, 10**9 + number)
            assert wire.completion(accepted)[0] == toy([1, 2], 4)
            served += 1
    report(f"{NUM_SENT:,} frames to an engine: requests between them, all served", served)
    assert not executed and not canary.exists()


def adds_request(frame: bytes) -> bool:
    """A mutated request that is a request: it may run for long, and is no matter of frames."""
    try:
        return isinstance(read_for_engine(frame), AddRequest)
    except (BrokenFrame, QuireError):
        return False


def send_frames(wire: Wire, frames: list[bytes]) -> None:
    end: socket.socket = wire._end
    end.sendall(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))


def next_accepted(wire: Wire, number: int) -> int:
    while (accepted := wire.next(Accepted)).number != number:  # type: ignore[union-attr]
        pass
    return accepted.first_sequence  # type: ignore[union-attr,no-any-return]
