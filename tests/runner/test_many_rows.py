"""Many rows at once behind the real runner: no wrong token."""

from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.sim.many_rows import ManyRows, assert_all_happened, run_many_rows, torch_runner

SMALL = ManyRows(rows=12, max_prompt=20, max_output=120, num_blocks=40, num_host_blocks=12, step_tokens=64)


def test_all_tokens_of_many_rows_are_right() -> None:
    runner = torch_runner(SMALL, "cpu", REFERENCE_ROW_KERNELS)
    seen = run_many_rows(SMALL, runner, 2_000, seed=1)
    assert seen.tokens >= 2_000 and runner.num_replayed > seen.steps // 2
    assert_all_happened(seen)
