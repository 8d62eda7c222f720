"""Many rows at once behind the real runner: no wrong token."""

from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS
from tests.sim.many_rows import Throng, assert_all_happened, run_throng, torch_body

SMALL = Throng(rows=12, max_prompt=20, max_output=120, num_blocks=40, num_host_blocks=12, step_tokens=64)


def test_every_token_of_a_throng_is_right() -> None:
    body = torch_body(SMALL, "cpu", REFERENCE_ROW_KERNELS)
    seen = run_throng(SMALL, body, 2_000, seed=1)
    assert seen.tokens >= 2_000 and body.num_replayed > seen.steps // 2
    assert_all_happened(seen)
