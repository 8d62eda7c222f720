"""Which request makes a step fail: suspects compute in halves, apart from everybody else, until one fails alone.

Decides who may sit next; seats nobody itself. Whoever has emitted a token, or ended, in a group that did not fail is
innocent.
"""

from collections.abc import Iterable

from quire.core.ids import SequenceId
from quire.core.request import Family


class Inquest:
    """From the first failure until every suspect was cleared or blamed."""

    __slots__ = ("_groups", "_lengths", "_unheard")

    def __init__(self, suspects: Iterable[Family]) -> None:
        self._groups = [list(suspects)]
        self._unheard: set[SequenceId] = set()
        self._lengths: dict[int, int] = {}  # of the group's beams when it began: they emit nothing, but they grow
        assert self._groups[0], "a step failed, and nobody sat in it"
        self.fail()

    @property
    def group(self) -> frozenset[int]:
        """The families that may sit now, by their order."""
        return frozenset(family.order for family in self._groups[-1])

    @property
    def open(self) -> bool:
        return bool(self._groups)

    def fail(self) -> Family | None:
        """The group that sat has failed; whom it leaves to blame, if it was one alone."""
        group = self._groups.pop()
        blamed = None
        if len(group) == 1:
            (blamed,) = group
        else:
            middle = len(group) // 2
            self._groups += [group[middle:], group[:middle]]
        self._begin()
        return blamed

    def hear(self, emitters: Iterable[int]) -> bool:
        """Who emitted a token in a step that did not fail; whether the whole group is cleared by now."""
        self._unheard -= {SequenceId(name) for name in emitters}
        if not all(self._is_cleared(family) for family in self._groups[-1]):
            return False
        self._groups.pop()
        self._begin()
        return True

    def _begin(self) -> None:
        while self._groups and all(family.finished for family in self._groups[-1]):  # aborted meanwhile
            self._groups.pop()
        group = self._groups[-1] if self._groups else []
        self._unheard = {member.id for family in group for member in family.unfinished}
        self._lengths = {family.order: _length(family) for family in group}

    def _is_cleared(self, family: Family) -> bool:
        if family.request.beam is not None:
            return family.finished or _length(family) > self._lengths[family.order]
        return not any(member.id in self._unheard for member in family.unfinished)


def _length(family: Family) -> int:
    return max(member.num_tokens for member in family.members)
