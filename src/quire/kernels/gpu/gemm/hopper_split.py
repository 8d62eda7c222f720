"""Tiles and split-K of the Hopper GEMM (`hopper_ring`), and the shapes it declines. Integers only.

A separate file, without Gluon: it must load where Triton has none. A tile is 64 outputs over the whole input, a slice
128 columns of it. Programs get equal runs of (tile, slice) units, tile after tile: whole tiles, runs across tile
boundaries (stream-K), or as many splits of each tile as there are SMs for.
"""

from functools import cache
from typing import NamedTuple

from quire.kernels.gpu.launch import cdiv, next_power_of_2

OUTS = 64  # outputs per tile: M of one WGMMA
COLUMNS = 128  # per slice
STREAM_K = 0  # in place of a number of splits: runs across tile boundaries

MAX_ROWS = 128
_MAX_ROWS_OF_LARGE = 64  # beyond, cuBLAS is as fast with a large weight
_SMALL_BYTES = 16 * 2**20
_MIN_ROWS, _MIN_BOX_ROWS = 2, 16
_MIN_PROGRAMS = 64  # the fewest measured: fewer do not saturate memory bandwidth
_MAX_PARTS = 8
_MAX_STAGES = 12
_RING_BYTES = 224 * 1024  # of 227 KiB
_TRANSPOSE_BYTES = 4 * 1024  # of the ring: sums are transposed through it before they are stored, except partial sums
_BYTES = 2  # per number


class GemmSplit(NamedTuple):
    """Launch parameters."""

    box_rows: int  # rows of x per TMA box; missing rows are zeros
    num_tiles: int
    num_slices: int  # of each tile
    num_programs: int
    splits: int  # of a tile; 1: whole; STREAM_K: some tiles are shared, and the program with the first slices reduces
    stages: int  # slots of the ring


@cache
def split_gemm(num_rows: int, in_width: int, out_width: int, num_sms: int, may_split: bool) -> GemmSplit | None:
    """None: declined. Measured on an H200 with layers of Llama-3.1-8B and Qwen3-0.6B (docs/performance/ledger)."""
    is_small = in_width * out_width * _BYTES <= _SMALL_BYTES
    if num_rows not in range(_MIN_ROWS, (MAX_ROWS if is_small else _MAX_ROWS_OF_LARGE) + 1):
        return None
    num_tiles, num_slices = cdiv(out_width, OUTS), cdiv(in_width, COLUMNS)
    splits = _num_splits(num_tiles, num_slices, num_sms, may_split)
    num_programs = num_sms if splits == STREAM_K else num_tiles * splits
    if num_programs < _MIN_PROGRAMS:
        return None
    box_rows = max(_MIN_BOX_ROWS, next_power_of_2(num_rows))
    ring_bytes = _RING_BYTES - (_TRANSPOSE_BYTES if splits <= 1 else 0)
    held = ring_bytes // ((OUTS + box_rows) * COLUMNS * _BYTES)
    # No more than a program uses: a program of the next kernel may fit beside it and start its loads (PDL).
    stages = min(_MAX_STAGES, held, cdiv(num_tiles * num_slices, num_programs))
    return GemmSplit(box_rows, num_tiles, num_slices, num_programs, splits, stages)


def _num_splits(num_tiles: int, num_slices: int, num_sms: int, may_split: bool) -> int:
    if num_tiles > num_sms:
        return STREAM_K
    return min(num_sms // num_tiles, num_slices, _MAX_PARTS) if may_split else 1
