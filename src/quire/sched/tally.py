"""What a scheduler has done so far, in numbers. Counters alone."""

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Totals since the start; `quire check` recounts them."""

    prompt_tokens: int = 0  # of families seated for the first time
    cached_tokens: int = 0  # of those, found in the cache
    computed_tokens: int = 0  # planned in chunks and by cruising rows
    recomputed_tokens: int = 0  # a sequence had them before a preemption, and computed them again after it
    padding_tokens: int = 0
    preemptions: int = 0
    seats_taken: int = 0  # preemptions for the sake of a higher class
    moved_blocks: int = 0
    forks: int = 0
    lost_steps: int = 0
