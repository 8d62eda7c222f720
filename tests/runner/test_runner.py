"""The torch runner behind the bridge, driven by hand: rows that fail or end are inert, and harm nobody."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.step import AppendTokens, FinishedRow, FinishReason, RowStart, StepPlan
from quire.kernels.interface import StepLayout
from quire.models.interface import KvGeometry
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.runner.row_table import RowTable
from tests.runner.plans import emitted, grants, host_driven, sample
from tests.runner.plans import row_start as seat_for

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
    row_decoder = None

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, wanted: Tensor | None = None) -> Tensor:
        kv[layout.slots // BLOCK, 0, 0, layout.slots % BLOCK, 0, 0] = tokens.int()
        return (tokens if wanted is None else tokens[wanted])[:, None]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        last = hidden[:, 0]
        logits = torch.zeros(len(last), VOCAB)
        logits[torch.arange(len(last)), (last + 1) % VOCAB] = 5.0
        logits[last == POISON, 3] = self._nonsense
        return logits


def new_runner(nonsense: float = float("nan")) -> tuple[ModelRunner, Tensor]:
    model = Scripted(nonsense)
    stores = new_store(model.kv_geometry, NUM_BLOCKS, BLOCK, torch.device("cpu"))
    return ModelRunner(model, stores, max_rows=4, max_length=16), stores.device.zero_()


def row_start(row: int, prompt: list[int], max_length: int = 12, **sampling: object) -> RowStart:
    return seat_for(row, prompt, max_length, **sampling)


def opening(*starts: RowStart) -> StepPlan:
    """All sit down with three blocks each, and compute their prompts."""
    return StepPlan(
        step=0,
        starts=starts,
        grants=grants({s.row: range(1 + 3 * s.row, 4 + 3 * s.row) for s in starts}),
        chunks=tuple(sample(s.row, 0, len(s.tokens)) for s in starts),
    )


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf")])
def test_a_row_without_finite_logits_fails_alone(nonsense):
    runner, _ = new_runner(nonsense)
    first = runner.launch(opening(row_start(0, [10]), row_start(1, [POISON - 1]), row_start(2, [20, 21]))).wait()
    assert emitted(first) == {0: 11, 1: POISON, 2: 22} and first.ended == ()
    second = runner.launch(StepPlan(step=1, num_decoding=3)).wait()
    assert emitted(second) == {0: 12, 2: 23}
    assert second.ended == (FinishedRow(Row(1), FinishReason.ERROR),)
    third = runner.launch(StepPlan(step=2, num_decoding=3)).wait()
    assert emitted(third) == {0: 13, 2: 24} and third.ended == ()
    fourth = runner.launch(StepPlan(step=3, releases=(Row(1),), num_decoding=2)).wait()
    assert emitted(fourth) == {0: 14, 2: 25}


def test_a_prompt_without_finite_logits_emits_nothing():
    runner, _ = new_runner()
    result = runner.launch(opening(row_start(0, [10]), row_start(1, [5, POISON]))).wait()
    assert emitted(result) == {0: 11}
    assert result.ended == (FinishedRow(Row(1), FinishReason.ERROR),)


def test_a_random_row_without_finite_logits_fails_alone():
    runner, _ = new_runner()
    result = runner.launch(opening(row_start(0, [10]), row_start(1, [POISON], temperature=1.0, num_logprobs=2))).wait()
    assert emitted(result) == {0: 11} and result.logprobs == {}
    assert result.ended == (FinishedRow(Row(1), FinishReason.ERROR),)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_ended_row_is_inert_while_the_host_does_not_know(depth):
    """It is planned on for `depth` steps: nothing is emitted, and no block but the null block is touched."""
    runner, kv = new_runner()
    pending = [runner.launch(opening(row_start(0, [10]), row_start(1, [20], end_ids=(22,))))]
    pending.append(runner.launch(StepPlan(step=1, num_decoding=2)))
    pending += [runner.launch(StepPlan(step=2 + ahead, num_decoding=2)) for ahead in range(depth)]
    results = [step.wait() for step in pending]
    assert emitted(results[1]) == {0: 12, 1: 22}
    assert results[1].ended == (FinishedRow(Row(1), FinishReason.STOP),)
    for ahead, result in enumerate(results[2:]):
        assert emitted(result) == {0: 13 + ahead} and result.ended == ()
    assert kv[4, 0, 0, :, 0, 0].tolist() == [20, 21, 0, 0]  # the end token itself was never written


def test_max_tokens_ends_a_row_and_it_stops_decoding():
    runner, _ = new_runner()
    assert runner.launch(opening(row_start(0, [10]), row_start(1, [20], max_length=2))).wait().ended == (
        FinishedRow(Row(1), FinishReason.LENGTH),
    )
    assert emitted(runner.launch(StepPlan(step=1, num_decoding=1)).wait()) == {0: 11 + 1}


def test_a_paused_row_skips_one_step():
    runner, _ = new_runner()
    runner.launch(opening(row_start(0, [10]), row_start(1, [20])))
    assert emitted(runner.launch(StepPlan(step=1, pauses=(Row(1),), num_decoding=1)).wait()) == {0: 12}
    assert emitted(runner.launch(StepPlan(step=2, num_decoding=2)).wait()) == {0: 13, 1: 22}


def test_a_reused_row_has_no_old_state():
    runner, _ = new_runner()
    runner.launch(opening(row_start(0, [10], end_ids=(11,), logit_bias=((7, 100.0),), num_logprobs=1)))
    again = StepPlan(
        step=1,
        releases=(Row(0),),
        starts=(row_start(0, [30]),),
        grants=grants({0: [9]}),
        chunks=(sample(0, 0, 1),),
    )
    result = runner.launch(again).wait()
    assert emitted(result) == {0: 31} and result.logprobs == {} and result.ended == ()


@pytest.mark.parametrize("step", [0, 2, -1])
def test_a_plan_out_of_turn_is_our_mistake(step):
    runner, _ = new_runner()
    runner.launch(opening(row_start(0, [10])))
    with pytest.raises(AssertionError, match="was due"):
        runner.launch(StepPlan(step=step, num_decoding=1))


def test_a_plan_with_a_wrong_count_is_an_internal_error():
    runner, _ = new_runner()
    runner.launch(opening(row_start(0, [10])))
    with pytest.raises(AssertionError, match="rows decode"):
        runner.launch(StepPlan(step=1, num_decoding=2))


def test_starting_a_row_in_use_asserts():
    runner, _ = new_runner()
    runner.launch(opening(row_start(0, [10])))
    with pytest.raises(AssertionError, match="taken"):
        runner.launch(StepPlan(step=1, starts=(row_start(0, [11]),), num_decoding=1))


def test_a_tethered_row_without_finite_logits_fails_alone():
    runner, kv = new_runner()
    plan = StepPlan(
        step=0,
        starts=(row_start(0, [10], num_candidates=2), row_start(1, [5, POISON], num_candidates=3), row_start(2, [20])),
        grants=grants({0: [1], 1: [2], 2: [3]}),
        chunks=(host_driven(0, 0, 1), host_driven(1, 0, 2), sample(2, 0, 1)),
    )
    result = runner.launch(plan).wait()
    assert result.ended == (FinishedRow(Row(1), FinishReason.ERROR),)
    assert result.candidates.keys() == {0} and result.candidates[Row(0)].ids.tolist() == [11, 0]
    assert emitted(result) == {2: 21}
    told = StepPlan(1, appends=(AppendTokens(Row(1), (7,)),), chunks=(host_driven(1, 2, 3),), num_decoding=1)
    runner.launch(told)
    assert kv[2, 0, 0, :, 0, 0].tolist() == [5, POISON, 0, 0]  # it is inert


def test_padding_is_computed_in_the_null_block():
    runner, kv = new_runner()
    before = kv.fill_(9).clone()
    result = runner.launch(StepPlan(step=0, num_padding=2)).wait()
    assert emitted(result) == {} and result.ended == ()
    before[0, 0, 0, 0] = 0  # token 0 at position 0
    assert kv.equal(before)


class Failing(Scripted):
    """Loses a step when it is told to."""

    broken = False

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, wanted: Tensor | None = None) -> Tensor:
        if self.broken:
            raise MemoryError
        return super().forward(tokens, layout, kv, wanted)


def test_a_reset_forgets_what_a_lost_step_left_half_done():
    model = Failing()
    runner = ModelRunner(
        model, new_store(model.kv_geometry, NUM_BLOCKS, BLOCK, torch.device("cpu")), max_rows=4, max_length=16
    )
    runner.launch(opening(row_start(0, [10]), row_start(1, [20], repetition_penalty=2.0)))
    model.broken = True
    costly = {"logit_bias": ((7, 100.0),), "frequency_penalty": 1.0, "bad_words": ((1, 2),)}
    with pytest.raises(MemoryError):
        runner.launch(
            StepPlan(
                1,
                starts=(row_start(2, [1], **costly),),
                grants=grants({2: [7]}),
                chunks=(sample(2, 0, 1),),
                num_decoding=2,
            )
        )
    model.broken = False
    anew = StepPlan(
        2,
        starts=(row_start(0, [10, 11]), row_start(2, [30], **costly), row_start(1, [40 - 5])),
        grants=grants({0: [1], 2: [7], 1: [4]}),
        chunks=(sample(0, 1, 2), sample(2, 0, 1), sample(1, 0, 1)),
        reset=True,
    )
    assert emitted(runner.launch(anew).wait()) == {0: 12, 2: 7, 1: 36}
    assert emitted(runner.launch(StepPlan(3, num_decoding=3)).wait()) == {0: 13, 2: 7, 1: 37}


def test_tokens_appended_to_a_decoding_row_are_an_internal_error():
    runner, _ = new_runner()
    runner.launch(opening(row_start(0, [10])))
    with pytest.raises(AssertionError, match="is decoding"):
        runner.launch(StepPlan(1, appends=(AppendTokens(Row(0), (3,)),), num_decoding=1))


def test_a_repeated_step_leaves_the_row_table_as_an_applied_one_does() -> None:
    """Rows of different limits, grants on the way, a pause and a release: the same rows and tables at every step."""
    quick, slow = (RowTable(3, 32, BLOCK, torch.device("cpu")) for _ in range(2))
    starts = tuple(row_start(row, [1, 2], max_length=length) for row, length in enumerate((20, 9, 14)))
    plans = [
        StepPlan(
            0, starts=starts, grants=grants({0: [1], 1: [2], 2: [3]}), chunks=tuple(sample(r, 0, 2) for r in range(3))
        )
    ]
    changes: dict[int, dict[str, object]] = {
        3: {"grants": grants({0: [4], 2: [5]})},
        5: {"pauses": (Row(2),)},
        8: {"grants": grants({2: [7, 8]})},
        12: {"releases": (Row(1),)},
        13: {"grants": grants({0: [6]})},
    }
    num_repeated = 0
    for step in range(19):
        if step:
            named = changes.get(step, {})
            gone = {*named.get("pauses", ()), *named.get("releases", ())}  # type: ignore[misc]
            num_decoding = len(set(np.flatnonzero(slow.decoding).tolist()) - gone)
            plans.append(StepPlan(step, num_decoding=num_decoding, **named))  # type: ignore[arg-type]
        again = quick.repeat(plans[step])
        num_repeated += again is not None
        found = quick.apply(plans[step]) if again is None else again
        assert found.tolist() == slow.apply(plans[step]).tolist(), f"step {step}"
        assert torch.equal(quick.tables, slow.tables), f"step {step}"
    assert not slow.decoding.any() and num_repeated == 11


def test_a_repeated_step_is_its_plan_applied() -> None:
    """Two rows decode, one is granted a block, one pauses, the first ends by its length, and another takes its row."""
    plans = [
        StepPlan(
            0,
            starts=(seat_for(0, [5, 6], 8), seat_for(1, [7], 20)),
            grants=grants({0: [1], 1: [2]}),
            chunks=(sample(0, 0, 2), sample(1, 0, 1)),
        ),
        StepPlan(1, num_decoding=2),
        StepPlan(2, num_decoding=2),
        StepPlan(3, num_decoding=2, grants=grants({1: [3]})),
        StepPlan(4, num_decoding=1, pauses=(Row(1),)),
        StepPlan(5, num_decoding=2),
        StepPlan(6, num_decoding=1),
        StepPlan(
            7,
            releases=(Row(0),),
            starts=(seat_for(0, [9], 20),),
            grants=grants({0: [4]}),
            chunks=(sample(0, 0, 1),),
            num_decoding=1,
        ),
        StepPlan(8, num_decoding=2),
    ]
    quick, slow = (RowTable(2, 20, 4, torch.device("cpu")) for _ in range(2))
    repeated = []
    for plan in plans:
        rows = quick.repeat(plan)
        repeated += [] if rows is None else [plan.step]
        rows = quick.apply(plan) if rows is None else rows
        assert rows.tolist() == slow.apply(plan).tolist()
        assert torch.equal(quick.tables, slow.tables)
    assert repeated == [2, 3]
