"""Prefills under way, and who waits for one of them instead of computing the same prefix again.

Knows tokens, not blocks: what a leader has computed is found in the tree by those who followed it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quire.core.ids import IntArray, SequenceId
from quire.core.request import Family, Sequence


class Follow(NamedTuple):
    """Wait until the leader has computed so many tokens."""

    leader: Sequence
    num_tokens: int


class Leaders:
    """Leaders by the block their tokens begin with; followers by leader."""

    __slots__ = ("_block_size", "_by_start", "_followers", "_parked")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_start: dict[tuple[str, bytes], list[Sequence]] = {}
        self._parked: dict[SequenceId, list[tuple[int, Family]]] = {}  # by leader, with the tokens it waits for
        self._followers: dict[int, Family] = {}  # all of them, by order

    def lead(self, sequence: Sequence) -> None:
        """A sequence begins to compute its known tokens."""
        if sequence.num_tokens >= self._block_size:
            self._by_start.setdefault(self._start(sequence), []).append(sequence)

    def find(self, family: Family, tokens: IntArray, num_matched: int) -> Follow | None:
        """Somebody of no lower class who is about to compute at least a block that this family has no match for."""
        if len(tokens) <= self._block_size:
            return None
        best: Follow | None = None
        for leader in self._by_start.get((family.request.partition, tokens[: self._block_size].tobytes()), ()):
            common = _common_prefix(leader.tokens, tokens[:-1]) // self._block_size * self._block_size
            useful = common >= num_matched + self._block_size and common > leader.num_computed
            may_lead = leader.request.priority <= family.request.priority
            if useful and may_lead and (best is None or common > best.num_tokens):
                best = Follow(leader, common)
        return best

    def park(self, family: Family, follow: Follow) -> None:
        self._parked.setdefault(follow.leader.id, []).append((follow.num_tokens, family))
        self._followers[family.order] = family

    def advance(self, leader: Sequence) -> list[Family]:
        """The leader has computed more: those who waited for no more than that."""
        parked = self._parked.get(leader.id)
        if parked is None:
            return []
        ready = [family for num_tokens, family in parked if num_tokens <= leader.num_computed]
        self._parked[leader.id] = [entry for entry in parked if entry[0] > leader.num_computed]
        if not self._parked[leader.id]:
            del self._parked[leader.id]
        return self._released(ready)

    def end(self, leader: Sequence) -> list[Family]:
        """The leader has caught up or leaves: all who still waited for it."""
        if leader.num_tokens >= self._block_size:
            start = self._start(leader)
            others = self._by_start.get(start, [])
            if leader in others:
                others.remove(leader)
                if not others:
                    del self._by_start[start]
        return self._released([family for _, family in self._parked.pop(leader.id, [])])

    def forget(self, family: Family) -> None:
        """It gave up; no matter if it followed nobody."""
        self._followers.pop(family.order, None)

    def _released(self, families: list[Family]) -> list[Family]:
        """Those of them who still wait."""
        return [family for family in families if self._followers.pop(family.order, None) is not None]

    def follows(self, family: Family) -> bool:
        return family.order in self._followers

    @property
    def num_leading(self) -> int:
        return sum(map(len, self._by_start.values()))

    @property
    def num_waiting_tokens(self) -> int:
        """Of the prompts of those who follow."""
        return sum(len(family.request.prompt) for family in self._followers.values())

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    @property
    def followers(self) -> Iterable[Family]:
        return self._followers.values()

    def _start(self, sequence: Sequence) -> tuple[str, bytes]:
        return sequence.request.partition, sequence.tokens[: self._block_size].tobytes()


def _common_prefix(one: IntArray, other: IntArray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
