"""Row allocation of the persistent batch, and the log of emitted tokens.

Invariant (a) of run-ahead: a row and its blocks are released only after the last step that touched them has been
absorbed. Does not depend on blocks, budgets or queues.
"""

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray, Row, SequenceId
from quire.core.request import Sequence, SequenceState
from quire.core.step import FinishReason, StepResult

NO_TOKEN = -1
_NO_TOKEN = np.array(NO_TOKEN, dtype=np.int32)  # numpy compares with it in half the time
_PAGE = 64  # lines


class TokenLog:
    """Emitted tokens as pages of [lines, rows], gathered per row when it is released. Old pages are dropped.

    A line holds at most one token of each row: a step is one line, or as many as its result has passes.
    """

    __slots__ = ("_first_line", "_max_rows", "_num_lines", "_pages", "_spare", "_unwritten")

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._pages: deque[IntArray] = deque([self._blank()])
        self._spare: list[IntArray] = []
        self._first_line = 0  # of the pages that are kept
        self._num_lines = 0
        self._unwritten: list[tuple[IntArray, IntArray]] = []  # rows and tokens of the latest lines, in the last page

    @property
    def full(self) -> bool:
        """Whether `add_page` must come before the next line."""
        return self._num_lines == len(self._pages) * _PAGE

    @property
    def next_line(self) -> int:
        return self._first_line + self._num_lines

    def append(self, rows: IntArray, tokens: IntArray) -> None:
        """Note one token of each of these rows. Both arrays are kept: they are read when a row is gathered."""
        self._unwritten.append((rows, tokens))
        self._num_lines += 1

    def _write(self) -> None:
        for number, (rows, tokens) in enumerate(self._unwritten, self._num_lines - len(self._unwritten)):
            line = self._pages[-1][number % _PAGE]
            line[:] = NO_TOKEN
            line[rows] = tokens
        self._unwritten.clear()

    def gather(self, row: Row, first_line: int) -> IntArray:
        """All tokens a row emitted since a line, in order."""
        self._write()
        start, stop = max(first_line - self._first_line, 0), self._num_lines
        columns = []
        while start < stop:
            page, line = divmod(start, _PAGE)
            columns.append(self._pages[page][line : line + stop - start, row])
            start += _PAGE - line
        column = columns[0] if len(columns) == 1 else np.concatenate(columns) if columns else np.empty(0, np.int32)
        emitted: IntArray = column[column != _NO_TOKEN]
        return emitted

    def add_page(self, oldest_line: int) -> None:
        """Add an empty page, and drop the pages of lines before `oldest_line`."""
        self._write()
        while self._pages and self._first_line + _PAGE <= oldest_line and self._num_lines >= _PAGE:
            self._spare = [self._pages.popleft()]
            self._first_line += _PAGE
            self._num_lines -= _PAGE
        self._pages.append(self._spare.pop() if self._spare else self._blank())

    def _blank(self) -> IntArray:
        return np.empty((_PAGE, self._max_rows), dtype=np.int32)


NO_SEQUENCE = -1
_NOTHING: IntArray = np.empty(0, dtype=np.int32)


