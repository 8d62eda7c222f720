"""Sums of hidden states on the device: the same whatever the chunks, apart by row, and gone with their row."""

import pytest
import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.step import Chunk, ChunkOutput, FinishedRow, FinishReason, StepPlan
from quire.kernels.interface import StepLayout
from quire.models.interface import KvGeometry
from quire.runner.batch import Pooling, Pools
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from tests.runner.plans import emitted, grants, row_start, sample

BLOCK = 4
VOCAB = 50
POISON = 40
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


class Halves:
    """A hidden state is (token, half of it) in bfloat16; POISON's is none."""

    vocab_size = VOCAB
    kv_geometry = KvGeometry(num_layers=1, kv_heads=1, head_dim=1, dtype=torch.int32)
    row_decoder = None

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, wanted: Tensor | None = None) -> Tensor:
        states = torch.stack([tokens, tokens / 2], dim=1).to(torch.bfloat16)
        states[tokens == POISON] = float("nan")
        return states if wanted is None else states[wanted]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, VOCAB).float()


def new_runner() -> ModelRunner:
    model = Halves()
    stores = new_store(model.kv_geometry, 16, BLOCK, torch.device("cpu"))
    return ModelRunner(model, stores, max_rows=4, max_length=16)


def part(row: int, start: int, stop: int) -> Chunk:
    return Chunk(Row(row), start, stop - start, ChunkOutput.POOLED)


def test_a_chunked_prompt_beside_a_decoding_row():
    runner = new_runner()
    starts = (row_start(0, PROMPT, 16, pooled=True), row_start(1, [7], 16))
    tables = grants({0: [1, 2, 3], 1: [4, 5]})
    first = runner.launch(StepPlan(0, starts=starts, grants=tables, chunks=(part(0, 0, 4), sample(1, 0, 1)))).wait()
    assert emitted(first) == {1: 8} and first.pooled == {} and first.ended == ()
    second = runner.launch(StepPlan(1, chunks=(part(0, 4, 9),), num_decoding=1)).wait()
    assert emitted(second) == {1: 9} and second.ended == (FinishedRow(Row(0), FinishReason.STOP),)
    assert second.pooled[Row(0)].tolist() == [36.0, 18.0]
    assert emitted(runner.launch(StepPlan(2, releases=(Row(0),), num_decoding=1)).wait()) == {1: 10}


def test_sums_are_per_row_and_start():
    runner = new_runner()
    starts = (row_start(0, PROMPT, 16, pooled=True), row_start(1, [2] * 6, 16, pooled=True))
    tables = grants({0: [1, 2, 3], 1: [4, 5]})
    runner.launch(StepPlan(0, starts=starts, grants=tables, chunks=(part(0, 0, 5), part(1, 0, 3)))).wait()
    again = row_start(0, [8, 8], 16, pooled=True)
    plan = StepPlan(
        1, releases=(Row(0),), starts=(again,), grants=grants({0: [6]}), chunks=(part(1, 3, 6), part(0, 0, 2))
    )
    result = runner.launch(plan).wait()
    assert {row: sums.tolist() for row, sums in result.pooled.items()} == {0: [16.0, 8.0], 1: [12.0, 6.0]}


def test_a_sum_that_is_not_finite_is_an_error():
    runner = new_runner()
    starts = (row_start(0, [1, POISON, 2], 16, pooled=True), row_start(1, [1, 2], 16, pooled=True))
    plan = StepPlan(0, starts=starts, grants=grants({0: [1], 1: [2]}), chunks=(part(0, 0, 3), part(1, 0, 2)))
    result = runner.launch(plan).wait()
    assert result.ended == (FinishedRow(Row(0), FinishReason.ERROR), FinishedRow(Row(1), FinishReason.STOP))
    assert result.pooled.keys() == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_thousands_of_states_lose_nothing_that_float32_holds(dtype):
    """bfloat16 alone would stop counting at 256."""
    pools = Pools()
    chunk = Chunk(Row(0), 0, 4096, ChunkOutput.POOLED)
    done = pools.add((Pooling(chunk, 0, last=True),), torch.ones(4096, 2, dtype=dtype))
    assert done is not None
    (total,) = done.wait().values()
    assert total is not None and total.tolist() == [4096.0, 4096.0]


def test_a_lost_step_leaves_no_sums():
    runner = new_runner()
    plan = StepPlan(
        0, starts=(row_start(0, PROMPT, 16, pooled=True),), grants=grants({0: [1, 2, 3]}), chunks=(part(0, 0, 4),)
    )
    runner.launch(plan).wait()
    again = StepPlan(
        3,
        starts=(row_start(0, PROMPT, 16, pooled=True),),
        grants=grants({0: [4, 5, 6]}),
        chunks=(part(0, 0, 9),),
        reset=True,
    )
    assert runner.launch(again).wait().pooled[Row(0)].tolist() == [36.0, 18.0]
