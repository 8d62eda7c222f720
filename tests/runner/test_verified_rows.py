"""What greedy rows with drafts emitted, as a result in passes: compared with one row after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.step import FinishReason
from quire.kernels.row_interface import DraftOutcome
from quire.runner.verification import greedy_result

GOES_ON, STOPS, ENDS, BROKEN = (1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1), (1, 0, 0, 0)  # alive, finite, stop, length


@st.composite
def steps(draw) -> tuple[list[int], list[int], DraftOutcome]:
    """Rows in ascending order, drafts of each, and how far each came."""
    rows = sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=6)))
    counts, advances, lines = [], [], []
    for _ in rows:
        count = draw(st.integers(0, 5))
        advance = draw(st.integers(0, 1 + count))
        last = draw(st.sampled_from([GOES_ON, STOPS, ENDS, BROKEN]))
        counts.append(count)
        advances.append(advance)
        for number in range(1 + count):
            state = (0, 0, 0, 0) if number >= advance else last if number == advance - 1 else GOES_ON
            lines.append((draw(st.integers(0, 99)), *state))
    return rows, counts, DraftOutcome(np.array(lines, dtype=np.int64).T.copy(), np.array(advances, dtype=np.int32))


@given(steps())
def test_each_pass_has_the_next_token_of_the_rows_that_have_one(step) -> None:
    rows, counts, drafted = step
    result, numbers = greedy_result(3, np.array(rows, np.int32), np.array(counts, np.int32), drafted)
    said: dict[int, list[int]] = {row: [] for row in rows}
    for number, (some, tokens) in enumerate(result.each_pass()):
        assert some.tolist() == sorted(some.tolist()) and len(set(some.tolist())) == len(some)
        for row, token in zip(some.tolist(), tokens.tolist(), strict=True):
            assert len(said[row]) == number, "a row emits in the pass of its own number"
            said[row].append(token)
    assert numbers.tolist() == [number for number, each in enumerate(result.each_pass()) for _ in each[0]]
    ended, at = {}, 0
    for row, count, advance in zip(rows, counts, drafted.advances.tolist(), strict=True):
        lines = drafted.outcome[:, at : at + advance].T.tolist()
        assert said[row] == [token for token, _, finite, _, _ in lines if finite]
        if lines and lines[-1][1:] != list(GOES_ON):
            reasons = {STOPS: FinishReason.STOP, ENDS: FinishReason.LENGTH, BROKEN: FinishReason.ERROR}
            ended[row] = reasons[tuple(lines[-1][1:])]
        at += 1 + count
    assert {int(each.row): each.reason for each in result.ended} == ended
    assert result.step == 3
