"""A million tokens on the device, each of which is right, whatever happens to those who get them."""

from quire.kernels.select import select_kernels
from tests.sim.many_rows import ManyRows, assert_all_happened, run_many_rows, torch_runner

LARGE = ManyRows(rows=256, max_prompt=128, max_output=512, num_blocks=3_000, num_host_blocks=800, step_tokens=1_024)
NUM_TOKENS = 1_000_000


def test_a_million_tokens_are_right() -> None:
    choice = select_kernels("cuda")
    assert choice.row_kernels is not None, choice.reason
    runner = torch_runner(LARGE, "cuda", choice.row_kernels, choice.copy_blocks)
    seen = run_many_rows(LARGE, runner, NUM_TOKENS, seed=1)
    assert seen.tokens >= NUM_TOKENS and runner.num_replayed > seen.steps // 2
    assert_all_happened(seen)
