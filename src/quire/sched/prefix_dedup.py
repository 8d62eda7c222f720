"""In-flight prefix deduplication: a request waits for a prefix that another is computing instead of computing it too.

Compares tokens, not blocks: the waiting request finds the computed prefix in the tree.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, SequenceId
from quire.core.request import RequestGroup, Sequence


class PrefixWait(NamedTuple):
    """Wait until the leader has computed this many tokens."""

    leader: Sequence
    num_tokens: int


class _PrefixGoal(NamedTuple):
    """The tokens that some followers of one leader wait for, and their priority class."""

    num_tokens: int
    priority: int


class InflightPrefixes:
    """Leaders by their first block of tokens; followers by leader and goal.

    A follower is ready when its goal is computed or its leader is gone. Ready followers are requeued in portions
    (`take_ready`), so that thousands do not delay one step.
    """

    __slots__ = ("_block_size", "_by_start", "_followers", "_parked", "_ready", "_start_of", "num_waiting_tokens")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_start: dict[tuple[str, bytes], list[Sequence]] = {}
        self._start_of: dict[SequenceId, tuple[str, bytes]] = {}  # of leaders
        self._parked: dict[SequenceId, dict[_PrefixGoal, list[RequestGroup]]] = {}
        self._ready: dict[int, deque[RequestGroup]] = {}  # by class
        # By order. Groups above that are not here have given up.
        self._followers: dict[int, RequestGroup] = {}
        self.num_waiting_tokens = 0  # prompt tokens of followers

    def begin(self, sequence: Sequence) -> None:
        """A sequence begins to compute its known tokens."""
        if len(sequence.tokens) >= self._block_size:
            start = (sequence.request.partition, sequence.tokens[: self._block_size].tobytes())
            self._start_of[sequence.id] = start
            self._by_start.setdefault(start, []).append(sequence)

    def find(self, group: RequestGroup, tokens: IntArray, num_matched: int) -> PrefixWait | None:
        """A leader of no lower class that will compute at least one block beyond the match of this group."""
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

    def park(self, group: RequestGroup, wait: PrefixWait) -> None:
        goals = self._parked.setdefault(wait.leader.id, {})
        goals.setdefault(_PrefixGoal(wait.num_tokens, group.request.priority), []).append(group)
        self._followers[group.order] = group
        self.num_waiting_tokens += len(group.request.prompt)

    def advance(self, leader: Sequence) -> None:
        """The leader has computed more: followers with a goal up to there are ready."""
        goals = self._parked.get(leader.id)
        if goals is None:
            return
        for goal in [goal for goal in goals if goal.num_tokens <= leader.num_computed]:
            self._make_ready(goal, goals.pop(goal))
        if not goals:
            del self._parked[leader.id]

    def end(self, leader: Sequence) -> None:
        """The leader has computed its tokens or is released: its followers are ready. It need not be a leader."""
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
        """Up to `most` ready groups: the highest class first, then in the order in which they were parked."""
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
        """The group has ended or waits elsewhere; it need not be a follower."""
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
