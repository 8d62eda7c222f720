"""Steps that are recorded by shape: the same tokens as steps that are built, whoever comes, goes or ends."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.core.step import StepPlan
from quire.engine.oracle import TorchOracle, torch_oracle
from quire.kernels.choosing import PADDING
from quire.runner.recorded import ChunkArrays, ChunkInputs, RecordedSteps, Shape
from quire.runner.shapes import shapes_to_record
from quire.sim.check import check
from quire.sim.world import World
from tests.runner.plain_choosing import PLAIN_CHOOSING
from tests.runner.plans import emitted, grants, sample, seat
from tests.sim.bodies import Bodies, following

CPU = torch.device("cpu")
NOBODY = Row(16)
PROMPT = [5, 96, 3, 41, 0, 17]


@given(max_rows=st.integers(1, 600), max_tokens=st.integers(1, 9000))
def test_shapes_waste_little_and_come_in_the_order_of_their_use(max_rows: int, max_tokens: int) -> None:
    shapes = shapes_to_record(max_rows, max_tokens)
    assert len(set(shapes)) == len(shapes) and len(shapes) < 150
    assert shapes[:2] == list(dict.fromkeys([Shape(max_rows), Shape(1)])) or max_rows == 1
    decodes = [shape for shape in shapes if shape.chunks == 0]
    for rows in range(1, max_rows + 1):
        best = min(shape.rows for shape in decodes if shape.holds(Shape(rows)))
        assert best < 2 * rows or rows == best, "a step computes less than twice what it needs"
    for tokens in (1, min(7, max_tokens), max_tokens // 3, max_tokens):
        if tokens:
            assert any(shape.holds(Shape(max_rows, 1, tokens)) for shape in shapes), tokens
            assert any(shape.holds(Shape(0, 1, tokens)) for shape in shapes), tokens


class Recording:
    """A step that says what it saw."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.chunks: dict[str, list[int]] = {}

    def __call__(self, rows: torch.Tensor, chunks: ChunkInputs | None) -> torch.Tensor:
        self.rows = rows.tolist()
        self.chunks = {} if chunks is None else {name: value.tolist() for name, value in chunks._asdict().items()}
        everybody = rows if chunks is None else torch.cat([rows, chunks.rows])
        return everybody.repeat(5, 1)


def test_the_next_shape_takes_the_rows_and_nobody_fills_the_rest() -> None:
    step = Recording()
    recorded = RecordedSteps(step, [Shape(16), Shape(1), Shape(4)], NOBODY, CPU)
    assert recorded.launch(np.array([3], np.int32)) is None, "nothing is recorded"
    assert recorded.record_next() == Shape(16)
    outcome = recorded.launch(np.array([3, 7, 9], np.int32))
    assert outcome is not None and outcome.tolist() == [[3, 7, 9]] * 5
    assert step.rows == [3, 7, 9] + [NOBODY] * 13
    assert recorded.record_next() == Shape(1)
    recorded.launch(np.array([7], np.int32))
    assert step.rows == [7]
    while recorded.record_next():
        pass
    recorded.launch(np.array([1, 2, 3], np.int32))
    assert step.rows == [1, 2, 3, NOBODY]
    recorded.forget()
    assert recorded.launch(np.array([3], np.int32)) is None and recorded.num_missing == 3


def test_chunks_come_behind_the_rows_and_nobodys_are_empty() -> None:
    step = Recording()
    recorded = RecordedSteps(step, [Shape(2), Shape(2, 3, 8)], NOBODY, CPU)
    while recorded.record_next():
        pass
    chunks = ChunkArrays(
        tokens=np.array([11, 12, 13, 14, 15], np.int32),
        positions=np.array([4, 5, 6, 0, 1]),
        token_rows=np.array([5, 5, 5, 6, 6]),
        starts=np.array([0, 3, 5]),
        ends=np.array([7, 2]),
        rows=np.array([5, 6]),
        speaking=np.array([5, PADDING]),
    )
    outcome = recorded.launch(np.array([9], np.int32), chunks)
    assert outcome is not None and outcome.tolist() == [[9, 5, 6]] * 5
    assert step.rows == [9, NOBODY]
    assert step.chunks == {
        "tokens": [11, 12, 13, 14, 15, 0, 0, 0],
        "positions": [4, 5, 6, 0, 1, 0, 0, 0],
        "token_rows": [5, 5, 5, 6, 6, NOBODY, NOBODY, NOBODY],
        "starts": [0, 3, 5, 5],
        "ends": [7, 2, 0],
        "rows": [5, 6, NOBODY],
        "speaking": [5, PADDING, PADDING],
    }
    assert recorded.launch(np.array([9], np.int32), chunks._replace(rows=np.arange(4))) is None, "a chunk too many"


def test_the_pace_is_that_of_the_smallest_decode_and_the_largest_step() -> None:
    step = Recording()
    recorded = RecordedSteps(step, [Shape(4), Shape(1), Shape(4, 2, 6)], NOBODY, CPU)
    assert recorded.pace() is None
    recorded.record_next()
    assert recorded.pace() is None, "no step with chunks"
    while recorded.record_next():
        pass
    seen: list[int] = []
    recorded_step = recorded._step
    recorded._step = lambda rows, chunks: (seen.append(len(rows)), recorded_step(rows, chunks))[1]
    pace = recorded.pace()
    assert pace is not None and pace.decode_s > 0 and pace.token_s > 0
    assert set(seen) == {1, 4} and step.rows == [NOBODY] * 4, "nobody takes part"


def test_worlds_in_which_everything_goes_wrong() -> None:
    bodies: list[TorchOracle] = []

    def body(world: World) -> TorchOracle:
        bodies.append(torch_oracle(world, choosing=PLAIN_CHOOSING))
        return bodies[-1]

    assert check(2_000, 23, body=body, min_tokens=False).violations == []
    assert sum(body.num_replayed for body in bodies) > 900


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
    assert bodies.metal.num_replayed == 3


def test_more_end_tokens_than_the_table_had_room_for() -> None:
    bodies = Bodies(choosing=PLAIN_CHOOSING)
    wide = (*range(200, 209), following(PROMPT, 2)[1])
    bodies.run(
        StepPlan(0, seats=(seat(0, PROMPT, end_ids=wide),), grants=grants({0: [1, 2]}), chunks=(sample(0, 0, 6),))
    )
    said = bodies.run(StepPlan(1, num_cruising=1))
    assert [end.row for end in said.ended] == [0], "the wider table is the one that is read"
