"""Which of several engines has most of a prompt cached, and few other requests. Does not depend on engines.

What an engine has cached is estimated from the prompts that were sent there, as hashes of their prefixes.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

CHUNK_TOKENS = 32  # prompts are compared in steps of so many
REQUEST_TOKENS = 64  # an open request of a replica weighs as much as so many tokens to compute
MAX_SAVED_TOKENS = 4096  # a longer cached prefix weighs no more: 64 requests at most wait for one replica


def prefix_hashes(partition: str, prompt: Sequence[int]) -> list[int]:
    """One for each whole chunk of a prompt, of everything up to its end."""
    data = np.array(prompt, dtype=np.int64).tobytes()
    step = CHUNK_TOKENS * 8
    last, hashes = hash(partition), []
    for stop in range(step, len(data) + 1, step):
        last = hash((last, data[stop - step : stop]))
        hashes.append(last)
    return hashes


class PrefixRouter:
    """Chooses replicas, and remembers which prompts each of them has."""

    __slots__ = ("_chosen_at", "_known", "_limits", "_num_chosen")

    def __init__(self, num_replicas: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]  # oldest first
        self._limits = [1 << 16] * num_replicas  # chunks
        self._chosen_at = [0] * num_replicas
        self._num_chosen = 0

    def choose(self, loads: Mapping[int, int], hashes: Sequence[int]) -> int:
        """Of the replicas in `loads`, with the open requests of each, the one where a prompt costs least; of equals the
        one that was chosen least recently."""
        saved = {rank: min(self.num_known(rank, hashes) * CHUNK_TOKENS, MAX_SAVED_TOKENS) for rank in loads}
        return min(loads, key=lambda rank: (REQUEST_TOKENS * loads[rank] - saved[rank], self._chosen_at[rank]))

    def num_known(self, rank: int, hashes: Sequence[int]) -> int:
        """Leading chunks of a prompt that a replica has."""
        known = self._known[rank]
        return next((place for place, each in enumerate(hashes) if each not in known), len(hashes))

    def note(self, rank: int, hashes: Sequence[int]) -> None:
        """A prompt was sent to a replica. The beginnings of prompts are forgotten last, as they are in its cache."""
        self._num_chosen += 1
        self._chosen_at[rank] = self._num_chosen
        known = self._known[rank]
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._limits[rank]:
            known.popitem(last=False)

    def forget(self, rank: int) -> None:
        """The cache of a replica is empty."""
        self._known[rank].clear()

    def limit(self, rank: int, num_tokens: int) -> None:
        """The size of a replica's cache."""
        self._limits[rank] = max(num_tokens // CHUNK_TOKENS, 1)
