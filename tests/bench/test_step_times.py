"""`quire bench steps`: its steps, the plans that time them, and refused ones."""

import json

import numpy as np
import pytest

from quire.bench.attention_steps import QuerySpan
from quire.bench.step_times import (
    STANDARD_RAGGED_STEPS,
    RaggedStep,
    StepFigure,
    find_ragged_step,
    measure_steps,
)
from quire.core.errors import ConfigError
from quire.core.step import Pending, StepPlan
from quire.engine.oracle_runner import TorchOracleRunner
from tests.bench.test_engine_bench import ENGINE
from tests.cli.commands import Shell

STEPS = ("decode 3x20", "chunk 12+5", "decode 70x9 & chunks 2x4+6")


class Recording:
    """A runner whose plans and results are kept."""

    def __init__(self, runner: TorchOracleRunner) -> None:
        self._runner = runner
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Pending:
        self.plans.append(plan)
        return self._runner.launch(plan)


def measured(*names: str, num_blocks: int = 800, max_rows: int = 80) -> tuple[list[StepFigure], list[StepPlan]]:
    runner = Recording(
        TorchOracleRunner(
            vocab_size=50, num_blocks=num_blocks, block_size=4, num_host_blocks=0, max_rows=max_rows, max_length=128
        )
    )
    steps = [find_ragged_step(name) for name in names]
    figures = measure_steps(
        runner, steps, num_blocks=num_blocks, block_size=4, max_rows=max_rows, clock=None, num_captured=lambda: 0
    )
    return list(figures), runner.plans


def test_a_name_says_rows_contexts_and_chunks() -> None:
    step = find_ragged_step("decode 32x1000 & chunks 4x100+20")
    assert step == RaggedStep("decode 32x1000 & chunks 4x100+20", (QuerySpan(999, 1),) * 32, (QuerySpan(20, 100),) * 4)
    assert step.num_tokens == 432
    assert [find_ragged_step(name).name for name in STANDARD_RAGGED_STEPS] == list(STANDARD_RAGGED_STEPS)


def test_the_timed_plans_are_the_named_step() -> None:
    figures, plans = measured(*STEPS)
    assert [(figure.name, figure.num_tokens) for figure in figures] == list(zip(STEPS, (3, 12, 78), strict=True))
    assert all(figure.milliseconds > 0 and not figure.captured for figure in figures)
    last = plans[-1]
    assert (last.num_decoding, [(chunk.start, chunk.length) for chunk in last.chunks]) == (70, [(6, 4), (6, 4)])
    assert [plan.step for plan in plans] == list(range(len(plans)))


def test_rows_that_verify_drafts_have_room_for_all_of_them() -> None:
    figures, plans = measured("verify 3x20+4")
    assert [(figure.name, figure.num_tokens) for figure in figures] == [("verify 3x20+4", 12)]
    timed = [plan for plan in plans if len(plan.drafts)]
    assert len(timed) == 25 and all(plan.drafts.counts.tolist() == [3, 3, 3] for plan in timed)
    granted = np.bincount(np.concatenate([plan.grants.rows for plan in plans]))
    assert granted.tolist() == [-(-(20 + 4 * 25 + 2) // 4)] * 3


def test_no_block_is_granted_to_two_rows_at_once() -> None:
    _, plans = measured(*STEPS)
    held: dict[int, int] = {}
    for plan in plans:
        if plan.reset:
            held = {}
        held = {block: row for block, row in held.items() if row not in plan.releases}
        for row, block in zip(plan.grants.rows.tolist(), plan.grants.blocks.tolist(), strict=True):
            assert block not in held and 0 < block <= 800
            held[block] = row
    assert np.unique(list(held.values())).tolist() == list(range(72))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("decode 1x5 & decode 2x5", "two parts of one kind"),
        ("decode 81x5", "81 rows, and the engine 80; use --max-num-seqs 81"),
        ("chunk 3300", "holds 3,300 tokens, and the KV cache 3,200"),
        ("chunks of 3", "there is no step"),
        ("verify 2x9+3 & chunk 4", "time them alone: verify 2x9\\+3"),
    ],
)
def test_a_step_that_cannot_run_is_refused_with_the_numbers(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        measured(name)


def test_the_command_prints_a_line_per_step(quire: Shell) -> None:
    result = quire("bench", "steps", *ENGINE, "--steps", "decode 2x8 & chunk 6,chunk 4", "--json")
    assert result.status == 0, result.err
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [(line["name"], line["num_tokens"]) for line in lines] == [("decode 2x8 & chunk 6", 8), ("chunk 4", 4)]
    assert all(
        line["tokens_per_s"] == pytest.approx(1000 * line["num_tokens"] / line["milliseconds"]) for line in lines
    )


def test_drafts_are_timed_on_a_gpu_alone(quire: Shell) -> None:
    result = quire("bench", "steps", *ENGINE, "--steps", "verify 2x8+3")
    assert result.status == 2 and "on a GPU with --speculative ngram; this is cpu" in result.err


def test_a_wrong_step_is_an_error_of_the_option(quire: Shell) -> None:
    result = quire("bench", "steps", "--steps", "decode 5")
    assert result.status == 2 and "there is no step 'decode 5'" in result.err
