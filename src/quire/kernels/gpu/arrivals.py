"""Which of several programs is the last: it sees what all others stored, and goes on for them without another launch.

A counter for all of them says so; it is zero again afterwards, replay after replay.
"""

import triton
import triton.language as tl


@triton.jit
def is_last(arrivals, num_programs):
    """Counts this program in; true for the last, which then sees what the others stored."""
    tl.debug_barrier()  # every thread of this program has stored its share before one of them counts
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    last = before == num_programs - 1
    if last:
        tl.store(arrivals, 0)
    return last
