"""float32 x bfloat16 matmul to float32 on AMX, compiled by numba. Does not depend on torch.

AMX multiplies bfloat16 only, but sums in float32. So each float32 is split into a bfloat16 and its rounded remainder,
which keeps 16 bits of the mantissa. Both are multiplied with the same weight tile, which is read once: almost free
where few rows wait for many weights, twice the matmul elsewhere.
"""

import numba
import numpy as np
from numpy import uint16, uintp
from numpy.typing import NDArray

from quire.core.ids import FloatArray
from quire.kernels.cpu.amx import TILE_ROWS, clear, configure, load, multiply_add, release, shapes, store
from quire.kernels.cpu.bits import OPTIONS, narrow, widen

Halves = NDArray[np.uint16]  # the bits of bfloat16

DEPTH = 32  # bfloat16 in a row of a tile
_TILE_BYTES = 2 * TILE_ROWS * DEPTH

# Without reassociation, which would optimise the rounding remainder away.
_EXACT = OPTIONS | {"fastmath": False}


def fits(width_out: int, width_in: int) -> bool:
    """Whether a weight consists of whole tiles."""
    return width_out % TILE_ROWS == 0 and width_in % DEPTH == 0


def _split(x: FloatArray, high: Halves, low: Halves) -> None:
    """x = high + low except for the last bits of the mantissa. All: [rows, in]."""
    for row in range(x.shape[0]):
        for i in range(uintp(x.shape[1])):
            nearest = narrow(x[row, i], uint16(0))
            high[row, i] = nearest
            low[row, i] = narrow(x[row, i] - widen(nearest), uint16(0))


def _multiply(
    high: Halves,  # [rows, in]
    low: Halves,  # [rows, in]
    packed: Halves,  # [out / 16, in / 32, 16, 16, 2]: tiles in AMX layout
    whole: NDArray[np.uint8],  # tile shapes for 16 rows
    rest: NDArray[np.uint8],  # tile shapes for the last rows
    num_threads: int,
    output: FloatArray,  # [rows, out]
) -> None:
    rows, width_in = high.shape
    num_columns, num_deep = packed.shape[0], packed.shape[1]
    num_pairs = (num_columns + 1) // 2
    for thread in numba.prange(num_threads):
        for pair in range(thread * num_pairs // num_threads, (thread + 1) * num_pairs // num_threads):
            column = min(2 * pair, max(num_columns - 2, 0))  # the last pair may overlap the one before
            other = min(column + 1, num_columns - 1)
            for row in range(0, rows, TILE_ROWS):
                configure(whole if rows - row >= TILE_ROWS else rest)
                clear(0)
                clear(1)
                for deep in range(num_deep):
                    at = 2 * (row * width_in + deep * DEPTH)
                    load(2, high, at, 2 * width_in)
                    load(3, low, at, 2 * width_in)
                    load(4, packed, (column * num_deep + deep) * _TILE_BYTES, 2 * DEPTH)
                    load(5, packed, (other * num_deep + deep) * _TILE_BYTES, 2 * DEPTH)
                    multiply_add(0, 2, 4)
                    multiply_add(1, 2, 5)
                    multiply_add(0, 3, 4)
                    multiply_add(1, 3, 5)
                width = TILE_ROWS * num_columns
                store(0, output, 4 * (row * width + column * TILE_ROWS), 4 * width)
                store(1, output, 4 * (row * width + other * TILE_ROWS), 4 * width)
        release()


_split = numba.njit(**_EXACT)(_split)
_multiply = numba.njit(parallel=True, **_EXACT)(_multiply)


def multiply(x: FloatArray, packed: Halves, num_threads: int, output: FloatArray) -> None:
    """x: [rows, in]; packed: [out / 16, in / 32, 16, 16, 2]; output: [rows, out]."""
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
    high, low = np.empty(x.shape, uint16), np.empty(x.shape, uint16)
    _split(x, high, low)
    _multiply(high, low, packed, _SHAPES[TILE_ROWS], _SHAPES[len(x) % TILE_ROWS], num_threads, output)


_SHAPES = [shapes(rows) for rows in range(TILE_ROWS + 1)]
