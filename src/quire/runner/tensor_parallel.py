"""Tensor parallelism: one plan, followed by every rank. Rank 0 is in the engine's process, the others follow it.

A frame to the other ranks is a plan, the masks of a step that waits for them (`core/plan_codec.py`), or a CUDA graph
to capture: rank 0 decides which and when. Each answers a step with its number and a checksum of what it sampled.
Every rank applies the plan to its own row table, computes its heads and columns, and samples all rows: a token is a
function of its logits and its position, and all ranks have the same logits. So nothing is broadcast behind a step,
and rows go on decoding where their state is. A rank that sampled something else, or another step, is found by its
answer, before the tokens leave the engine.
"""

import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Protocol

import numpy as np

from quire.core.errors import RankFailed
from quire.core.ids import IntArray, Row
from quire.core.plan_codec import decode_masks, decode_plan, encode_masks, encode_plan
from quire.core.step import FinishReason, Masks, Pending, Runner, StepPlan, StepResult
from quire.core.worker_process import FrameReader, frame_of, send_bytes
from quire.runner.graph_shapes import StepSize

PLAN, MASKS, CAPTURE = b"P", b"M", b"C"  # the first byte of a frame
_ANSWER = Struct("<QI")  # step, checksum
_SHAPE = Struct(f"<{len(StepSize._fields)}I")
_REASONS = {reason: place for place, reason in enumerate(FinishReason)}


def checksum(result: StepResult) -> int:
    """Of the rows and tokens of a step, and of the rows that ended."""
    number = 0
    for part in (result.rows, result.tokens):
        number = zlib.crc32(np.ascontiguousarray(part, np.int32).data, number)
    if result.ended:
        ended = np.array([(over.row, _REASONS[over.reason]) for over in result.ended], dtype=np.int32)
        number = zlib.crc32(ended.data, number)
    return number


def summary(result: StepResult) -> bytes:
    """What a rank answers that samples as others do."""
    return _ANSWER.pack(result.step, checksum(result))


class Followers:
    """The connections of rank 0 to some other ranks, by their number. A failure of any of them is the end of all."""

    def __init__(self, connections: Mapping[int, socket.socket], why_lost: Callable[[], str | None]) -> None:
        """`why_lost`: what is known about a rank that ended; may wait a moment for it."""
        self.connections = connections
        self.why_lost = why_lost
        self._readers = {rank: FrameReader(connection) for rank, connection in connections.items()}

    def send(self, data: bytes) -> None:
        frame = frame_of(data)
        try:
            for follower in self.connections.values():
                follower.sendall(frame)
        except OSError as error:
            raise self.unreachable(error) from error

    def unreachable(self, error: OSError) -> RankFailed:
        return RankFailed(self.why_lost() or f"A rank cannot be reached: {error}.")

    def check_answers(self, result: StepResult) -> None:
        """Each must have sampled the same tokens in the same step."""
        expected = summary(result)
        for rank, follower in self._readers.items():
            answer = follower.receive()
            if answer == expected:
                continue
            while answer is not None and len(answer) == _ANSWER.size and _ANSWER.unpack(answer)[0] < result.step:
                answer = follower.receive()  # that was of a step whose result was not wanted any more
            if answer != expected:
                raise self._failure(rank, answer, result.step)

    def failed_here(self, error: Exception) -> RankFailed:
        """Rank 0 raised this: the other ranks wait inside a collective that it has left, or the other way round."""
        return RankFailed(self.why_lost() or f"Rank 0 failed: {type(error).__name__}: {error}")

    def _failure(self, rank: int, answer: bytes | None, step: int) -> RankFailed:
        if answer is None or len(answer) != _ANSWER.size:
            return self.failed(rank, answer, step)
        found, _ = _ANSWER.unpack(answer)
        if found != step:
            return RankFailed(f"Rank {rank} computed step {found}, and step {step} was due.")
        return RankFailed(f"Rank {rank} sampled other tokens than rank 0 in step {step}: they hold different logits.")

    def failed(self, rank: int, error: bytes | None, step: int) -> RankFailed:
        """`error`: what it sent instead of an answer; None: it closed the connection."""
        if error is None:
            return RankFailed(self.why_lost() or f"Rank {rank} ended in step {step}.")
        return RankFailed(f"Rank {rank} failed in step {step}: {error.decode('utf-8', 'replace')}")


class RankCapture(Protocol):
    """A rank that captures CUDA graphs. All capture the same shapes in the same order, between the same steps."""

    @property
    def next_missing(self) -> StepSize | None:
        """The shape to capture when there is time."""

    def take_wanted(self) -> StepSize | None:
        """The shape to capture before the next step."""

    def capture(self, shape: StepSize | None) -> None:
        """This shape, and what belongs to those that are captured."""


