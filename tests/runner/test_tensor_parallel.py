"""The fan-out: one plan, and followers that must answer with the same step and the same tokens."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest

from quire.core.errors import RankFailed
from quire.core.ids import IntArray, Row
from quire.core.step import Masks, Pending, Runner, StepPlan, StepResult
from quire.core.worker_process import receive_bytes, send_bytes
from quire.runner.tensor_parallel import TensorParallelRunner, checksum, follow


class Counting:
    """A runner whose one row emits the number of its step, plus a mask's first bits."""

    def __init__(self, wrong_step: int = -1) -> None:
        self.wrong_step = wrong_step
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Pending:
        self.plans.append(plan)
        if plan.step == self.wrong_step and self.wrong_step == 13:
            raise ValueError("no luck")
        return CountedStep(plan.step, plan.step + (plan.step == self.wrong_step))


class CountedStep:
    def __init__(self, step: int, token: int) -> None:
        self.token, self.step = token, step
        self.drafted: dict[Row, IntArray] = {}

    def sample(self, masks: Masks) -> None:
        self.token += int(masks.bits[0, 0])

    def wait(self) -> StepResult:
        return StepResult(self.step, np.array([0], np.int32), np.array([self.token], np.int32))


@contextmanager
def following(*followers: Runner) -> Iterator[TensorParallelRunner]:
    pairs = [socket.socketpair() for _ in followers]
    threads = [
        Thread(target=_follow, args=(runner, theirs)) for runner, (_, theirs) in zip(followers, pairs, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield TensorParallelRunner(Counting(), [ours for ours, _ in pairs], lambda: None)
    finally:
        for ours, _ in pairs:
            ours.close()
        for thread in threads:
            thread.join()


def _follow(runner: Runner, leader: socket.socket) -> None:
    with leader:
        try:
            follow(runner, leader)
        except ValueError:
            return


def test_every_rank_computes_every_plan() -> None:
    followers = [Counting(), Counting()]
    with following(*followers) as runner:
        results = [runner.launch(StepPlan(step, num_decoding=step)).wait() for step in range(5)]
    assert [result.tokens.tolist() for result in results] == [[0], [1], [2], [3], [4]]
    assert all([plan.num_decoding for plan in each.plans] == [0, 1, 2, 3, 4] for each in followers)


def test_masks_reach_every_rank() -> None:
    masks = Masks(np.array([0], np.int32), np.array([[40]], np.int32))
    with following(Counting(), Counting()) as runner:
        pending = runner.launch(StepPlan(2, masked=(0,)))
        pending.sample(masks)
        assert pending.wait().tokens.tolist() == [42]


def test_steps_that_were_lost_need_no_answer() -> None:
    """The loop forgets the steps in flight, one of them before it had its masks, and begins again."""
    with following(Counting(), Counting()) as runner:
        runner.launch(StepPlan(1))
        runner.launch(StepPlan(2, masked=(0,)))
        assert runner.launch(StepPlan(3, reset=True)).wait().tokens.tolist() == [3]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (3, "Rank 2 sampled other tokens than rank 0 in step 3: they hold different logits."),
        (13, "Rank 2 failed in step 13: ValueError: no luck"),
    ],
)
def test_a_rank_that_differs_or_fails_ends_the_group(step: int, message: str) -> None:
    with following(Counting(), Counting(wrong_step=step)) as runner:
        runner.launch(StepPlan(step - 1)).wait()
        with pytest.raises(RankFailed, match=message):
            runner.launch(StepPlan(step)).wait()


def answering(answer: Callable[[bytes], bytes | None]) -> tuple[TensorParallelRunner, Thread]:
    ours, theirs = socket.socketpair()

    def once() -> None:
        with theirs:
            frame = receive_bytes(theirs)
            assert frame is not None
            given = answer(frame)
            if given is not None:
                send_bytes(theirs, given)

    thread = Thread(target=once)
    thread.start()
    return TensorParallelRunner(Counting(), [ours], lambda: None), thread


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda frame: (8).to_bytes(8, "little") + bytes(4), "Rank 1 computed step 8, and step 7 was due."),
        (lambda frame: None, "Rank 1 ended in step 7."),
    ],
)
def test_another_step_or_no_answer_ends_the_group(answer: Callable[[bytes], bytes | None], message: str) -> None:
    runner, thread = answering(answer)
    with pytest.raises(RankFailed, match=message):
        runner.launch(StepPlan(7)).wait()
    thread.join()


def test_a_failure_of_rank_0_ends_the_group() -> None:
    """The others wait in a collective that it has left."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RankFailed, match="Rank 0 failed: ValueError: no luck"):
        TensorParallelRunner(Counting(wrong_step=13), [ours], lambda: None).launch(StepPlan(13))
    with pytest.raises(RankFailed, match="A rank cannot be reached"):
        TensorParallelRunner(Counting(), [ours], lambda: None).launch(StepPlan(0))


def test_the_checksum_tells_results_apart() -> None:
    result = CountedStep(5, 5).wait()
    changed = [
        result._replace(tokens=result.tokens + 1),
        result._replace(rows=result.rows + 1),
        result._replace(rows=np.empty(0, np.int32), tokens=np.empty(0, np.int32)),
    ]
    assert len({checksum(each) for each in [result, *changed]}) == 4
