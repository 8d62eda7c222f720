"""Prefills under way, and who waits for one of them instead of computing the same prefix again.

Knows tokens, not blocks: what a leader has computed is found in the tree by those who followed it.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, SequenceId
from quire.core.request import RequestGroup, Sequence


class PrefixWait(NamedTuple):
    """Wait until the leader has computed so many tokens."""

    leader: Sequence
    num_tokens: int


class _PrefixGoal(NamedTuple):
    """What some followers of one leader wait for, and their class."""

    num_tokens: int
    priority: int


class InflightPrefixes:
    """Leaders by the block their tokens begin with; followers by leader and goal. Whoever has reached its goal, or
    has no leader any more, is ready: such go back to the queue in portions, so that thousands burden no single step.
    """

    __slots__ = ("_block_size", "_by_start", "_followers", "_parked", "_ready", "_start_of", "num_waiting_tokens")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_start: dict[tuple[str, bytes], list[Sequence]] = {}
        self._start_of: dict[SequenceId, tuple[str, bytes]] = {}  # of those who lead
        self._parked: dict[SequenceId, dict[_PrefixGoal, list[RequestGroup]]] = {}
        self._ready: dict[int, deque[RequestGroup]] = {}  # by class
        self._followers: dict[
            int, RequestGroup
        ] = {}  # all of them, by order: the others among those above have given up
        self.num_waiting_tokens = 0  # of the prompts of those who follow

    def lead(self, sequence: Sequence) -> None:
        """A sequence begins to compute its known tokens."""
        if len(sequence.tokens) >= self._block_size:
            start = (sequence.request.partition, sequence.tokens[: self._block_size].tobytes())
            self._start_of[sequence.id] = start
            self._by_start.setdefault(start, []).append(sequence)

    def find(self, group: RequestGroup, tokens: IntArray, num_matched: int) -> PrefixWait | None:
        """Somebody of no lower class who is about to compute at least a block that this family has no match for."""
        if len(tokens) <= self._block_size:
            return None
        best: PrefixWait | None = None
        for leader in self._by_start.get((group.request.partition, tokens[: self._block_size].tobytes()), ()):
            common = _common_prefix(leader.tokens, tokens[:-1]) // self._block_size * self._block_size
            useful = common >= num_matched + self._block_size and common > leader.num_computed
            may_lead = leader.request.priority <= group.request.priority
            if useful and may_lead and (best is None or common > best.num_tokens):
                best = PrefixWait(leader, common)
        return best

    def park(self, group: RequestGroup, follow: PrefixWait) -> None:
        goals = self._parked.setdefault(follow.leader.id, {})
        goals.setdefault(_PrefixGoal(follow.num_tokens, group.request.priority), []).append(group)
        self._followers[group.order] = group
        self.num_waiting_tokens += len(group.request.prompt)

    def advance(self, leader: Sequence) -> None:
        """The leader has computed more: those who waited for no more than that are ready."""
        goals = self._parked.get(leader.id)
        if goals is None:
            return
        for goal in [goal for goal in goals if goal.num_tokens <= leader.num_computed]:
            self._make_ready(goal, goals.pop(goal))
        if not goals:
            del self._parked[leader.id]

    def end(self, leader: Sequence) -> None:
        """The leader has caught up or leaves: all who still waited for it are ready. No matter if it led nobody."""
        start = self._start_of.pop(leader.id, None)
        if start is None:
            return
        others = self._by_start[start]
        others.remove(leader)
        if not others:
            del self._by_start[start]
        for goal, groups in self._parked.pop(leader.id, {}).items():
            self._make_ready(goal, groups)

    def take_ready(self, most: int) -> list[RequestGroup]:
        """Up to so many who need not wait for a prefix any more: the highest class first, then who was parked first."""
        taken: list[RequestGroup] = []
        while self._ready and len(taken) < most:
            priority = min(self._ready)
            group = self._ready[priority].popleft()
            if not self._ready[priority]:
                del self._ready[priority]
            if self.follows(group):
                self.forget(group)
                taken.append(group)
        return taken

    def forget(self, group: RequestGroup) -> None:
        """It gave up, or waits elsewhere; no matter if it followed nobody."""
        if self._followers.pop(group.order, None) is not None:
            self.num_waiting_tokens -= len(group.request.prompt)

    def _make_ready(self, goal: _PrefixGoal, groups: list[RequestGroup]) -> None:
        self._ready.setdefault(goal.priority, deque()).extend(groups)

    def follows(self, group: RequestGroup) -> bool:
        return group.order in self._followers

    @property
    def num_leading(self) -> int:
        return len(self._start_of)

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    @property
    def followers(self) -> Iterable[RequestGroup]:
        return self._followers.values()


def _common_prefix(one: IntArray, other: IntArray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
