"""How many blocks a request reserves at admission, and how many it can need at most. Pure arithmetic.

`LengthQuantile` learns output lengths from finished requests. Depends on lengths only.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from enum import Enum
from math import ceil

from quire.core.request import Request, Sequence
from quire.kv.manager import count_blocks

MIN_FINISHED = 16  # finished outputs before anything counts as learned; arbitrary, never tuned


class LengthQuantile:
    """A quantile of the most recent output lengths. An output cut off at its limit counts with that length."""

    __slots__ = ("_quantile", "_recent", "_sorted")

    def __init__(self, window: int = 512, quantile: float = 0.9) -> None:
        assert window >= MIN_FINISHED and 0 < quantile <= 1, (window, quantile)
        self._quantile = quantile
        self._recent: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []  # the same lengths

    def note(self, length: int) -> None:
        """An output finished with this many tokens."""
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        insort(self._sorted, length)

    def hedge(self, max_tokens: int, num_generated: int = 0) -> int:
        """The total number of tokens a request is expected to generate: more than it has, at most `max_tokens`.

        The quantile of those outputs that grew longer than this one is already. Where nothing is learned (fewer than
        `MIN_FINISHED` finished, or none so long), half of what it may still generate, rounded up.
        """
        assert 0 <= num_generated < max_tokens, (num_generated, max_tokens)
        first = bisect_right(self._sorted, num_generated)
        num_longer = len(self._sorted) - first
        if len(self._sorted) < MIN_FINISHED or num_longer == 0:
            return num_generated + (max_tokens - num_generated + 1) // 2
        return min(max_tokens, self._sorted[first + ceil(self._quantile * num_longer) - 1])


class Overcommit(Enum):
    """How far blocks are overcommitted: requests admitted beyond what the cache can hold to their end."""

    NEVER = "never"  # the whole length is reserved: no running row is ever denied a block
    HEDGE = "hedge"  # the prompt, and an output length that most recent requests did not exceed
    OPTIMISTIC = "optimistic"  # the prompt and one token


def shared_blocks(request: Request, block_size: int) -> int:
    """Full blocks of the prompt that siblings share. A sibling computes the prompt's last token itself."""
    return 0 if request.num_sequences == 1 else (len(request.prompt) - 1) // block_size


def most_blocks(request: Request, block_size: int) -> int:
    """Blocks that a request needs in the worst case, in an empty cache."""
    each = count_blocks(request.max_length - 1, block_size)
    return each + (request.num_sequences - 1) * (each - shared_blocks(request, block_size))


def positions_to_reserve(sequence: Sequence, overcommit: Overcommit, lengths: LengthQuantile, *, immune: bool) -> int:
    """The positions to reserve blocks for. A sequence that may not be preempted again reserves its whole length."""
    request = sequence.request
    whole = sequence.last_position + 1
    if immune or overcommit is Overcommit.NEVER or request.beam is not None:
        return whole
    num_tokens = len(sequence.tokens)
    known = num_tokens + 1
    if overcommit is Overcommit.HEDGE:
        num_prompt = len(request.prompt)
        expected = lengths.hedge(request.max_tokens, num_tokens - num_prompt)
        known = max(known, num_prompt + expected)
    return min(whole, known)
