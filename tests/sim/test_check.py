"""`quire check` finds nothing in the tree as it is, and finds planted faults."""

import random
from pathlib import Path

import numpy as np
import pytest

from quire.core.ids import BlockId, IntArray, Row
from quire.core.moves import Place, Tier
from quire.core.request import Sequence
from quire.core.step import FinishedRow, FinishReason, Pending, StepPlan
from quire.engine.oracle_runner import PipelineOracle, TorchOracleRunner, rank_oracle, torch_oracle
from quire.kv.block_pool import BlockPool
from quire.kv.prefix_holds import PrefixHolds
from quire.sched.rows import RowAllocator
from quire.sim.check.check import CheckReport, CheckShard, check, numpy_oracle, possible_pairs, read_report, run_trial
from quire.sim.check.scenario import VOCAB_SIZE, Scenario, ScenarioEvent, draw_scenario
from quire.sim.runners import OracleRunner, SimRows, SimStep
from tests.tiers import choices, examples, is_long, long_only

NUM_WORLDS = examples(40, 300)  # 300 take about half a minute on one core
FAILED_ONCE = [int(line) for line in Path(__file__).with_name("seeds.txt").read_text().splitlines()[1:]]


def test_hundreds_of_random_scenarios_against_the_oracle() -> None:
    report = CheckReport(1)
    for trial in range(NUM_WORLDS):
        run_trial(1_000_000 + trial, report)
    assert report.violations == []
    assert report.preemptions > 50, "the worlds are too comfortable to show anything"
    assert set(report.events) == set(ScenarioEvent), "not everything happened"
    assert report.pairs <= possible_pairs(), "what cannot follow each other did"
    assert len(report.pairs) > (0.8 if is_long() else 0.7) * len(possible_pairs())


@pytest.mark.parametrize("trial_seed", [*FAILED_ONCE[::2], *long_only(FAILED_ONCE[1::2])])
def test_a_scenario_that_failed_once_passes(trial_seed: int) -> None:
    report = CheckReport(0)
    run_trial(trial_seed, report)
    assert report.violations == []


