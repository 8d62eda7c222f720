"""Which cruising sequence needs attention in which step, so that nobody looks at the others."""

from quire.core.ids import SequenceId
from quire.core.request import Sequence


class Calendar:
    """Appointments by step. A sequence has at most one; an outdated one is recognised by its `due_step`."""

    __slots__ = ("_days",)

    def __init__(self) -> None:
        self._days: dict[int, dict[SequenceId, Sequence]] = {}

    def book(self, sequence: Sequence, step: int) -> None:
        sequence.due_step = step
        self._days.setdefault(step, {})[sequence.id] = sequence

    def cancel(self, sequence: Sequence) -> None:
        sequence.due_step = -1

    def due(self, step: int) -> list[Sequence]:
        """Those with an appointment in this step, oldest first; the day is struck from the calendar."""
        day = self._days.pop(step, {})
        return [sequence for _, sequence in sorted(day.items()) if sequence.due_step == step]
