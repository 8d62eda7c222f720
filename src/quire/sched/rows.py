"""Who sits in which row, who is on the way out, and what each row has emitted.

Law (a) of run-ahead lives here: a row, and with it the sequence's blocks, is given back only when the last step
that touched it has been absorbed. Knows nothing of blocks, budgets or queues.

The host's memory of emitted tokens, step by step, gathered per row when somebody leaves.
"""

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray, Row, SequenceId
from quire.core.request import Sequence, SequenceState
from quire.core.step import FinishReason, StepResult

NO_TOKEN = -1
_NO_TOKEN = np.array(NO_TOKEN, dtype=np.int32)  # numpy compares with it in half the time
_PAGE = 64  # steps


class TokenLog:
    """Pages of [steps, rows]: a new one when the last is full; the oldest go when nobody will ask for them."""

    __slots__ = ("_first_step", "_max_rows", "_num_steps", "_pages", "_spare")

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._pages: deque[IntArray] = deque([self._blank()])
        self._spare: list[IntArray] = []
        self._first_step = 0
        self._num_steps = 0

    @property
    def full(self) -> bool:
        """Whether `make_room` must come before the next step."""
        return self._num_steps == len(self._pages) * _PAGE

    def append(self, step: int, rows: IntArray, tokens: IntArray) -> None:
        """Note one step's tokens."""
        assert step == self._first_step + self._num_steps, (step, self._first_step, self._num_steps)
        line = self._pages[-1][self._num_steps % _PAGE]
        line[:] = NO_TOKEN
        line[rows.astype(np.intp)] = tokens
        self._num_steps += 1

    def gather(self, row: Row, first_step: int) -> IntArray:
        """All tokens a row emitted since a step, in order."""
        start, stop = max(first_step - self._first_step, 0), self._num_steps
        columns = []
        while start < stop:
            page, line = divmod(start, _PAGE)
            columns.append(self._pages[page][line : line + stop - start, row])
            start += _PAGE - line
        column = columns[0] if len(columns) == 1 else np.concatenate(columns) if columns else np.empty(0, np.int32)
        emitted: IntArray = column[column != _NO_TOKEN]
        return emitted

    def restart(self, step: int) -> None:
        """Steps were lost: go on with this one, nothing noted in between."""
        while self._first_step + self._num_steps < step:
            if self.full:
                self.make_room(self._first_step)
            self._pages[-1][self._num_steps % _PAGE] = NO_TOKEN
            self._num_steps += 1

    def make_room(self, oldest_step: int) -> None:
        """Nobody will ask for steps before `oldest_step` any more: forget their pages; and begin a new one."""
        while self._pages and self._first_step + _PAGE <= oldest_step and self._num_steps >= _PAGE:
            self._spare = [self._pages.popleft()]
            self._first_step += _PAGE
            self._num_steps -= _PAGE
        self._pages.append(self._spare.pop() if self._spare else self._blank())

    def _blank(self) -> IntArray:
        return np.empty((_PAGE, self._max_rows), dtype=np.int32)


NOBODY = -1
_NOTHING: IntArray = np.empty(0, dtype=np.int32)


