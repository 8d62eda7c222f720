"""Tensor parallelism: one plan, followed by every rank. Rank 0 is in the engine's process, the others follow it.

A frame to the other ranks is a plan, or the masks of a step that waits for them (`core/plan_codec.py`); each answers a
step with its number and a checksum of what it sampled. Every rank applies the plan to its own row table, computes its
heads and columns, and samples all rows: a token is a function of its logits and its position, and all ranks have the
same logits. So nothing is broadcast behind a step, and rows go on decoding where their state is. A rank that sampled
something else, or another step, is found by its answer, before the tokens leave the engine.
"""

import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct

import numpy as np

from quire.core.errors import RankFailed
from quire.core.ids import IntArray, Row
from quire.core.plan_codec import decode_masks, decode_plan, encode_masks, encode_plan
from quire.core.step import FinishReason, Masks, Pending, Runner, StepPlan, StepResult
from quire.core.worker_process import receive_bytes, send_bytes

_PLAN, _MASKS = b"P", b"M"  # the first byte of a frame
_ANSWER = Struct("<QI")  # step, checksum
_REASONS = {reason: place for place, reason in enumerate(FinishReason)}


def checksum(result: StepResult) -> int:
    """Of the rows and tokens of a step, and of the rows that ended."""
    ended = np.array([(over.row, _REASONS[over.reason]) for over in result.ended], dtype=np.int32)
    number = 0
    for part in (result.rows, result.tokens, ended):
        number = zlib.crc32(np.ascontiguousarray(part, np.int32).tobytes(), number)
    return number


class TensorParallelRunner:
    """The runner of rank 0, and the ranks that follow it. A failure of any of them is the end of all."""

    def __init__(self, local: Runner, followers: Sequence[socket.socket], why_lost: Callable[[], str | None]) -> None:
        """`why_lost`: what is known about a rank that ended; may wait a moment for it."""
        self._local = local
        self._followers = followers
        self._why_lost = why_lost

    def launch(self, plan: StepPlan) -> "PendingRanks":
        self._send(_PLAN + encode_plan(plan))
        with self._failing():
            return PendingRanks(self, self._local.launch(plan), plan.step)

    def sample(self, pending: Pending, masks: Masks) -> None:
        self._send(_MASKS + encode_masks(masks))
        with self._failing():
            pending.sample(masks)

    def wait(self, pending: Pending, step: int) -> StepResult:
        with self._failing():
            result = pending.wait()
        expected = _ANSWER.pack(step, checksum(result))
        for rank, follower in enumerate(self._followers, 1):
            answer = receive_bytes(follower)
            while answer is not None and len(answer) == _ANSWER.size and _ANSWER.unpack(answer)[0] < step:
                answer = receive_bytes(follower)  # that was of a step whose result was not wanted any more
            if answer != expected:
                raise self._failure(rank, answer, step)
        return result

    def _send(self, frame: bytes) -> None:
        for follower in self._followers:
            try:
                send_bytes(follower, frame)
            except OSError as error:
                raise RankFailed(self._why_lost() or f"A rank cannot be reached: {error}.") from error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """The other ranks wait inside a collective that this one has left, or the other way round."""
        try:
            yield
        except Exception as error:
            raise RankFailed(self._why_lost() or f"Rank 0 failed: {type(error).__name__}: {error}") from error

    def _failure(self, rank: int, answer: bytes | None, step: int) -> RankFailed:
        if answer is None:
            return RankFailed(self._why_lost() or f"Rank {rank} ended in step {step}.")
        if len(answer) != _ANSWER.size:
            return RankFailed(f"Rank {rank} failed in step {step}: {answer.decode('utf-8', 'replace')}")
        found, _ = _ANSWER.unpack(answer)
        if found != step:
            return RankFailed(f"Rank {rank} computed step {found}, and step {step} was due.")
        return RankFailed(f"Rank {rank} sampled other tokens than rank 0 in step {step}: they hold different logits.")


@dataclass(frozen=True, slots=True)
class PendingRanks:
    """A step that all ranks compute."""

    runner: TensorParallelRunner
    local: Pending
    step: int

    @property
    def drafted(self) -> Mapping[Row, IntArray]:
        return self.local.drafted

    def sample(self, masks: Masks) -> None:
        self.runner.sample(self.local, masks)

    def wait(self) -> StepResult:
        return self.runner.wait(self.local, self.step)


def follow(runner: Runner, leader: socket.socket) -> None:
    """Compute the steps that rank 0 sends, until it closes the connection. Sends the error of a step that failed, and
    raises it."""
    step, pending = -1, None
    while (frame := receive_bytes(leader)) is not None:
        kind, data = frame[:1], frame[1:]
        try:
            if kind == _PLAN:
                plan = decode_plan(data)
                step, pending = plan.step, runner.launch(plan)
                if plan.masked:
                    continue
            else:
                assert kind == _MASKS and pending is not None, f"a frame of kind {kind!r} after step {step}"
                pending.sample(decode_masks(data))
            result = pending.wait()
        except Exception as error:
            send_bytes(leader, f"{type(error).__name__}: {error}".encode())
            raise
        send_bytes(leader, _ANSWER.pack(step, checksum(result)))