class TensorParallelRunner:
    """The runner of rank 0, and the ranks that follow it. A failure of any of them is the end of all."""

    def __init__(
        self,
        local: Runner,
        followers: Sequence[socket.socket],
        why_lost: Callable[[], str | None],
        capturing: RankCapture | None = None,
    ) -> None:
        """`why_lost`: what is known about a rank that ended; may wait a moment for it. `capturing`: the same runner, if
        the ranks capture CUDA graphs."""
        self._local = local
        self._others = Followers(dict(enumerate(followers, 1)), why_lost)
        self._capturing = capturing

    def prepare(self) -> None:
        """Capture one more shape on all ranks. Call between steps."""
        if self._capturing is not None:
            self._capture(self._capturing, self._capturing.take_wanted() or self._capturing.next_missing)

    def _capture(self, capturing: RankCapture, shape: StepSize | None) -> None:
        self._others.send(CAPTURE + (b"" if shape is None else _SHAPE.pack(*shape)))
        try:
            capturing.capture(shape)
        except Exception as error:
            raise self._others.failed_here(error) from error

    def launch(self, plan: StepPlan) -> "PendingRanks":
        if self._capturing is not None and (wanted := self._capturing.take_wanted()) is not None:
            self._capture(self._capturing, wanted)
        self._others.send(PLAN + encode_plan(plan))
        try:
            return PendingRanks(self, self._local.launch(plan))
        except Exception as error:
            raise self._others.failed_here(error) from error

    def sample(self, pending: Pending, masks: Masks) -> None:
        self._others.send(MASKS + encode_masks(masks))
        try:
            pending.sample(masks)
        except Exception as error:
            raise self._others.failed_here(error) from error

    def wait(self, pending: Pending) -> StepResult:
        try:
            result = pending.wait()
        except Exception as error:
            raise self._others.failed_here(error) from error
        self._others.check_answers(result)
        return result


@dataclass(frozen=True, slots=True)
class PendingRanks:
    """A step that all ranks compute."""

    runner: TensorParallelRunner
    local: Pending

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.local.drafted

    def sample(self, masks: Masks) -> None:
        self.runner.sample(self.local, masks)

    def wait(self) -> StepResult:
        return self.runner.wait(self.local)


class _Answers:
    """Sends what a rank answers: when a step is launched, or from a thread, so that the next one is launched while the
    device computes this one."""

    def __init__(self, leader: socket.socket, answer: Callable[[StepResult], bytes], *, run_ahead: bool) -> None:
        self._leader, self._answer = leader, answer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-answers") if run_ahead else None
        self._failure: Exception | None = None

    def add(self, pending: Pending) -> None:
        if self._thread is None:
            send_bytes(self._leader, self._answer(pending.wait()))
        else:
            self._thread.submit(self._send, pending)

    def _send(self, pending: Pending) -> None:
        try:
            send_bytes(self._leader, self._answer(pending.wait()))
        except Exception as error:
            self._failure = self._failure or error
            self._leader.shutdown(socket.SHUT_RD)  # no further step is launched

    def close(self) -> None:
        """Raises what the thread has found."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._failure is not None:
            raise self._failure


def follow(
    runner: Runner,
    leader: socket.socket,
    answer: Callable[[StepResult], bytes] = summary,
    capturing: RankCapture | None = None,
    *,
    run_ahead: bool = False,
) -> None:
    """Compute the steps that rank 0 sends, until it closes the connection. Sends the error of a step that failed, and
    raises it. `run_ahead`: a step is launched before those in flight have ended."""
    pending, answers = None, _Answers(leader, answer, run_ahead=run_ahead)
    plans = FrameReader(leader)
    try:
        while (frame := plans.receive()) is not None:
            kind, data = frame[:1], frame[1:]
            if kind == CAPTURE:
                assert capturing is not None, "rank 0 captures, and this one does not"
                capturing.capture(StepSize._make(_SHAPE.unpack(data)) if data else None)
                continue
            if kind == PLAN:
                plan = decode_plan(data)
                pending = runner.launch(plan)
                if plan.masked:
                    continue
            else:
                assert kind == MASKS and pending is not None, f"a frame of kind {kind!r} before any step"
                pending.sample(decode_masks(data))
            answers.add(pending)
        answers.close()
    except Exception as error:
        with suppress(OSError):  # rank 0 may have ended
            send_bytes(leader, f"{type(error).__name__}: {error}".encode())
        raise
