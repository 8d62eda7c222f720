"""Many rows at once behind the real runner: no wrong token, with drafts and without."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.sim.many_rows import ManyRows, assert_all_happened, run_many_rows, torch_runner

SMALL = ManyRows(rows=12, max_prompt=20, max_output=120, num_blocks=40, num_host_blocks=12, step_tokens=64)


@pytest.mark.parametrize("max_drafts", [0, 7])
def test_all_tokens_of_many_rows_are_right(max_drafts: int, dose: Callable[[int], int]) -> None:
    load, num_tokens = replace(SMALL, max_drafts=max_drafts), dose(2_000)
    runner = torch_runner(load, "cpu", REFERENCE_ROW_KERNELS)
    seen = run_many_rows(load, runner, num_tokens, seed=1)
    assert seen.tokens >= num_tokens and runner.num_replayed > seen.steps // 2
    assert_all_happened(load, seen)
    assert seen.scheduler is not None
    counters = seen.scheduler.counters
    print(f"{seen.tokens} tokens, {counters.drafted_tokens} drafted, {counters.accepted_tokens} accepted")
