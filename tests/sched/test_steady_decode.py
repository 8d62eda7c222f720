"""Steady steps give what steps planned in full give."""

import random
from dataclasses import replace

import pytest

from quire.core.ids import IntArray
from quire.core.step import FinishReason, Pending, Runner, StepPlan, StepResult
from quire.sched.cost_model import StepShape
from quire.sched.journal.recorder import checksum
from quire.sched.plan_builder import PlanBuilder
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sched.speculation import DraftGovernor, SpeculationPolicy
from quire.sched.steady_decode import SteadyDecode
from quire.sim.runners import FinishedStep, SimRow
from tests.sched.stepping import OPTIMISTIC, Bench
from tests.sched.test_speculation import half, wrong
from tests.tiers import long_only

DRAFTING = replace(OPTIMISTIC, speculation=SpeculationPolicy(max_drafts=3))
BEHIND_HITS = replace(OPTIMISTIC, speculation=SpeculationPolicy(max_drafts=3, hindsight=True, after_hits=True))


def mostly_wrong(row: SimRow, count: int) -> list[int]:
    return (half if row.row_start.tokens[0] == 7 else wrong)(row, count)


def history(seed: int, depth: int, policy: Policy) -> list[object]:
    """Plans, outputs, counters and learned costs of random requests, some of which are aborted or stopped early."""
    draw = random.Random(seed)
    propose = mostly_wrong if policy.speculation.max_drafts else lambda row, count: []
    bench = Bench(depth=depth, block_size=8, blocks=40, rows=6, budget=32, policy=policy, propose=propose, oracle=True)
    seen: list[object] = []
    open_sequences = []
    for _ in range(150):
        bench.now_s += draw.choice((0.0, 0.01, 0.5))
        if draw.random() < 0.08:
            open_sequences.append(
                bench.add([draw.randrange(50) for _ in range(draw.randint(1, 20))], draw.randint(1, 60))
            )
        if open_sequences and draw.random() < 0.04:
            sequence = open_sequences.pop(draw.randrange(len(open_sequences)))
            if draw.random() < 0.5:
                bench.scheduler.abort(sequence.request.id)
            else:
                bench.scheduler.finish(sequence, FinishReason.STOP)
        if draw.random() < 0.03:
            bench.scheduler.reset_cache()
        output = bench.turn()
        seen.append(None if output is None else (output.step, output.sequences.tolist(), output.tokens.tolist()))
        seen.append(repr(bench.scheduler.counters))
    bench.run_out()
    cost = bench.scheduler.cost
    learned = [cost.predict_s(StepShape(rows, 20 * rows)) for rows in range(1, 7)]
    return [[checksum(plan) for plan in bench.plans], bench.emitted, bench.finished, seen, cost.version, learned]


@pytest.mark.parametrize("depth", [0, 2, *long_only([1])])
@pytest.mark.parametrize("policy", [OPTIMISTIC, DRAFTING, BEHIND_HITS], ids=["plain", "drafting", "behind-hits"])
def test_steady_steps_are_those_that_are_planned_in_full(
    depth: int, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_full = 0
    commit = Scheduler._commit

    def counted(scheduler: Scheduler, builder: object) -> object:
        nonlocal num_full
        num_full += 1
        return commit(scheduler, builder)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_commit", counted)
    fast = [history(seed, depth, policy) for seed in range(4)]
    num_with_steady, num_full = num_full, 0
    monkeypatch.setattr(SteadyDecode, "begin", lambda self, plan, expected_s: None)
    assert fast == [history(seed, depth, policy) for seed in range(4)]
    assert num_with_steady < 0.9 * num_full, "few steps were steady"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_token_behind_which_a_row_may_draft_ends_the_steady_steps(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[int] = []
    commit = Scheduler._commit

    def noted(scheduler: Scheduler, builder: PlanBuilder) -> StepPlan | None:
        full.append(builder.step)
        return commit(scheduler, builder)

    def hit_in_one_step(governor: DraftGovernor, result: StepResult, drafting: IntArray) -> bool:
        governor._hit[:] = result.step == 14
        return result.step == 14

    monkeypatch.setattr(Scheduler, "_commit", noted)
    monkeypatch.setattr(DraftGovernor, "note_tokens", hit_in_one_step)
    bench = Bench(depth=depth, block_size=32, policy=BEHIND_HITS)
    bench.add([1, 2, 3], 24)
    bench.run()
    assert 15 + depth in full and not {11, 12, 13, 14} & set(full)


def test_a_row_that_reaches_its_length_ends_the_steady_steps() -> None:
    """At depth 1 a plan is made before the result that ends the row: nothing is left to plan until it comes."""
    bench = Bench(depth=1, block_size=8)
    sequence = bench.add([1, 2, 3], 12)
    bench.run()
    assert len(bench.emitted[sequence.id]) == 12
    assert sum(plan.num_tokens for plan in bench.plans) == 3 + 11


def test_a_request_that_fails_at_once_is_reported_with_the_next_result_of_steady_steps() -> None:
    bench = Bench(depth=1, block_size=16)
    bench.add([1, 2, 3], 60)
    for _ in range(8):
        bench.turn()  # all rows decode, and the next steps are made
    late = bench.add([4, 5, 6], 5)
    bench.scheduler.fail(late.group)
    output = bench.turn()
    assert output is not None and [over.sequence for over in output.finished] == [late.id]


class SameArrays:
    """A runner whose results name equal rows by one array, as one that repeats a captured step may."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._arrays: dict[bytes, IntArray] = {}

    def launch(self, plan: StepPlan) -> Pending:
        result = self._runner.launch(plan).wait()
        return FinishedStep(result._replace(rows=self._arrays.setdefault(result.rows.tobytes(), result.rows)))


def test_tokens_are_of_the_sequence_that_has_the_row_now() -> None:
    bench = Bench(block_size=16)
    bench.recorder.runner = SameArrays(bench.recorder.runner)
    sequences = []
    for _ in range(3):
        sequences.append(bench.add([1, 2, 3], 9))  # each in the row of the one before
        bench.run()
    assert [len(bench.emitted[sequence.id]) for sequence in sequences] == [9, 9, 9]
    assert len(set(map(tuple, bench.emitted.values()))) == 1
