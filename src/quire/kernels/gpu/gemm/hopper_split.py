"""Tiles and split-K of the Hopper GEMM (`hopper_ring`), and the shapes it declines. Knows integers only.

A file of its own, without Gluon: it must load where Triton has none. A tile is 64 outputs over the whole input, a slice
128 columns of it. Programs get equal runs of (tile, slice) units, tile after tile: whole tiles, runs across tile
boundaries (stream-K), or as many splits of each tile as there are processors for.
"""

from functools import cache
from typing import NamedTuple

from quire.kernels.gpu.launch import cdiv, next_power_of_2

OUTS = 64  # of a tile: what a product of four warps takes
COLUMNS = 128  # of a slice
STREAM = 0  # in the place of parts: runs that tiles do not bound

MOST_ROWS = 128
_MOST_ROWS_OF_LARGE = 64  # beyond, the library is as fast with a weight that is not small
_SMALL_BYTES = 16 * 2**20
_FEWEST_ROWS, _FEWEST_BOX_ROWS = 2, 16
_FEWEST_PROGRAMS = 64  # the fewest that were measured: with few, bytes are not asked for as fast as they could come
_MOST_PARTS = 8
_MOST_STAGES = 12
_RING_BYTES = 224 * 1024  # of 227 KiB
_TURNING_BYTES = 4 * 1024  # of the ring: sums are turned through it before they are stored, unless as parts
_BYTES = 2  # of a number


class GemmSplit(NamedTuple):
    """All that a launch follows from."""

    box_rows: int  # rows that a program computes; those that are missing are zeros
    num_tiles: int
    num_slices: int  # of each tile
    num_programs: int
    parts: int  # of a tile; 1: whole; STREAM: some are shared, and whoever has the first slices adds the others
    stages: int  # slices that are loaded ahead


@cache
def cut(num_rows: int, in_width: int, out_width: int, num_processors: int, may_part: bool) -> GemmSplit | None:
    """None: another's. Measured on an H200 with layers of Llama-3.1-8B and Qwen3-0.6B (docs/performance/ledger)."""
    is_small = in_width * out_width * _BYTES <= _SMALL_BYTES
    if num_rows not in range(_FEWEST_ROWS, (MOST_ROWS if is_small else _MOST_ROWS_OF_LARGE) + 1):
        return None
    num_tiles, num_slices = cdiv(out_width, OUTS), cdiv(in_width, COLUMNS)
    parts = _parts(num_tiles, num_slices, num_processors, may_part)
    num_programs = num_processors if parts == STREAM else num_tiles * parts
    if num_programs < _FEWEST_PROGRAMS:
        return None
    box_rows = max(_FEWEST_BOX_ROWS, next_power_of_2(num_rows))
    ring_bytes = _RING_BYTES - (_TURNING_BYTES if parts <= 1 else 0)
    held = ring_bytes // ((OUTS + box_rows) * COLUMNS * _BYTES)
    # No more than a program has use for: one of the next kernel may find room beside it, and load its own.
    stages = min(_MOST_STAGES, held, cdiv(num_tiles * num_slices, num_programs))
    return GemmSplit(box_rows, num_tiles, num_slices, num_programs, parts, stages)


def _parts(num_tiles: int, num_slices: int, num_processors: int, may_part: bool) -> int:
    if num_tiles > num_processors:
        return STREAM
    return min(num_processors // num_tiles, num_slices, _MOST_PARTS) if may_part else 1
