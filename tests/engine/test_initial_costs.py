"""Initial step costs, from two timed steps, and the default ITL target from them."""

from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.build import build
from quire.engine.build_scheduler import first_costs, make_scheduler
from quire.engine.resolved_config import MachineInfo, resolve
from quire.runner.cuda_graphs import StepTimes
from quire.sched.batching import MAX_STEP_S
from quire.sched.cost_model import CostTable, StepShape
from quire.sched.pacing import TTFT_PER_ITL, usual_itl_s
from tests.engine.test_config import PER_TOKEN, SPEC

GPU = MachineInfo("cuda", free_bytes=1 << 36, fast_bfloat16=True, num_cores=2, total_bytes=1 << 36)


def table(pace: StepTimes | None) -> CostTable:
    return first_costs(
        pace, num_parameters=8 * 10**9, weight_bytes=16 * 10**9, kv_bytes_per_token=2**17, largest_chunk=2048
    )


def test_initial_costs_predict_the_measured_steps() -> None:
    costs = table(StepTimes(decode_s=0.0045, token_s=2.2e-5))
    assert costs.predict_s(StepShape(num_rows=1)) == pytest.approx(0.0045, rel=0.01)
    assert costs.predict_s(StepShape(num_chunk_tokens=2048)) == pytest.approx(2048 * 2.2e-5, rel=0.01)
    longer = costs.predict_s(StepShape(num_rows=64, num_context=64 * 1024)) - costs.predict_s(StepShape(num_rows=64))
    assert longer == pytest.approx(64 * 1024 * 2**17 / (16e9 / 0.0045)), "keys are read as fast as weights"
    assert table(None).predict_s(StepShape(num_rows=1)) > 0.0045, "the default rates are those of an older GPU"


@pytest.mark.parametrize(("decode_s", "aim_s"), [(0.0045, 0.0135), (0.0013, 0.01), (0.1, 0.3)])
def test_default_targets(decode_s: float, aim_s: float) -> None:
    assert usual_itl_s(decode_s) == pytest.approx(aim_s)
    resolved = resolve(EngineConfig(), SPEC, PER_TOKEN, GPU)
    usual = make_scheduler(EngineConfig(), resolved, table(None), aim_s)
    explicit = make_scheduler(EngineConfig(itl_target_ms=40), resolved, table(None), aim_s)
    plain = make_scheduler(EngineConfig(), resolved, table(None))
    assert (usual.policy.itl_target_s, explicit.policy.itl_target_s, plain.policy.itl_target_s) == (aim_s, 0.04, None)
    assert usual.policy.itl_per_decode > 1 and explicit.policy.itl_per_decode == 0.0
    both = make_scheduler(EngineConfig(itl_target_ms=40, ttft_target_ms=250), resolved, table(None), aim_s)
    targets_s = [each.policy.ttft_target_s for each in (usual, explicit, both, plain)]
    assert targets_s == [TTFT_PER_ITL * aim_s, pytest.approx(TTFT_PER_ITL * 0.04), 0.25, None]


def test_a_server_on_a_cpu_limits_the_time_of_a_step_and_no_other_engine_does(shallow_model_path: Path) -> None:
    """Its costs are timed at the start, so that this holds for the first prompt too."""
    config = EngineConfig(str(shallow_model_path), device="cpu", max_model_len=512, kv_cache_memory=64 << 20)
    scheduler, offline = (build(config, serving=serving).engine.scheduler for serving in (True, False))
    assert (scheduler.policy.max_step_s, offline.policy.max_step_s) == (MAX_STEP_S, None)
    assert scheduler.policy.itl_target_s is not None and offline.policy.itl_target_s is None
    assert make_scheduler(EngineConfig(), resolve(config, SPEC, PER_TOKEN, GPU), table(None)).policy.max_step_s is None
