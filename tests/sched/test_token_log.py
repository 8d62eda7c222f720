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
        assert log.next_line == step
        log.append(np.array(ordered, np.int32), np.array(tokens, np.int32))
        logged.append(dict(zip(ordered, tokens, strict=True)))
        for row in range(4):
            expected = [line[row] for line in logged[oldest:] if row in line]
            assert log.gather(Row(row), oldest).tolist() == expected


def test_a_log_with_short_rows_does_not_grow() -> None:
    log = TokenLog(2)
    for step in range(10_000):
        if log.full:
            log.add_page(step - 5)
        log.append(np.array([0], np.int32), np.array([step], np.int32))
    assert len(log._pages) <= 2
