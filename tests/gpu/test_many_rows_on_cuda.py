"""A million tokens on the device, each of which is right, whatever happens to those who get them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import select_kernels
from tests.sim.many_rows import ManyRows, assert_all_happened, run_many_rows, torch_runner

LARGE = ManyRows(rows=256, max_prompt=128, max_output=512, num_blocks=3_000, num_host_blocks=800, step_tokens=1_024)
FEWER = replace(LARGE, rows=64, num_blocks=750, max_drafts=7)


@pytest.mark.parametrize(
    "load", [LARGE, replace(LARGE, max_drafts=1), FEWER], ids=["without drafts", "1 draft", "64 rows, 7 drafts"]
)
def test_a_million_tokens_are_right(load: ManyRows, dose: Callable[[int], int]) -> None:
    choice, num_tokens = select_kernels("cuda"), dose(1_000_000)
    assert choice.row_kernels is not None, choice.reason
    drafts = choice.draft_kernels or REFERENCE_DRAFT_KERNELS
    runner = torch_runner(load, "cuda", choice.row_kernels, choice.copy_blocks, drafts)
    seen = run_many_rows(load, runner, num_tokens, seed=1)
    assert seen.tokens >= num_tokens and runner.num_replayed > seen.steps // 2
    assert_all_happened(load, seen)
    assert seen.scheduler is not None
    drafted, accepted = seen.scheduler.counters.drafted_tokens, seen.scheduler.counters.accepted_tokens
    print(f"{seen.tokens} tokens, {seen.steps} steps, {drafted} drafted, {accepted} accepted")
