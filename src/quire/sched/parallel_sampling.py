"""Parallel sampling (n > 1): siblings wait for the leader's prompt, then share it copy-on-write.

The leader computes the prompt once. When that step is absorbed, each sibling starts with the prompt's full blocks,
shared, and a copy of the partial one; it computes the prompt's last token itself. Siblings hold their rows and
reservations from admission on.
"""

import logging

import numpy as np

from quire.core.ids import SequenceId
from quire.core.request import RequestGroup, Sequence, SequenceState
from quire.kv.manager import KVManager, count_blocks
from quire.sched.rows import RowAllocator

_log = logging.getLogger(__name__)


class SiblingForks:
    """Siblings that wait, by leader."""

    __slots__ = ("_failed", "_kv", "_rows", "_siblings")

    def __init__(self, kv: KVManager, rows: RowAllocator) -> None:
        self._kv = kv
        self._rows = rows
        self._siblings: dict[SequenceId, tuple[Sequence, ...]] = {}  # by leader
        self._failed: list[RequestGroup] = []

    def wait_for_prompt(self, leader: Sequence, siblings: tuple[Sequence, ...]) -> None:
        """They have rows, but compute nothing until the leader has computed the prompt."""
        if siblings:
            self._siblings[leader.id] = siblings

    def fork(self, leader: Sequence) -> tuple[Sequence, ...]:
        """The siblings that start now, if the prompt is computed. If one fails, none starts: see `take_failed`."""
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
        """The groups whose fork raised an error since the last call: they must end."""
        failed, self._failed = self._failed, []
        return failed

    def _begin(self, leader: Sequence, sibling: Sequence) -> int:
        """Share its own tokens if the tree still has them behind the leader's prompt, else the prompt alone; the number
        of positions shared. With another copy of the prompt, the group could need more blocks than there are."""
        assert leader.row is not None and sibling.row is not None, sibling
        num_shared = len(leader.request.prompt) - 1
        owner = sibling.group.owner
        if sibling.num_tokens > len(sibling.request.prompt):
            match = self._kv.match(owner, sibling.tokens, sibling.num_tokens - 1)
            num_full = num_shared // self._kv.block_size
            prompt_blocks = self._kv.tables.of(leader.row)[:num_full]
            longer = match is not None and self._kv.num_found(match) > num_shared
            if match is not None and longer and np.array_equal(match.blocks[:num_full], prompt_blocks):
                reserved = int(self._kv.tables.reserved[sibling.row])
                num_more = reserved + num_full - len(match.blocks)
                self._kv.reserve(sibling.row, -reserved)
                return self._kv.open(sibling.row, owner, match, num_more)  # it fits: the leader holds the prompt
        self._kv.fork(leader.row, sibling.row, owner, leader.tokens[:num_shared])
        return num_shared

    def orphans(self, leader: Sequence) -> tuple[Sequence, ...]:
        """The leader is released: the siblings that still wait for it."""
        return tuple([s for s in self._siblings.pop(leader.id, ()) if s.state is SequenceState.RUNNING])

    @property
    def waiting(self) -> frozenset[SequenceId]:
        """Siblings with rows and without blocks."""
        return frozenset(
            s.id for siblings in self._siblings.values() for s in siblings if s.state is SequenceState.RUNNING
        )


def blocks_beyond(num_positions: int, num_shared_blocks: int, block_size: int) -> int:
    """Blocks for this many positions, less the shared ones."""
    return max(count_blocks(num_positions, block_size) - num_shared_blocks, 0)
