"""How long outputs tend to be, learned from those that finished. Knows lengths alone, nothing of who asked."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import ceil

FEWEST = 16  # finished outputs before anything counts as learned; arbitrary, never tuned


class LengthQuantile:
    """A quantile of the most recent output lengths. An output cut off at its limit counts with that length."""

    __slots__ = ("_quantile", "_recent", "_sorted")

    def __init__(self, window: int = 512, quantile: float = 0.9) -> None:
        assert window >= FEWEST and 0 < quantile <= 1, (window, quantile)
        self._quantile = quantile
        self._recent: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []  # the same lengths

    def note(self, length: int) -> None:
        """An output finished with so many tokens."""
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        insort(self._sorted, length)

    def hedge(self, max_tokens: int, num_generated: int = 0) -> int:
        """How many tokens in all a request is expected to generate: more than it has, `max_tokens` at most.

        The quantile of those outputs that grew longer than this one is already. Where nothing is learned (fewer than
        `FEWEST` finished, or none so long), half of what it may still generate, rounded up.
        """
        assert 0 <= num_generated < max_tokens, (num_generated, max_tokens)
        first = bisect_right(self._sorted, num_generated)
        num_longer = len(self._sorted) - first
        if len(self._sorted) < FEWEST or num_longer == 0:
            return num_generated + (max_tokens - num_generated + 1) // 2
        return min(max_tokens, self._sorted[first + ceil(self._quantile * num_longer) - 1])
