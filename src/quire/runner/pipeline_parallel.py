"""Pipeline parallelism: stages that each compute some layers, one behind the other.

Every rank follows the same plans, with rows and blocks of its own. Rank 0, in the engine's process, is in the first
stage. Hidden states go from stage to stage (`layers/parallel.py`). The last stage samples and sends the whole result to
rank 0, which passes the tokens on to the stages between, before the first plan in which one of their rows computes
again. So a step waits for no other unless a row is in both: steps of different rows are in the pipe at the same time,
one in each stage, and the scheduler plans them so (`sched/pipelining.py`).
"""

import select
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from quire.core.ids import IntArray, Row
from quire.core.plan_codec import decode_plan, encode_masks, encode_plan
from quire.core.result_codec import RowOutcome, decode_outcome, decode_result, encode_outcome, encode_result
from quire.core.sharding import Shard
from quire.core.step import ChunkOutput, Masks, StepPlan, StepResult
from quire.core.worker_process import FrameReader, frame_of
from quire.models.interface import Model
from quire.runner.batch import build_batch
from quire.runner.graph_shapes import LaunchCounts
from quire.runner.kv_store import KvStores
from quire.runner.row_table import RowTable
from quire.runner.tensor_parallel import MASKS, PLAN, Followers

_OUTCOME = b"O"  # the first byte of a frame, beside PLAN and MASKS
_RESULT = b"\0"  # the first byte of an answer that is not an error's text


class StageRunner:
    """A stage before the last: it computes plans and samples nothing."""

    def __init__(self, model: Model, stores: KvStores, *, max_rows: int, max_length: int) -> None:
        self._model = model
        self._stores = stores
        self.device = stores.device.device
        self.launches = LaunchCounts()
        self._rows = RowTable(max_rows, max_length, stores.block_size, self.device)
        self._last_steps: NDArray[np.int64] = np.full(max_rows, -1, dtype=np.int64)  # in which a row got a token

    def last_needed(self, plan: StepPlan) -> int:
        """The last step whose outcome must be absorbed before this plan is launched: its rows' tokens are inputs now.
        -1: none."""
        if plan.reset:
            return -1
        rows = self._rows.decoding.copy()
        rows[list(plan.pauses)] = False
        rows[list(plan.releases)] = True  # what they got is not for who has the row next
        return int(self._last_steps[rows].max(initial=-1))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        if plan.reset:
            self._last_steps[:] = -1
        self._stores.carry(plan.moves)
        decoding = self._rows.apply(plan)
        self._last_steps[decoding] = plan.step
        self._last_steps[[chunk.row for chunk in plan.chunks if ChunkOutput.SAMPLE in chunk.output]] = plan.step
        batch = build_batch(self._rows, plan, decoding)
        if len(batch.tokens):
            self._model.forward(batch.tokens, batch.layout, self._stores.device)

    @torch.inference_mode()
    def absorb(self, outcome: RowOutcome) -> None:
        rows, ended = torch.from_numpy(outcome.rows).long(), torch.from_numpy(outcome.ended).long()
        emitted = torch.ones(len(rows), dtype=torch.bool)
        self._rows.advance(rows, torch.from_numpy(outcome.tokens).long(), emitted, ~emitted)
        self._rows.end(ended, torch.ones(len(ended), dtype=torch.bool))


def full_answer(result: StepResult) -> bytes:
    """What the first rank of the last stage answers."""
    return _RESULT + encode_result(result)


def follow_stage(runner: StageRunner, leader: socket.socket) -> None:
    """Compute the steps that rank 0 sends, in a stage before the last, until it closes the connection."""
    plans = FrameReader(leader)
    while (frame := plans.receive()) is not None:
        kind, data = frame[:1], frame[1:]
        if kind == PLAN:
            runner.launch(decode_plan(data))
        else:
            assert kind == _OUTCOME, f"a frame of kind {kind!r}"
            runner.absorb(decode_outcome(data))


