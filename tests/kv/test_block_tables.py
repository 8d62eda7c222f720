"""Block tables against lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.kv.manager import BlockTables

ROWS = 4
ACTS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, ROWS - 1), st.lists(st.integers(1, 99), max_size=12)),
    st.tuples(st.just("each"), st.sets(st.integers(0, ROWS - 1)), st.integers(1, 50)),
    st.tuples(st.just("clear"), st.integers(0, ROWS - 1), st.none()),
)


@given(st.lists(ACTS, max_size=40))
def test_tables_hold_what_was_appended_in_order(acts: list[tuple[str, object, object]]) -> None:
    tables = BlockTables(ROWS)
    model: list[list[int]] = [[] for _ in range(ROWS)]
    for act, who, what in acts:
        if act == "append":
            assert isinstance(who, int) and isinstance(what, list)
            tables.append(Row(who), np.array(what, dtype=np.int32))
            model[who] += what
        elif act == "each":
            assert isinstance(who, set) and isinstance(what, int)
            rows = sorted(who)
            blocks = [what + row for row in rows]
            tables.append_each(np.array(rows, dtype=np.intp), np.array(blocks, dtype=np.int32))
            for row, block in zip(rows, blocks, strict=True):
                model[row].append(block)
        else:
            assert isinstance(who, int)
            tables.clear(Row(who))
            model[who] = []
        assert [tables.of(Row(row)).tolist() for row in range(ROWS)] == model
        assert tables.lengths.tolist() == [len(line) for line in model]
        assert all(tables.last(Row(row)) == line[-1] for row, line in enumerate(model) if line)
