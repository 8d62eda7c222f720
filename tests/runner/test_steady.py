"""Steps that are recorded by size: the same tokens as steps that are built, whoever comes, goes, ends or is missing."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.core.step import StepPlan
from quire.engine.oracle import TorchOracle, torch_oracle
from quire.runner.steady import SteadySteps, by_use, steady_sizes
from quire.sim.check import check
from quire.sim.world import World
from tests.runner.plain_choosing import PLAIN_CHOOSING
from tests.runner.plans import emitted, grants, sample, seat
from tests.sim.bodies import Bodies, following

CPU = torch.device("cpu")
PROMPT = [5, 96, 3, 41, 0, 17]


@given(st.integers(1, 600))
def test_sizes_waste_little_and_the_largest_is_what_there_can_be(max_rows: int) -> None:
    sizes = steady_sizes(max_rows)
    assert sizes[-1] == max_rows and list(sizes) == sorted(set(sizes))
    for rows in range(17, max_rows + 1):
        assert min(size for size in sizes if size >= rows) < 2 * rows
    assert sorted(by_use(sizes)) == list(sizes)
    assert by_use(sizes)[:2] == list(dict.fromkeys([max_rows, 1]))


class Recording:
    """A step that says which rows it saw."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.append(rows.tolist())
        return rows.repeat(5, 1)


def test_the_next_size_takes_the_rows_and_nobody_fills_the_rest() -> None:
    step = Recording()
    steady = SteadySteps(step, 16, Row(16), CPU)
    assert steady.launch(np.array([3], np.int32)) is None, "nothing is recorded"
    assert steady.record_next() == 16
    outcome = steady.launch(np.array([3, 7, 9], np.int32))
    assert outcome is not None and outcome.tolist() == [[3, 7, 9]] * 5
    assert step.seen[-1] == [3, 7, 9] + [16] * 13
    assert steady.record_next() == 1
    steady.launch(np.array([7], np.int32))
    assert step.seen[-1] == [7]
    while steady.record_next():
        pass
    steady.launch(np.array([1, 2, 3], np.int32))
    assert step.seen[-1] == [1, 2, 3, 16]
    steady.forget()
    assert steady.launch(np.array([3], np.int32)) is None and steady.num_missing == len(steady_sizes(16))


def test_worlds_in_which_everything_goes_wrong() -> None:
    bodies: list[TorchOracle] = []

    def body(world: World) -> TorchOracle:
        bodies.append(torch_oracle(world, choosing=PLAIN_CHOOSING))
        return bodies[-1]

    assert check(600, 23, body=body, min_tokens=False).violations == []
    assert sum(body.num_replayed for body in bodies) > 100


def test_rows_that_end_in_a_recorded_step_write_nothing_more() -> None:
    """Two rows; the first ends while the host still believes that it cruises."""
    bodies = Bodies(choosing=PLAIN_CHOOSING)
    ending = following(PROMPT, 2)[1]
    opening = StepPlan(
        0,
        seats=(seat(0, PROMPT, end_ids=(ending,)), seat(1, PROMPT[::-1])),
        grants=grants({0: [1, 2], 1: [3, 4]}),
        chunks=(sample(0, 0, 6), sample(1, 0, 6)),
    )
    bodies.run(opening)
    said = bodies.run(StepPlan(1, num_cruising=2))
    assert emitted(said) == {0: ending, 1: following(PROMPT[::-1], 2)[1]} and [end.row for end in said.ended] == [0]
    later = bodies.run(StepPlan(2, num_cruising=2, grants=grants({0: [5], 1: [6]})))
    assert emitted(later) == {1: following(PROMPT[::-1], 3)[2]}
    assert bodies.metal.num_replayed == 2


def test_more_end_tokens_than_the_table_had_room_for() -> None:
    bodies = Bodies(choosing=PLAIN_CHOOSING)
    wide = (*range(200, 209), following(PROMPT, 2)[1])
    bodies.run(
        StepPlan(0, seats=(seat(0, PROMPT, end_ids=wide),), grants=grants({0: [1, 2]}), chunks=(sample(0, 0, 6),))
    )
    said = bodies.run(StepPlan(1, num_cruising=1))
    assert [end.row for end in said.ended] == [0], "the wider table is the one that is read"