class PipelineParallelRunner:
    """The first stage on rank 0, and the ranks that follow it. A failure of any of them is the end of all."""

    def __init__(
        self,
        local: StageRunner,
        followers: Sequence[socket.socket],
        shard: Shard,
        why_lost: Callable[[], str | None],
    ) -> None:
        """shard: of rank 0. `followers`: of the other ranks, by number."""
        self._local = local
        sampling = shard.num_ranks - shard.size  # the first rank of the last stage
        ranks = dict(enumerate(followers, 1))
        self._between = Followers({rank: ranks[rank] for rank in range(1, sampling)}, why_lost)
        self._sampling = _SamplingRank(sampling, ranks[sampling], why_lost)
        self._sampling_too = Followers({rank: ranks[rank] for rank in range(sampling + 1, shard.num_ranks)}, why_lost)
        self._results: dict[int, StepResult] = {}  # not yet waited for
        self._last_absorbed = -1  # by the stages before the last

    def launch(self, plan: StepPlan) -> "PendingPipeline":
        self._absorb_up_to(self._local.last_needed(plan))
        if plan.reset:
            self._results.clear()
            self._last_absorbed = plan.step - 1
        frame = PLAN + encode_plan(plan)
        self._between.send(frame)
        self._sampling_too.send(frame)
        self._sampling.send(frame)
        try:
            self._local.launch(plan)
        except Exception as error:
            raise self._between.failed_here(error) from error
        return PendingPipeline(self, plan.step)

    def sample(self, masks: Masks) -> None:
        frame = MASKS + encode_masks(masks)
        self._sampling_too.send(frame)
        self._sampling.send(frame)

    @property
    def num_unread(self) -> int:
        """Results that are here and not yet waited for."""
        return len(self._results)

    def wait(self, step: int) -> StepResult:
        self._absorb_up_to(step)
        return self._results.pop(step)

    def _absorb_up_to(self, step: int) -> None:
        """Results come in the order of their steps."""
        while self._last_absorbed < step:
            result = self._sampling.receive(self._last_absorbed + 1)
            self._sampling_too.check_answers(result)
            outcome = RowOutcome.of(result)
            self._between.send(_OUTCOME + encode_outcome(outcome))
            try:
                self._local.absorb(outcome)
            except Exception as error:
                raise self._between.failed_here(error) from error
            self._results[result.step] = result
            self._last_absorbed = result.step


class _SamplingRank:
    """The connection to the rank that sends results."""

    def __init__(self, rank: int, connection: socket.socket, why_lost: Callable[[], str | None]) -> None:
        self._rank, self._connection = rank, connection
        self._follower, self._results = Followers({rank: connection}, why_lost), FrameReader(connection)
        self._arrived: deque[bytes | None] = deque()

    def send(self, data: bytes) -> None:
        """While the other end may be sending a result: neither waits for the other to read first."""
        left = memoryview(frame_of(data))
        while left:
            try:
                left = left[self._connection.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait_for_room()
            except OSError as error:
                raise self._follower.unreachable(error) from error

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | select.POLLOUT)
        [(_, events)] = poll.poll()
        if events & select.POLLIN:
            self._arrived.append(self._results.receive())

    def receive(self, step: int) -> StepResult:
        while True:
            answer = self._arrived.popleft() if self._arrived else self._results.receive()
            if answer is None or answer[:1] != _RESULT:
                raise self._follower.failed(self._rank, answer, step)
            result = decode_result(answer[1:])
            if result.step == step:
                return result
            assert result.step < step, (result.step, step)  # of a step whose result was not wanted any more


@dataclass(frozen=True, slots=True)
class PendingPipeline:
    """A step in the pipe."""

    runner: PipelineParallelRunner
    step: int
    drafted: Mapping[Row, IntArray] = field(default_factory=dict)  # none

    def sample(self, masks: Masks) -> None:
        self.runner.sample(masks)

    def wait(self) -> StepResult:
        return self.runner.wait(self.step)