class RowAllocator:
    """The rows of the persistent batch, seen from the host."""

    __slots__ = (
        "_classes",
        "_first_line",
        "_free",
        "_log",
        "_released",
        "_started",
        "_tenants",
        "assigned",
        "emitter_ids",
        "generation",
        "releasing",
    )

    def __init__(self, max_rows: int) -> None:
        self.assigned: dict[Row, Sequence] = {}
        self.releasing: deque[Sequence] = deque()  # in order of release_step
        self.generation = 0  # changes with every assignment and release
        self.emitter_ids: NDArray[np.int64] = np.full(
            max_rows, NO_SEQUENCE, dtype=np.int64
        )  # by row; NO_SEQUENCE: its tokens are dropped
        self._classes: Counter[int] = Counter()  # rows by priority class
        self._tenants: Counter[str] = Counter()  # rows by tenant
        self._free = [Row(row) for row in range(max_rows - 1, -1, -1)]
        self._released: list[Row] = []  # not yet reported to the runner
        self._started: set[Row] = set()  # the rows that the runner knows as assigned
        self._log = TokenLog(max_rows)
        self._first_line: dict[Row, int] = {}  # in the log, of each assigned row

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def max_rows(self) -> int:
        return len(self.emitter_ids)

    def take_row(self) -> Row:
        return self._free.pop()

    def assign(self, sequence: Sequence, row: Row, step: int, num_computed: int) -> None:
        sequence.assign(row, step, num_computed)
        self.assigned[row] = sequence
        self._first_line[row] = self._log.next_line
        self.emitter_ids[row] = sequence.id
        self._classes[sequence.request.priority] += 1
        self._tenants[sequence.request.tenant] += 1
        self.generation += 1

    @property
    def lowest_class(self) -> int:
        """The largest class number with a row: the least important."""
        return max(self._classes, default=0)

    def num_below(self, priority: int) -> int:
        """Rows of less important classes."""
        return sum(count for each, count in self._classes.items() if each > priority)

    def num_of(self, tenant: str) -> int:
        """Rows of a tenant, also those being released."""
        return self._tenants[tenant]

    def mark_started(self, row: Row) -> None:
        """The next plan starts the row on the runner."""
        self._started.add(row)

    def note(self, result: StepResult) -> None:
        """Log the tokens that the rows emitted."""
        if not result.passes:
            self._append(result.rows, result.tokens)
            return
        for rows, tokens in result.each_pass():
            self._append(rows, tokens)

    def _append(self, rows: IntArray, tokens: IntArray) -> None:
        if self._log.full:
            self._log.add_page(min(self._first_line.values(), default=self._log.next_line))
        self._log.append(rows, tokens)

    def _generated(self, row: Row) -> IntArray:
        """The tokens that a row emitted since its assignment."""
        return self._log.gather(row, self._first_line[row])

    def sequence_ids(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """The sequence of each row's token; NO_SEQUENCE if it is dropped."""
        names: NDArray[np.int64] = self.emitter_ids[rows.astype(np.intp)]
        return names

    def sequence_id(self, row: Row) -> SequenceId | None:
        name = int(self.emitter_ids[row])
        return None if name == NO_SEQUENCE else SequenceId(name)

    def begin_release(self, sequence: Sequence, reason: FinishReason | None, release_step: int) -> None:
        """Stop computing: finished if there is a reason, else preempted."""
        row = sequence.row
        assert row is not None, sequence
        sequence.stop(release_step, reason)
        if row in self._started:
            self._started.discard(row)
            self._released.append(row)
        self.releasing.append(sequence)
        self.generation += 1
        if reason is not None:
            self.fix_tokens(sequence)

    def fix_tokens(self, sequence: Sequence) -> None:
        """Fix the tokens of a finished sequence; what its row emits later is dropped."""
        if sequence.row is not None:
            sequence.tokens = np.concatenate([sequence.tokens, self._generated(sequence.row)])
            self.emitter_ids[sequence.row] = NO_SEQUENCE

    def known(self, sequence: Sequence) -> IntArray:
        """The tokens known so far."""
        if sequence.finished or sequence.row is None:
            return sequence.tokens
        known: IntArray = np.concatenate([sequence.tokens, self._generated(sequence.row)])
        return known

    def next_released(self, step: int) -> Sequence | None:
        """A sequence that no step in flight touches. It still holds its row, and all its tokens are known."""
        if not self.releasing or self.releasing[0].release_step > step:
            return None
        return self.releasing.popleft()

    def release(self, sequence: Sequence) -> None:
        """Free the row; the sequence waits again or is finished."""
        row = sequence.row
        assert row is not None, sequence
        del self.assigned[row]
        self.generation += 1
        priority = sequence.request.priority
        self._classes[priority] -= 1
        if not self._classes[priority]:
            del self._classes[priority]
        tenant = sequence.request.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self.emitter_ids[row] = NO_SEQUENCE
        self._free.append(row)
        sequence.release(_NOTHING if sequence.finished else self._generated(row))
        del self._first_line[row]

    def forget_row(self, sequence: Sequence) -> None:
        """The runner drops this row with the next plan; it is started anew later."""
        assert sequence.row is not None, sequence
        if sequence.row in self._started:
            self._started.discard(sequence.row)
            self._released.append(sequence.row)

    def take_released(self) -> tuple[Row, ...]:
        """The rows to release in the next plan."""
        leaves, self._released = tuple(self._released), []
        return leaves

    def forget_runner(self) -> None:
        """The runner has dropped all rows."""
        self._started.clear()
        self._released.clear()

    def audit(self) -> None:
        assert len(self.assigned) + len(self._free) == len(self.emitter_ids), "a row is lost"
        free = set(self._free)
        assert len(free) == len(self._free), "a row is twice free"
        assert free.isdisjoint(self.assigned), "an assigned row is free"
        names = self.emitter_ids.tolist()
        num_leaving = 0
        for row, sequence in self.assigned.items():
            assert sequence.row == row, sequence
            emits = names[row] != NO_SEQUENCE
            assert emits != sequence.finished, f"{sequence}: emits is {emits}"
            num_leaving += sequence.state is SequenceState.RELEASING
        assert num_leaving == len(self.releasing), "rows being released are miscounted"
        tenants = Counter(sequence.request.tenant for sequence in self.assigned.values())
        assert tenants == self._tenants, "rows are miscounted by tenant"
