"""What some counters of a scheduler should say, from its plans and from who sat before each turn."""

from dataclasses import dataclass

from quire.core.events import What
from quire.core.ids import RequestId, Row, SequenceId
from quire.core.request import Family, State
from quire.core.step import Output, StepPlan
from quire.sched.books import Books


@dataclass(slots=True)
class _Sitter:
    sequence: SequenceId
    num_positions: int = 0
    cruising: bool = False


class Recount:
    """Follows one scheduler: `begin` before a turn, `launch` with its plan, `end` after it."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._rows: dict[Row, _Sitter] = {}
        self._had: dict[SequenceId, int] = {}  # positions of those who left their row, or were just forked
        self._running: set[RequestId] = set()
        self._num_preemptions: dict[RequestId, int] = {}
        self.recomputed_tokens = 0
        self.forks = 0
        self.seats_taken = 0

    def begin(self) -> None:
        seated = self._books.seating.seated.values()
        self._running = {sequence.request.id for sequence in seated if sequence.state is State.RUNNING}

    def launch(self, plan: StepPlan) -> None:
        """A chunk computes again what its sequence had before it left its row."""
        for row in list(self._rows) if plan.reset else plan.leaves:
            left = self._rows.pop(row)
            self._had[left.sequence] = max(self._had.get(left.sequence, 0), left.num_positions)
        for seat in plan.seats:
            self._rows[seat.row] = _Sitter(seat.sequence)
        for row, sitter in self._rows.items():
            sitter.num_positions += sitter.cruising and row not in plan.pauses
        for chunk in plan.chunks:
            sitter, stop = self._rows[chunk.row], chunk.start + chunk.length
            self.recomputed_tokens += max(min(stop, self._had.get(sitter.sequence, 0)) - chunk.start, 0)
            sitter.num_positions = stop
            sitter.cruising = Output.SAMPLE in chunk.output

    def end(self, families: list[Family]) -> None:
        """Who waits for its first plan was forked. A seat is taken for one who did not sit, a block for one who did."""
        self.forks += len(self._books.fresh)
        for sequence in self._books.fresh:
            self._had[sequence.id] = max(self._had.get(sequence.id, 0), sequence.num_computed)
        if self._books.tally.preemptions == sum(self._num_preemptions.values()):
            return
        for family in families:
            if family.num_preemptions > self._num_preemptions.get(family.request.id, 0):
                self._num_preemptions[family.request.id] = family.num_preemptions
                causes = [e.other for e in family.story if e.what is What.PREEMPTED and e.other is not None]
                self.seats_taken += causes[-1] not in self._running
