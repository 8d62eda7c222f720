"""The rows of a pipeline are divided among its steps: even shares, each row in turn, none in two steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.sched.pipelining import MicroBatches
from quire.sched.plan_builder import PlanBuilder
from tests.sched.stepping import OPTIMISTIC, Bench, counting


def take(batches: MicroBatches, decoding: list[int], step: int, last_absorbed: int) -> list[int]:
    """The rows of the next step, which is taken if there are any."""
    rows = np.array(decoding, dtype=np.intp)
    in_flight, deferred = batches.divide(rows, last_absorbed)
    builder = PlanBuilder(step, 0.0, 100)
    builder.paused = [Row(row) for row in (*in_flight.tolist(), *deferred.tolist())]
    taken = [row for row in decoding if row not in builder.paused]
    if taken:
        batches.note(builder, rows)
    return taken


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@given(num_rows=st.integers(1, 13))
def test_a_full_pipe_computes_every_row_once_in_as_many_steps_as_stages(num_stages: int, num_rows: int) -> None:
    batches, rows = MicroBatches(13, num_stages), list(range(num_rows))
    steps = [take(batches, rows, step, max(step - num_stages, -1)) for step in range(4 * num_stages)]
    for start in range(0, len(steps), num_stages):
        period = steps[start : start + num_stages]
        assert sorted(row for taken in period for row in taken) == rows
        assert max(len(taken) for taken in period) == -(-num_rows // num_stages)


def test_a_row_whose_token_is_not_known_waits_for_it() -> None:
    batches = MicroBatches(2, 2)
    assert take(batches, [0], 0, -1) == [0]
    assert take(batches, [0], 1, -1) == []
    assert take(batches, [0, 1], 1, -1) == [1]
    assert take(batches, [0, 1], 2, 0) == [0]


def test_rows_that_skip_a_step_leave_their_tokens_to_prompts() -> None:
    """Six rows in two stages: steps of three, so that steps of 8 tokens have room for 5 of a prompt."""
    bench = Bench(budget=8, depth=1, policy=replace(OPTIMISTIC, num_stages=2))
    for number in range(6):
        bench.add(counting(number, 2), 40)
    bench.turns(12)
    prompt = bench.add(counting(7, 13), 1)
    bench.turns(4)
    assert [plan.num_decoding for plan in bench.plans[-4:]] == [3] * 4
    assert [(chunk.start, chunk.length) for chunk in bench.chunks_of(prompt)] == [(0, 5), (5, 5), (10, 3)]
    bench.run()
