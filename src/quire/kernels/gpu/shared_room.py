"""How much shared memory a program may have on this card, and how much one takes that attends to tiles of keys.

Tiles were measured on a card with 227 KiB for a program. Most others have 99 KiB (L4, A10, L40S, any RTX), and there a
kernel that asks for more is not slow: it cannot be launched at all. Knows sizes alone.
"""

import sys
from functools import cache

from triton import knobs
from triton.runtime import driver

FEWEST_STAGES = 2  # with which anything is loaded ahead
_BESIDE = 2048  # bytes that maxima and sums may take, when they go from warp to warp


@cache
def shared_room() -> int:
    """Bytes: what Triton holds a kernel against. No bound where kernels are interpreted."""
    if knobs.runtime.interpret:
        return sys.maxsize
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return int(properties["max_shared_mem"])


def attention_bytes(rows: int, keys: int, dim: int, element_bytes: int, stages: int) -> int:
    """Of a program: its queries, their weights of a tile of keys, and as many tiles of keys and values as it loads
    ahead. `rows` and `dim` as they are padded. No less than what kernels compiled for capability 8.0 and
    8.9 take."""
    loaded = 2 * keys * dim * max(stages - 1, 1)
    return element_bytes * (rows * dim + rows * keys + loaded) + _BESIDE
