"""How long a prefill chunk may be, so that the step it joins keeps a time. Knows shapes and costs, no requests."""

from itertools import takewhile
from math import sqrt

from quire.sched.cost import CostTable, StepShape

LEAST = 16  # tokens that a step prefills at any price, so that prompts never starve: one block
PATIENCE_S = 0.04  # for which prompts wait behind each other; beyond it those who decode wait a little, too

# Of a time between two tokens that nobody asked for.
MOST_STRETCH = 2.5  # while prompts pile up
PER_DECODE = 1.6  # it is no less than so many times what the step would take without prompts: many rows take long, too
_BESIDE_PROMPTS = 2.8  # so many times as long as a token takes that is computed alone
_UNNOTICED_S = 0.01  # and never less than this


def usual_target_s(decode_s: float) -> float:
    """The time between two tokens to aim at where nobody names one, if a step with one row alone takes so long."""
    return max(_UNNOTICED_S, _BESIDE_PROMPTS * decode_s)


def stretched(target_s: float, queue_s: float, most: float) -> float:
    """The time that a step may take while prompts wait so long behind each other; at the most `most` times as long.

    It grows with the root of the queue: of a queue four times as long, those who wait and those who decode each bear a
    part.
    """
    return target_s * min(max(sqrt(queue_s / PATIENCE_S), 1.0), most)


def largest_next_chunk(
    table: CostTable, shape: StepShape, start: int, most: int, target_s: float, grains: tuple[int, ...] = ()
) -> int:
    """The largest further chunk with which a step of this shape is predicted to take no more than `target_s`.

    A step's first chunk has `LEAST` tokens (or `most`, if that is less) even if the step then takes longer; a further
    one may have none. Lengths are tried in ascending order, because a corrected table need not be monotone, and what
    exceeds the target at a shorter length is not trusted at a longer one: those of the grains or, without any, in
    doubling steps, then bisected.
    """
    least = 0 if shape.num_chunk_tokens else min(most, LEAST)

    def fits(length: int) -> bool:
        return table.predict_s(shape.with_chunk(start, length)) <= target_s

    if grains:
        lengths = [*(grain for grain in grains if least < grain < most), most]
        return max(takewhile(fits, lengths), default=least)
    good, bad = least, most + 1
    probe = max(1, least)
    while probe < bad:
        if not fits(probe):
            bad = probe
            break
        good, probe = probe, 2 * probe
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
