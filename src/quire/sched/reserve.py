"""How many blocks a request is promised when it sits down, and how many it could ever need. Pure arithmetic."""

from enum import Enum

from quire.core.request import Request, Sequence
from quire.kv.manager import count_blocks
from quire.sched.lengths import LengthQuantile


class Stance(Enum):
    """How far the cache is promised to more requests than it could hold to their end."""

    NEVER = "never"  # the whole length is promised: nobody is ever preempted for blocks
    HEDGE = "hedge"  # the prompt, and the output length that most recent requests stayed under
    OPTIMISTIC = "optimistic"  # the prompt and one token


def shared_blocks(request: Request, block_size: int) -> int:
    """Full blocks of the prompt that siblings share. A sibling computes the prompt's last token itself."""
    return 0 if request.num_sequences == 1 else (len(request.prompt) - 1) // block_size


def most_blocks(request: Request, block_size: int) -> int:
    """What a request needs in the worst case, alone in an empty cache."""
    each = count_blocks(request.max_length - 1, block_size)
    return each + (request.num_sequences - 1) * (each - shared_blocks(request, block_size))


def positions_to_reserve(sequence: Sequence, stance: Stance, lengths: LengthQuantile, *, immune: bool) -> int:
    """The positions whose blocks a sequence is promised. One that may not be preempted any more gets them all."""
    request = sequence.request
    whole = sequence.last_position + 1
    if immune or stance is Stance.NEVER or request.beam is not None:
        return whole
    num_tokens = len(sequence.tokens)
    known = num_tokens + 1
    if stance is Stance.HEDGE:
        num_prompt = len(request.prompt)
        expected = lengths.hedge(request.max_tokens, num_tokens - num_prompt)
        known = max(known, num_prompt + expected)
    return min(whole, known)
