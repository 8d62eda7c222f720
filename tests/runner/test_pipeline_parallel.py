"""The fan-out of a pipeline: tokens come from the last stage, and reach the others before their rows compute again."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest
import torch

from quire.core.errors import RankFailed
from quire.core.ids import Row
from quire.core.plan_codec import decode_plan
from quire.core.result_codec import decode_outcome
from quire.core.sharding import Shard
from quire.core.step import FinishedRow, FinishReason, Masks, StepPlan, StepResult
from quire.core.worker_process import receive_bytes, send_bytes
from quire.models.oracle import OracleModel
from quire.runner.kv_store import new_store
from quire.runner.pipeline_parallel import PipelineParallelRunner, StageRunner, full_answer
from tests.runner.plans import grants, row_start, sample

VOCAB = 97
BIG = StepResult(0, pooled={Row(0): np.zeros(1 << 20, np.float32)})  # 4 MiB: more than a socket holds


def first_stage() -> StageRunner:
    model = OracleModel(VOCAB)
    return StageRunner(
        model, new_store(model.kv_geometry, 8, 4, torch.device("cpu"), 0, None), max_rows=2, max_length=32
    )


@contextmanager
def three_stages(sample_steps: Callable[[socket.socket], None]) -> Iterator[tuple[PipelineParallelRunner, list[bytes]]]:
    """Rank 0, a rank that keeps its frames, and one that samples."""
    pairs = [socket.socketpair() for _ in range(2)]
    frames: list[bytes] = []

    def keep() -> None:
        while (frame := receive_bytes(pairs[0][1])) is not None:
            frames.append(frame)

    threads = [Thread(target=keep), Thread(target=sample_steps, args=(pairs[1][1],))]
    for thread in threads:
        thread.start()
    try:
        yield (
            PipelineParallelRunner(first_stage(), [ours for ours, _ in pairs], Shard.of(0, 1, 3), lambda: None),
            frames,
        )
    finally:
        for ours, _ in pairs:
            ours.close()
        for thread in threads:
            thread.join()


def answers(*results: StepResult | bytes) -> Callable[[socket.socket], None]:
    """Each with the frame that has the same place; a second one before the first answer."""

    def run(connection: socket.socket) -> None:
        with connection:
            receive_bytes(connection)
            for result in results:
                if receive_bytes(connection) is None:
                    return
                send_bytes(connection, result if isinstance(result, bytes) else full_answer(result))
            receive_bytes(connection)

    return run


def result(step: int, row: int, token: int, *, ends: bool = False) -> StepResult:
    ended = (FinishedRow(Row(row), FinishReason.STOP),) if ends else ()
    return StepResult(step, np.array([row], np.int32), np.array([token], np.int32), ended)


PLANS = [
    StepPlan(0, starts=(row_start(0, [5, 6]),), grants=grants({0: [1]}), chunks=(sample(0, 0, 2),)),
    StepPlan(1, starts=(row_start(1, [7]),), grants=grants({1: [2]}), chunks=(sample(1, 0, 1),), pauses=(Row(0),)),
    StepPlan(2, pauses=(Row(1),), num_decoding=1),
]


def test_a_step_waits_for_the_tokens_of_its_own_rows_only() -> None:
    """Step 0 is answered when step 1 has been launched, and step 2 computes what step 0 sampled."""
    with three_stages(answers(result(0, 0, 40), result(1, 1, 41, ends=True))) as (runner, frames):
        pending = [runner.launch(plan) for plan in PLANS]
        assert [each.wait().tokens.tolist() for each in pending[:2]] == [[40], [41]]
    assert [frame[:1] for frame in frames] == [b"P", b"P", b"O", b"P", b"O"]
    assert decode_plan(frames[3][1:]).step == 2
    assert [each.tolist() for each in decode_outcome(frames[2][1:])] == [[0], [40], []]
    assert [each.tolist() for each in decode_outcome(frames[4][1:])] == [[1], [41], [1]]


def test_a_plan_waits_for_what_its_rows_got_and_for_those_it_releases() -> None:
    """What a released row got is not for the sequence that has the row next."""
    stage = first_stage()
    stage.launch(PLANS[0])
    assert stage.last_needed(StepPlan(1, num_decoding=1)) == 0
    assert stage.last_needed(StepPlan(1, pauses=(Row(0),), releases=(Row(0),))) == 0
    assert stage.last_needed(StepPlan(1, pauses=(Row(0),))) == -1
    assert stage.last_needed(StepPlan(1, reset=True)) == -1


def test_steps_that_were_lost_are_forgotten() -> None:
    again = [StepPlan(2, reset=True, starts=PLANS[0].starts, grants=PLANS[0].grants, chunks=PLANS[0].chunks)]
    with three_stages(answers(result(0, 0, 40), result(2, 0, 42))) as (runner, frames):
        pending = [runner.launch(plan) for plan in (PLANS[0], PLANS[1], *again)]
        assert pending[2].wait().tokens.tolist() == [42]
    assert [frame[:1] for frame in frames] == [b"P", b"P", b"P", b"O"], "nobody gets the tokens of a lost step"


def test_results_that_nobody_waits_for_any_more_are_not_kept() -> None:
    """Step 2 computed what step 0 sampled, so that the result of step 0 was there; then all three were lost."""
    last = StepPlan(3, reset=True, starts=PLANS[0].starts, grants=PLANS[0].grants, chunks=PLANS[0].chunks)
    with three_stages(answers(result(0, 0, 40), result(1, 1, 41), result(3, 0, 43))) as (runner, _):
        for plan in PLANS:
            runner.launch(plan)
        assert runner.num_unread == 1
        assert runner.launch(last).wait().tokens.tolist() == [43]
        assert runner.num_unread == 0


def test_a_large_result_meets_a_large_frame() -> None:
    """Neither end reads before it has sent all."""
    masks = Masks(np.array([0], np.int32), np.zeros((1, 1 << 20), np.int32))

    def at_once(connection: socket.socket) -> None:
        with connection:
            receive_bytes(connection)
            send_bytes(connection, full_answer(BIG))
            receive_bytes(connection)

    with three_stages(at_once) as (runner, _):
        pending = runner.launch(PLANS[0])
        pending.sample(masks)
        assert len(pending.wait().pooled[Row(0)]) == 1 << 20


@pytest.mark.parametrize(
    ("last", "message"),
    [(b"ValueError: no luck", "Rank 2 failed in step 0: ValueError: no luck"), (None, "Rank 2 ended in step 0.")],
)
def test_a_failure_of_the_last_stage_ends_the_group(last: bytes | None, message: str) -> None:
    def fail(connection: socket.socket) -> None:
        with connection:
            receive_bytes(connection)
            if last is not None:
                send_bytes(connection, last)

    with three_stages(fail) as (runner, _), pytest.raises(RankFailed, match=message):
        runner.launch(PLANS[0]).wait()


def test_a_rank_that_is_gone_ends_the_group() -> None:
    with three_stages(answers()) as (runner, _):
        runner.launch(PLANS[0])
    with pytest.raises(RankFailed, match="A rank cannot be reached"):
        runner.launch(PLANS[1])
