"""Siblings of a family that wait for their leader's prompt, and then share it.

The leader computes the prompt once. When that is absorbed, each sibling begins with the prompt's full blocks, shared,
and a copy of the partial one; it computes the prompt's last token itself. Rows and promises are theirs from the start.
"""

import logging

from quire.core.ids import SequenceId
from quire.core.request import RequestGroup, Sequence, SequenceState
from quire.kv.manager import KVManager, count_blocks
from quire.sched.rows import RowAllocator

_log = logging.getLogger(__name__)


class SiblingForks:
    """Who waits for whom."""

    __slots__ = ("_failed", "_kv", "_seating", "_siblings")

    def __init__(self, kv: KVManager, rows: RowAllocator) -> None:
        self._kv = kv
        self._seating = rows
        self._siblings: dict[SequenceId, tuple[Sequence, ...]] = {}  # by leader
        self._failed: list[RequestGroup] = []

    def expect(self, leader: Sequence, siblings: tuple[Sequence, ...]) -> None:
        """They sit, but compute nothing until the leader has computed the prompt."""
        if siblings:
            self._siblings[leader.id] = siblings

    def fork(self, leader: Sequence) -> tuple[Sequence, ...]:
        """The siblings that can begin, if the leader has come so far. If one cannot, none does: see `take_failed`."""
        if leader.id not in self._siblings or leader.num_computed < len(leader.request.prompt) - 1:
            return ()
        siblings = tuple(s for s in self._siblings.pop(leader.id) if s.state is SequenceState.RUNNING)
        try:
            for sibling in siblings:
                sibling.num_computed = sibling.num_planned = self._begin(leader, sibling)
        except Exception:
            _log.exception("request %s failed to fork", leader.request.id)
            self._failed.append(leader.group)
            return ()
        return siblings

    def take_failed(self) -> list[RequestGroup]:
        """The families whose fork raised an error since the last call: they must end."""
        failed, self._failed = self._failed, []
        return failed

    def _begin(self, leader: Sequence, sibling: Sequence) -> int:
        """Its own past if the tree still has it, else the leader's prompt; the positions it begins with."""
        assert leader.row is not None and sibling.row is not None, sibling
        num_shared = len(leader.request.prompt) - 1
        owner = sibling.group.owner
        if sibling.num_tokens > len(sibling.request.prompt):
            match = self._kv.match(owner, sibling.tokens, sibling.num_tokens - 1)
            if match is not None and self._kv.num_found(match) > num_shared:
                reserved = int(self._kv.tables.reserved[sibling.row])
                num_shared_full = num_shared // self._kv.block_size
                num_more = reserved + num_shared_full - len(match.blocks)
                self._kv.reserve(sibling.row, -reserved)
                if self._kv.fits(match, num_more):
                    return self._kv.open(sibling.row, owner, match, num_more)
                self._kv.reserve(sibling.row, reserved)
        self._kv.fork(leader.row, sibling.row, owner, leader.tokens[:num_shared])
        return num_shared

    def orphans(self, leader: Sequence) -> tuple[Sequence, ...]:
        """The leader leaves: those it leaves behind."""
        return tuple([s for s in self._siblings.pop(leader.id, ()) if s.state is SequenceState.RUNNING])

    @property
    def waiting(self) -> frozenset[SequenceId]:
        """Those that sit without a table."""
        return frozenset(
            s.id for siblings in self._siblings.values() for s in siblings if s.state is SequenceState.RUNNING
        )


def blocks_beyond(num_positions: int, num_shared_blocks: int, block_size: int) -> int:
    """What a sequence needs for so many positions, some of its blocks being there already."""
    return max(count_blocks(num_positions, block_size) - num_shared_blocks, 0)