def test_the_integer_model_behind_the_real_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scenarios: grammar masks, partitions, and lost steps of which some copies and writes did not happen."""
    erased: list[Place] = []
    original = TorchOracleRunner.erase

    def erase(self: TorchOracleRunner, place: Place, slots: range) -> None:
        erased.append(place)
        original(self, place, slots)

    monkeypatch.setattr(TorchOracleRunner, "erase", erase)
    report = CheckReport(3)
    for trial in range(12):
        run_trial(3_000_000 + trial, report, torch_oracle, min_tokens=False)
    assert report.violations == []
    assert {ScenarioEvent.ARRIVE_MASKED, ScenarioEvent.LOSE, ScenarioEvent.DEMOTE} <= set(report.events)
    assert {place.tier for place in erased} == set(Tier), "no copy of a lost step was lost with it"


def test_the_integer_model_behind_the_fan_out() -> None:
    """Every plan as a frame, and two ranks that must sample the same, after lost steps and without masks, too."""
    report = CheckReport(3)
    for trial in (6, 7):  # with grammars and lost steps
        run_trial(3_000_000 + trial, report, rank_oracle, min_tokens=False)
    assert report.violations == []
    assert {ScenarioEvent.ARRIVE_MASKED, ScenarioEvent.LOSE, ScenarioEvent.DEMOTE} <= set(report.events)


def test_the_integer_model_in_two_pipeline_stages() -> None:
    """The second stage compares what the first has computed from its own rows and blocks, with two steps in flight."""
    report = CheckReport(3)
    for trial in (6, 7):  # with grammars and lost steps
        run_trial(3_000_000 + trial, report, PipelineOracle, min_tokens=False, num_stages=2)
    assert report.violations == []
    assert {ScenarioEvent.ARRIVE_MASKED, ScenarioEvent.LOSE, ScenarioEvent.DEMOTE} <= set(report.events)


@pytest.mark.parametrize("num_stages", [2, *long_only([3])])
def test_no_row_is_in_two_steps_of_a_pipeline(num_stages: int) -> None:
    report = CheckReport(3)
    for trial in choices(
        (142,), range(80, 160)
    ):  # rows beyond the share of a step hold the blocks that those within it need
        run_trial(trial, report, num_stages=num_stages)
    assert report.violations == []
    assert report.preemptions > 0


def test_a_wrong_slot_of_the_real_runner_is_found() -> None:
    class Forgetful(TorchOracleRunner):
        def launch(self, plan: StepPlan) -> Pending:
            if plan.step % 10 == 9:
                self.erase(Place(Tier.DEVICE, BlockId(1)), range(1))
            return super().launch(plan)

    def forgetful(scenario: Scenario) -> Forgetful:
        return Forgetful(
            vocab_size=VOCAB_SIZE,
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            num_host_blocks=scenario.num_host_blocks,
            max_rows=scenario.max_rows,
            max_length=scenario.max_prompt + scenario.max_output,
        )

    report = CheckReport(0)
    for seed in range(4):
        run_trial(seed, report, forgetful, min_tokens=False)
    assert len(report.violations) > 0


def test_a_seed_reproduces_its_run() -> None:
    first, second = check(200, 9), check(200, 9)
    assert first == second


def test_shards_split_the_scenarios_and_add_up() -> None:
    whole = CheckReport(5)
    for number in range(4):
        run_trial(5 * 1_000_003 + number, whole)
    parts = CheckReport(5)
    for first in range(4):
        parts.add(read_report(check(1, 5, part=CheckShard(first, 4)).to_json()))
    assert parts == whole


# Planted faults.


def _violations(seed: int = 1, steps: int = 3_000) -> int:
    """Until one is found, or so many steps have passed."""
    report = CheckReport(seed)
    trial = 0
    while not report.violations and report.steps < steps:
        run_trial(seed * 1_000_003 + trial, report)
        trial += 1
    return len(report.violations)


def test_a_row_released_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowAllocator.begin_release

    def hasty(self: RowAllocator, sequence: Sequence, reason: FinishReason | None, release_step: int) -> None:
        original(self, sequence, reason, -1)

    monkeypatch.setattr(RowAllocator, "begin_release", hasty)
    assert _violations() > 0


def test_a_lost_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release

    def forgetful(self: BlockPool, blocks: IntArray) -> None:
        original(self, blocks[:-1] if len(blocks) > 1 else blocks)

    monkeypatch.setattr(BlockPool, "release", forgetful)
    assert _violations() > 0


def test_a_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SimRows.emit
    count = 0

    def stutter(self: SimRows, row: Row, token: int) -> FinishedRow | None:
        nonlocal count
        count += 1
        return original(self, row, token + (count % 500 == 0))

    monkeypatch.setattr(SimRows, "emit", stutter)
    assert _violations() > 0


def test_a_prefix_that_outlives_the_memory_it_is_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixHolds, "release_all", lambda self, kv: None)
    assert _violations(seed=3) > 0


def test_a_wrong_slot_is_found() -> None:
    class Misrouted(OracleRunner):
        def launch(self, plan: StepPlan) -> SimStep:
            if plan.step % 10 == 9:
                self._device[1] = [(token + 1, position + 1) for token, position in self._device[1]]  # not by its owner
            return super().launch(plan)

    def misrouted(scenario: Scenario) -> Misrouted:
        return Misrouted(scenario.num_blocks, scenario.block_size, VOCAB_SIZE, scenario.num_host_blocks)

    report = CheckReport(0)
    for seed in range(10):
        run_trial(seed, report, misrouted)
    assert len(report.violations) > 0
    assert all(violation.trial_seed in range(10) and violation.scenario for violation in report.violations)


def test_the_default_runner_is_the_numpy_oracle() -> None:
    scenario = draw_scenario(random.Random(0))
    runner = numpy_oracle(scenario)
    assert isinstance(runner, OracleRunner)
    assert np.all(runner.launch(StepPlan(0)).wait().rows == [])