class RowAllocator:
    """The rows of the persistent batch, seen from the host."""

    __slots__ = ("_classes", "_free", "_leaves", "_log", "_told", "assigned", "generation", "leaving", "row_sequence")

    def __init__(self, max_rows: int) -> None:
        self.assigned: dict[Row, Sequence] = {}
        self.leaving: deque[Sequence] = deque()  # in order of release_step
        self.generation = 0  # changes with who sits
        self.row_sequence: NDArray[np.int64] = np.full(max_rows, NOBODY, dtype=np.int64)  # whose tokens are heard
        self._classes: Counter[int] = Counter()  # of those who sit
        self._free = [Row(row) for row in range(max_rows - 1, -1, -1)]
        self._leaves: list[Row] = []  # what the runner has not been told yet
        self._told: set[Row] = set()  # the rows that the runner knows to be taken
        self._log = TokenLog(max_rows)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_row(self) -> Row:
        return self._free.pop()

    def assign(self, sequence: Sequence, row: Row, step: int, num_computed: int) -> None:
        sequence.assign(row, step, num_computed)
        self.assigned[row] = sequence
        self.row_sequence[row] = sequence.id
        self._classes[sequence.request.priority] += 1
        self.generation += 1

    @property
    def lowest_class(self) -> int:
        """The highest number among those who sit: the least important."""
        return max(self._classes, default=0)

    def num_below(self, priority: int) -> int:
        """Rows of less important classes."""
        return sum(count for each, count in self._classes.items() if each > priority)

    def tell(self, row: Row) -> None:
        """The runner is told who sits there."""
        self._told.add(row)

    def note(self, result: StepResult) -> None:
        """Remember what the rows emitted."""
        if self._log.full:
            self._log.make_room(min((s.assigned_step for s in self.assigned.values()), default=result.step))
        self._log.append(result.step, result.rows, result.tokens)

    def forget_steps(self, step: int) -> None:
        """The steps in flight are lost: the next one to be noted comes after `step`."""
        self._log.restart(step + 1)

    def named(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """Whose each row's token is; NOBODY if it is not heard."""
        names: NDArray[np.int64] = self.row_sequence[rows.astype(np.intp)]
        return names

    def listener(self, row: Row) -> SequenceId | None:
        name = int(self.row_sequence[row])
        return None if name == NOBODY else SequenceId(name)

    def begin_release(self, sequence: Sequence, reason: FinishReason | None, release_step: int) -> None:
        """Stop computing: finished for a reason, or preempted for none."""
        row = sequence.row
        assert row is not None, sequence
        sequence.stop(release_step, reason)
        if row in self._told:
            self._told.discard(row)
            self._leaves.append(row)
        self.leaving.append(sequence)
        self.generation += 1
        if reason is not None:
            self.fix_tokens(sequence)

    def fix_tokens(self, sequence: Sequence) -> None:
        """Fix the tokens of a sequence whose outcome is decided; what its row emits later is not heard."""
        if sequence.row is not None:
            generated = self._log.gather(sequence.row, sequence.assigned_step)
            sequence.tokens = np.concatenate([sequence.tokens, generated])
            self.row_sequence[sequence.row] = NOBODY

    def known(self, sequence: Sequence) -> IntArray:
        """The tokens it knows by now."""
        if sequence.finished or sequence.row is None:
            return sequence.tokens
        generated = self._log.gather(sequence.row, sequence.assigned_step)
        known: IntArray = np.concatenate([sequence.tokens, generated])
        return known

    def next_released(self, step: int) -> Sequence | None:
        """One whom no step in flight touches any more: its row is still its own, its tokens are all known."""
        if not self.leaving or self.leaving[0].release_step > step:
            return None
        return self.leaving.popleft()

    def release(self, sequence: Sequence) -> None:
        """Its row is free; it waits again, or is finished."""
        row = sequence.row
        assert row is not None, sequence
        del self.assigned[row]
        self.generation += 1
        priority = sequence.request.priority
        self._classes[priority] -= 1
        if not self._classes[priority]:
            del self._classes[priority]
        self.row_sequence[row] = NOBODY
        self._free.append(row)
        sequence.release(_NOTHING if sequence.finished else self._log.gather(row, sequence.assigned_step))

    def forget_row(self, sequence: Sequence) -> None:
        """The runner is to forget what it knows of this row: it will be told anew."""
        assert sequence.row is not None, sequence
        if sequence.row in self._told:
            self._told.discard(sequence.row)
            self._leaves.append(sequence.row)

    def take_released(self) -> tuple[Row, ...]:
        """The rows to unseat in the next plan."""
        leaves, self._leaves = tuple(self._leaves), []
        return leaves

    def forget_runner(self) -> None:
        """The runner knows no row any more."""
        self._told.clear()
        self._leaves.clear()

    def audit(self) -> None:
        assert len(self.assigned) + len(self._free) == len(self.row_sequence), "a row is lost"
        free = set(self._free)
        assert len(free) == len(self._free), "a row is twice free"
        assert free.isdisjoint(self.assigned), "a seated row is free"
        names = self.row_sequence.tolist()
        num_leaving = 0
        for row, sequence in self.assigned.items():
            assert sequence.row == row, sequence
            heard = names[row] != NOBODY
            assert heard != sequence.finished, f"{sequence}: heard is {heard}"
            num_leaving += sequence.state is SequenceState.RELEASING
        assert num_leaving == len(self.leaving), "the way out is miscounted"
