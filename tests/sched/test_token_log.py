"""The token log against a list of pairs per row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.sched.rows import TokenLog


@given(st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=400), st.integers(1, 50))
def test_a_row_has_its_tokens_since_its_assignment(steps: list[set[int]], keep: int) -> None:
    log = TokenLog(4)
    logged: list[dict[int, int]] = []
    for step, rows in enumerate(steps):
        oldest = max(0, step - keep)  # older steps are not read
        if log.full:
            log.add_page(oldest)
        ordered = sorted(rows)
        tokens = [100 * step + row for row in ordered]
        log.append(step, np.array(ordered, np.int32), np.array(tokens, np.int32))
        logged.append(dict(zip(ordered, tokens, strict=True)))
        for row in range(4):
            expected = [line[row] for line in logged[oldest:] if row in line]
            assert log.gather(Row(row), oldest).tolist() == expected


def test_a_log_with_short_rows_does_not_grow() -> None:
    log = TokenLog(2)
    for step in range(10_000):
        if log.full:
            log.add_page(step - 5)
        log.append(step, np.array([0], np.int32), np.array([step], np.int32))
    assert len(log._pages) <= 2


def test_lost_steps_hold_nothing_and_what_came_before_them_stays() -> None:
    for num_lost in (1, 5, 200):
        log = TokenLog(2)
        for step in range(60):
            log.append(step, np.array([1], np.int32), np.array([step], np.int32))
        log.restart(60 + num_lost)
        if log.full:
            log.add_page(0)
        log.append(60 + num_lost, np.array([1], np.int32), np.array([7], np.int32))
        assert log.gather(Row(1), 58).tolist() == [58, 59, 7]
        assert log.gather(Row(1), 61).tolist() == [7]
        assert log.gather(Row(0), 0).tolist() == []


def test_lost_steps_do_not_bring_forgotten_ones_back() -> None:
    log = TokenLog(1)
    for step in range(64):
        log.append(step, np.array([0], np.int32), np.array([step], np.int32))
    log.add_page(60)
    log.restart(70)
    assert log.gather(Row(0), 60).tolist() == [60, 61, 62, 63]
