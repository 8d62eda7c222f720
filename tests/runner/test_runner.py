"""The torch runner behind the bridge, driven by hand: rows that fail or end are inert, and harm nobody."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.ids import BlockId, Row, SequenceId
from quire.core.sampling import RowSampling
from quire.core.step import Chunk, Ended, FinishReason, Grant, Output, Seat, StepPlan, StepResult
from quire.kernels.contract import Ragged
from quire.models.model import KvGeometry
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner

VOCAB = 50
POISON = 40  # the token after which the model's logits are not finite
BLOCK = 4
NUM_BLOCKS = 12


class Scripted:
    """Counts upwards: after token t comes t + 1. After POISON there is only nonsense. Stores each token it saw."""

    def __init__(self, nonsense: float = float("nan")) -> None:
        self._nonsense = nonsense

    vocab_size = VOCAB
    kv_geometry = KvGeometry(num_layers=1, kv_heads=1, head_dim=1, dtype=torch.int32)

    def forward(self, tokens: Tensor, ragged: Ragged, kv: Tensor) -> Tensor:
        kv[ragged.slots // BLOCK, 0, 0, ragged.slots % BLOCK, 0, 0] = tokens.int()
        return tokens[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        last = hidden[:, 0]
        logits = torch.zeros(len(last), VOCAB)
        logits[torch.arange(len(last)), (last + 1) % VOCAB] = 5.0
        logits[last == POISON, 3] = self._nonsense
        return logits


def new_runner(nonsense: float = float("nan")) -> tuple[ModelRunner, Tensor]:
    model = Scripted(nonsense)
    kv = new_store(model.kv_geometry, NUM_BLOCKS, BLOCK, torch.device("cpu")).zero_()
    return ModelRunner(model, kv, max_rows=4, max_length=16), kv


def seat(row: int, prompt: list[int], max_length: int = 12, **sampling: object) -> Seat:
    tokens = np.array(prompt, dtype=np.int32)
    return Seat(Row(row), SequenceId(row), 0, tokens, len(prompt), max_length, RowSampling(**sampling))  # type: ignore[arg-type]


def opening(*seats: Seat) -> StepPlan:
    """All sit down with three blocks each, and compute their prompts."""
    return StepPlan(
        step=0,
        seats=seats,
        grants=tuple(Grant(s.row, BlockId(1 + 3 * s.row + place)) for s in seats for place in range(3)),
        chunks=tuple(Chunk(s.row, 0, len(s.tokens), Output.SAMPLE) for s in seats),
    )


def emitted(result: StepResult) -> dict[int, int]:
    return dict(zip(result.rows.tolist(), result.tokens.tolist(), strict=True))


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf")])
def test_a_row_without_finite_logits_fails_alone(nonsense):
    runner, _ = new_runner(nonsense)
    first = runner.launch(opening(seat(0, [10]), seat(1, [POISON - 1]), seat(2, [20, 21]))).wait()
    assert emitted(first) == {0: 11, 1: POISON, 2: 22} and first.ended == ()
    second = runner.launch(StepPlan(step=1, num_cruising=3)).wait()
    assert emitted(second) == {0: 12, 2: 23}
    assert second.ended == (Ended(Row(1), FinishReason.ERROR),)
    third = runner.launch(StepPlan(step=2, num_cruising=3)).wait()
    assert emitted(third) == {0: 13, 2: 24} and third.ended == ()
    fourth = runner.launch(StepPlan(step=3, leaves=(Row(1),), num_cruising=2)).wait()
    assert emitted(fourth) == {0: 14, 2: 25}


def test_a_prompt_without_finite_logits_emits_nothing():
    runner, _ = new_runner()
    result = runner.launch(opening(seat(0, [10]), seat(1, [5, POISON]))).wait()
    assert emitted(result) == {0: 11}
    assert result.ended == (Ended(Row(1), FinishReason.ERROR),)


def test_a_random_row_without_finite_logits_fails_alone():
    runner, _ = new_runner()
    result = runner.launch(opening(seat(0, [10]), seat(1, [POISON], temperature=1.0, num_logprobs=2))).wait()
    assert emitted(result) == {0: 11} and result.logprobs == {}
    assert result.ended == (Ended(Row(1), FinishReason.ERROR),)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_ended_row_is_inert_while_the_host_does_not_know(depth):
    """It is planned on for `depth` steps: nothing is emitted, and no block but the null block is touched."""
    runner, kv = new_runner()
    pending = [runner.launch(opening(seat(0, [10]), seat(1, [20], end_ids=(22,))))]
    pending.append(runner.launch(StepPlan(step=1, num_cruising=2)))
    pending += [runner.launch(StepPlan(step=2 + ahead, num_cruising=2)) for ahead in range(depth)]
    results = [step.wait() for step in pending]
    assert emitted(results[1]) == {0: 12, 1: 22}
    assert results[1].ended == (Ended(Row(1), FinishReason.STOP),)
    for ahead, result in enumerate(results[2:]):
        assert emitted(result) == {0: 13 + ahead} and result.ended == ()
    assert kv[4, 0, 0, :, 0, 0].tolist() == [20, 21, 0, 0]  # the end token itself was never written


def test_the_length_ends_a_row_and_it_does_not_cruise_on():
    runner, _ = new_runner()
    assert runner.launch(opening(seat(0, [10]), seat(1, [20], max_length=2))).wait().ended == (
        Ended(Row(1), FinishReason.LENGTH),
    )
    assert emitted(runner.launch(StepPlan(step=1, num_cruising=1)).wait()) == {0: 11 + 1}


def test_a_paused_row_skips_one_step():
    runner, _ = new_runner()
    runner.launch(opening(seat(0, [10]), seat(1, [20])))
    assert emitted(runner.launch(StepPlan(step=1, pauses=(Row(1),), num_cruising=1)).wait()) == {0: 12}
    assert emitted(runner.launch(StepPlan(step=2, num_cruising=2)).wait()) == {0: 13, 1: 22}


def test_a_row_is_as_new_for_the_next_who_sits_there():
    runner, _ = new_runner()
    runner.launch(opening(seat(0, [10], end_ids=(11,), logit_bias=((7, 100.0),), num_logprobs=1)))
    again = StepPlan(
        step=1,
        leaves=(Row(0),),
        seats=(seat(0, [30]),),
        grants=(Grant(Row(0), BlockId(9)),),
        chunks=(Chunk(Row(0), 0, 1, Output.SAMPLE),),
    )
    result = runner.launch(again).wait()
    assert emitted(result) == {0: 31} and result.logprobs == {} and result.ended == ()


@pytest.mark.parametrize("step", [0, 2, -1])
def test_a_plan_out_of_turn_is_our_mistake(step):
    runner, _ = new_runner()
    runner.launch(opening(seat(0, [10])))
    with pytest.raises(AssertionError, match="was due"):
        runner.launch(StepPlan(step=step, num_cruising=1))


def test_a_plan_that_miscounts_is_our_mistake():
    runner, _ = new_runner()
    runner.launch(opening(seat(0, [10])))
    with pytest.raises(AssertionError, match="rows cruise"):
        runner.launch(StepPlan(step=1, num_cruising=2))


def test_a_seat_that_is_taken_is_our_mistake():
    runner, _ = new_runner()
    runner.launch(opening(seat(0, [10])))
    with pytest.raises(AssertionError, match="taken"):
        runner.launch(StepPlan(step=1, seats=(seat(0, [11]),), num_cruising=1))
