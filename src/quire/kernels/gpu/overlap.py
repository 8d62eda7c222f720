"""Kernels that begin while the one before them ends, which hides most of a launch. Compiled into those of every layer.

A card from Hopper on begins such a kernel (`launch_early`) as soon as all programs of the one before have ended or come
past `wait_for_others`. Before it a kernel may read what nobody writes, such as weights, or what the one before it has
waited for, and must write nothing. Every program that writes comes past it, and of every launch one does: so whoever
waited for one kernel has waited for all before it. Knows nothing of what kernels do.

A kernel may let the next begin before its own wait (`let_next_begin`). All of its programs still wait, so it is done
after those before it, and the next, which waits until it is done, sees what all of them wrote.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    """Until all that was launched before is done and can be seen. Then the next may begin."""
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """As soon as all programs have begun, if there is room beside them. Whoever says so must still wait for others."""
    if EARLY:
        cuda.gdc_launch_dependents()
