"""Positions and appointments against rows that are looked at in every step."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.sched.decode_calendar import DecodeCalendar

ROWS = 4
SIZE = 3


@dataclass(slots=True)
class Walker:
    position: int  # to be computed next
    last: int
    capacity: int

    @property
    def is_finishing(self) -> bool:
        return self.position > self.last


@given(st.data())
def test_every_row_is_due_exactly_when_its_table_is_full(data: st.DataObject) -> None:
    calendar = DecodeCalendar(ROWS, SIZE)
    rows: dict[int, Walker] = {}
    for step in range(data.draw(st.integers(1, 40))):
        for row in sorted(set(range(ROWS)) - rows.keys()):
            if data.draw(st.booleans()):
                position, more = data.draw(st.integers(0, 7)), data.draw(st.integers(-1, 9))
                capacity = -(-position // SIZE) * SIZE
                rows[row] = Walker(position, position + more, capacity)
                calendar.start(Row(row), step, position, position + more, capacity)
        expected = sorted(
            r for r, walker in rows.items() if not walker.is_finishing and walker.position == walker.capacity
        )
        due = calendar.due(step)
        assert sorted(due.tolist()) == expected
        paused = {row for row in expected if data.draw(st.integers(0, 3)) == 0}
        if paused and paused == {row for row, walker in rows.items() if not walker.is_finishing}:
            for row in paused:  # no row would compute: the step is planned again
                calendar.book_again(Row(row), step)
            assert sorted(calendar.due(step).tolist()) == sorted(paused)
        fed = np.array([row for row in due.tolist() if row not in paused], dtype=np.intp)
        calendar.book_granted(fed, step)
        for row in fed.tolist():
            rows[row].capacity += SIZE
        for row in paused:
            calendar.book_paused(Row(row))
        moving = [walker for row, walker in rows.items() if not walker.is_finishing and row not in paused]
        assert calendar.num_decoding == len(moving) + len(paused)
        assert calendar.num_finishing == len(rows) - calendar.num_decoding
        for row, walker in rows.items():
            assert calendar.is_decoding(Row(row)) == (not walker.is_finishing)
            assert calendar.is_finishing(Row(row)) == walker.is_finishing
            planned = walker.position - (row in paused or walker.is_finishing)
            assert calendar.position_at(Row(row), step) == planned
        if not paused:
            assert calendar.num_context(step) == sum(walker.position for walker in moving)
        for walker in moving:
            walker.position += 1
        for row in [row for row in rows if data.draw(st.integers(0, 9)) == 0]:
            calendar.stop(Row(row))
            del rows[row]


def test_a_row_that_never_decoded_may_stop() -> None:
    calendar = DecodeCalendar(2, 4)
    calendar.stop(Row(1))
    assert (calendar.num_decoding, calendar.num_finishing) == (0, 0)
    assert not calendar.is_decoding(Row(1)) and not calendar.is_finishing(Row(1))


def test_an_old_appointment_does_not_count_for_the_next_in_the_row() -> None:
    calendar = DecodeCalendar(1, 4)
    calendar.start(Row(0), 0, 2, 90, 4)  # due in step 2
    calendar.stop(Row(0))
    calendar.start(Row(0), 1, 0, 90, 8)  # due in step 9
    assert [step for step in range(1, 12) if len(calendar.due(step))] == [9]


@dataclass(slots=True)
class Drafter:
    """A row whose steps in flight may be longer than it knows."""

    position: int  # the lowest that it can compute next
    last: int
    num_blocks: int
    in_flight: list[int]  # drafts of each step

    def reach(self) -> int:
        return min(self.position + sum(self.in_flight), self.last)


@given(st.data())
def test_a_drafting_row_is_short_exactly_when_its_table_may_not_reach(data: st.DataObject) -> None:
    """Two steps in flight; each row gains 0 to all of its drafts when a step is absorbed."""
    calendar = DecodeCalendar(ROWS, SIZE)
    tables = np.zeros(ROWS, dtype=np.int64)
    rows = {row: Drafter(row, data.draw(st.integers(row, 40)), 1 + row // SIZE, []) for row in range(ROWS)}
    for row, drafter in rows.items():
        tables[row] = drafter.num_blocks
        calendar.start(Row(row), 0, drafter.position, drafter.last, drafter.num_blocks * SIZE)
    planned: list[dict[int, int]] = []  # drafts of the rows of each step
    for step in range(30):
        decoding = [row for row in rows if row + step <= rows[row].last]  # by the least that a step gains
        due, short = calendar.due(step).tolist(), calendar.short(step, tables).tolist()
        assert calendar.num_decoding == len(decoding) and calendar.num_finishing == ROWS - len(decoding)
        for row in decoding:
            drafter, drafting = rows[row], calendar.is_drafting(Row(row))
            lacks = drafter.reach() >= tables[row] * SIZE
            assert (row in due, row in short) == (lacks and not drafting, lacks and drafting), (row, drafter)
            assert calendar.position_at(Row(row), step) == min(drafter.position, drafter.last)
            assert drafting or not any(drafter.in_flight)
            assert calendar.reach(Row(row), step) == drafter.reach()
        calendar.book_granted(np.array(due, dtype=np.intp), step)
        tables[due] += 1
        drafts = dict.fromkeys(decoding, 0)
        for row in decoding:
            most = rows[row].last - rows[row].reach()
            drafts[row] = data.draw(st.integers(0, min(4, most))) if most > 0 else 0
            tables[row] = max(tables[row], (rows[row].reach() + drafts[row]) // SIZE + 1)
            rows[row].position += 1
            rows[row].in_flight.append(drafts[row])
        chosen = {row: count for row, count in drafts.items() if count}
        calendar.book_drafts(np.array([*chosen], np.intp), np.array([*chosen.values()], np.int32), tables)
        planned.append(drafts)
        if step >= 2:
            absorbed = {row: count for row, count in planned[step - 2].items() if count}
            gained = [data.draw(st.integers(0, count)) for count in absorbed.values()]
            counts = np.array([*absorbed.values()], np.int32)
            calendar.absorb_drafts(np.array([*absorbed], np.intp), counts, np.array(gained, np.int32))
            for row in planned[step - 2]:
                rows[row].in_flight.pop(0)
            for row, more in zip(absorbed, gained, strict=True):
                rows[row].position += more
