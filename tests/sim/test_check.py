"""`quire check` finds nothing in the tree as it is, and finds planted faults."""

import random

import pytest

from quire.core.request import Sequence
from quire.core.step import FinishReason, StepPlan
from quire.engine.oracle import torch_oracle
from quire.kv.manager import KVManager
from quire.sched.seating import Seating
from quire.sim.check import Report, Trial, check, draw_world, numpy_oracle, run_trial
from quire.sim.oracle import OracleRunner
from quire.sim.rows import Done, Rows


@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_random_workloads_against_the_oracle(seed: int) -> None:
    report = Report(seed)
    for trial in range(1_000):
        run_trial(1_000_000 * seed + trial, report)
    assert report.violations == []
    assert report.preemptions > 1_000, "the worlds are too comfortable to show anything"


def test_the_integer_model_behind_the_real_runner() -> None:
    report = Report(3)
    for trial in range(60):
        run_trial(3_000_000 + trial, report, torch_oracle, min_tokens=False)
    assert report.violations == []
    assert report.preemptions > 50


def test_a_seed_brings_the_same_run_again() -> None:
    first, second = check(3_000, 9), check(3_000, 9)
    assert (first.steps, first.trials, first.preemptions) == (second.steps, second.trials, second.preemptions)


def _violations(seed: int = 1, steps: int = 6_000) -> int:
    return len(check(steps, seed).violations)


def test_a_row_given_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Seating.rise

    def hasty(self: Seating, sequence: Sequence, reason: FinishReason | None, last_planned: int) -> None:
        original(self, sequence, reason, -1)

    monkeypatch.setattr(Seating, "rise", hasty)
    assert _violations() > 0


def test_a_lost_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVManager.close

    def forgetful(self: KVManager, sequence: object) -> None:
        blocks = self._tables[sequence]  # type: ignore[index]
        if len(blocks) > 1:
            blocks.pop()
        original(self, sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(KVManager, "close", forgetful)
    assert _violations() > 0


def test_a_wrong_slot_is_found() -> None:
    class Misrouted(OracleRunner):
        def launch(self, plan: StepPlan) -> Done:
            if plan.step % 50 == 49:
                self._slots[self._block_size] += 1  # somebody else wrote into block 1
            return super().launch(plan)

    found = 0
    for seed in range(20):
        dice = random.Random(seed)
        world = draw_world(dice)
        trial = Trial(world, dice, lambda w: Misrouted(w.num_blocks, w.block_size, 97))
        try:
            trial.run()
        except AssertionError:
            found += 1
    assert found > 0


def test_a_token_told_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rows.emit
    count = 0

    def stutter(self: Rows, row: int, token: int) -> object:
        nonlocal count
        count += 1
        return original(self, row, token + (count % 500 == 0))  # type: ignore[arg-type]

    monkeypatch.setattr(Rows, "emit", stutter)
    assert _violations() > 0


def test_the_default_body_is_the_numpy_oracle() -> None:
    world = draw_world(random.Random(0))
    assert isinstance(numpy_oracle(world), OracleRunner)
