"""The cost of planning does not grow with the queue. Counted in calls, not in time."""

import sys
from types import FrameType

import pytest

from quire.bench.scheduler import (
    ROUND,
    TURNOVERS,
    WARM,
    InstructionCounter,
    PlanningBench,
    PlanningSetting,
    RandomPrompts,
    measure,
)
from tests.sched.inspection import state_of


def bench(rows: int, waiting: int, turnover: float) -> PlanningBench:
    return PlanningBench(
        PlanningSetting(rows, waiting, turnover), RandomPrompts(0), InstructionCounter(), num_steps=200
    )


def calls_of_a_round(built: PlanningBench) -> int:
    """Every call of Python or C that planning and absorbing make in a round."""
    count = 0
    scheduler = built.scheduler
    inside = {type(scheduler).plan.__code__, type(scheduler).absorb.__code__}
    depth = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count, depth
        if frame.f_code in inside and event in ("call", "return"):
            depth += 1 if event == "call" else -1
        elif depth and event in ("call", "c_call"):
            count += 1

    sys.setprofile(count_call)
    try:
        built.round()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("turnover", TURNOVERS)
def test_calls_do_not_grow_with_the_queue(turnover: float) -> None:
    few, many = (calls_of_a_round(bench(64, waiting, turnover)) for waiting in (100, 5000))
    assert few > ROUND, "nothing was counted"
    assert many <= 1.02 * few


def test_a_queue_costs_few_calls_in_a_steady_step() -> None:
    """With nothing waiting steps repeat the one before; with a queue each is planned in full."""
    none, many = (calls_of_a_round(bench(64, waiting, 0.0)) for waiting in (0, 2000))
    assert many - none <= 44 * (ROUND + WARM)


def test_calls_of_a_steady_step_grow_with_evictions_alone() -> None:
    """Sixteen times the rows need sixteen times the blocks; everything but their eviction is done in bulk."""
    few, many = (calls_of_a_round(bench(rows, 0, 0.0)) for rows in (64, 1024))
    assert many <= 2.5 * few


def test_a_steady_round_meets_the_conditions() -> None:
    built = bench(32, 50, 0.0)
    state, tree = state_of(built.scheduler), built.scheduler.kv.tree
    assert tree is not None
    evicted, assigned = tree.num_evicted, set(state.rows.emitter_ids.tolist())
    built.round()
    assert tree.num_evicted - evicted >= 32 * ROUND // 16, "blocks came free without an eviction"
    assert set(state.rows.emitter_ids.tolist()) == assigned, "a row changed its sequence"
    assert len(state.waiting) == 50 and state.calendar.num_decoding == 32
    assert state.counters.preemptions == 0


def test_turnover_is_one_row_of_a_hundred_in_each_step() -> None:
    built = bench(100, 50, 0.01)
    assigned = set(state_of(built.scheduler).rows.emitter_ids.tolist())
    built.round()
    gone = assigned - set(state_of(built.scheduler).rows.emitter_ids.tolist())
    assert len(gone) == pytest.approx(ROUND + WARM, rel=0.25)
    assert 48 <= built.scheduler.num_queued <= 53
    assert state_of(built.scheduler).calendar.num_decoding >= 95


def test_every_setting_gets_a_line_and_every_round_a_figure() -> None:
    lines = measure((4, 8), (0, 5), rounds=2)
    assert {line.setting for line in lines} == {
        PlanningSetting(r, w, t) for r in (4, 8) for w in (0, 5) for t in TURNOVERS
    }
    assert all(len(line.us) == 2 and line.quartile_us == min(line.us) > 0 for line in lines)
    assert len({len(line.instructions) for line in lines}) == 1, "instructions are counted for all settings or for none"


def test_an_admission_and_a_finish_cost_fewer_than_five_hundred_calls() -> None:
    """With turnover a request replaces another in every step; without, no request starts or finishes. With a queue
    every step is planned in full."""
    busy, none = (calls_of_a_round(bench(100, 50, turnover)) for turnover in (0.01, 0.0))
    assert busy - none < 500 * (ROUND + WARM)
