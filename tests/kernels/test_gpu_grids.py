"""Grids of attention for the largest steps: CUDA has 65,535 programs in the second and third direction of one."""

from math import prod

import pytest
import torch

from quire.kernels.gpu.attention import decode as decode_attention
from quire.kernels.gpu.attention import prefill as prefill_attention
from quire.kernels.gpu.attention import prefill_contiguous as gathered_attention
from quire.kernels.gpu.attention.decode import decode_tiles
from quire.kernels.interface import AttentionRule

MAX_TOKENS, MAX_ROWS = 2**20, 65_536  # of a step, as a person may ask for
KV_HEADS, DIM = 2, 16
RULE = AttentionRule(0.25)


@pytest.fixture
def grids(monkeypatch):
    seen = []
    for module in (prefill_attention, decode_attention, gathered_attention):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *args, **constants: seen.append(grid))
    return seen


def empty(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def integers(*size: int) -> torch.Tensor:
    return empty(*size, dtype=torch.int32)


def check(grids: list[tuple[int, ...]], fewest: int) -> None:
    [(first, *others)] = grids
    assert max(others, default=1) <= 65_535
    assert prod(others) * first >= fewest


@pytest.mark.parametrize("group", [1, 4, 16, 71])
def test_grids_fit_chunks_of_the_largest_step(group, grids):
    query, output = empty(MAX_TOKENS, group * KV_HEADS, DIM), empty(MAX_TOKENS, group * KV_HEADS * DIM)
    pages = empty(9, 2, 16, KV_HEADS, DIM)
    prefill_attention.prefill_attention(query, pages, integers(3, 8), integers(4), integers(3), RULE, output)
    check(grids, fewest=MAX_TOKENS * group * KV_HEADS // 128)


@pytest.mark.parametrize("group", [1, 4, 16, 71])
def test_the_grid_fits_one_chunk_of_the_largest_step(group, grids):
    query, output = empty(MAX_TOKENS, group * KV_HEADS, DIM), empty(MAX_TOKENS, group * KV_HEADS * DIM)
    workspace = empty(MAX_TOKENS, 2, KV_HEADS, DIM)
    gathered_attention.gathered_attention(query, workspace, integers(2), integers(1), RULE, output)
    check(grids, fewest=MAX_TOKENS * group * KV_HEADS // 128)


def test_the_grid_fits_the_most_decodes(grids):
    query, output = empty(MAX_ROWS, 3 * KV_HEADS, DIM), empty(MAX_ROWS, 3 * KV_HEADS * DIM)
    pages, splits = empty(9, 2, 16, KV_HEADS, DIM), integers(MAX_ROWS + 200, 5)
    tiles = decode_tiles(MAX_ROWS, pages)
    decode_attention.decode_attention(query, pages, integers(MAX_ROWS, 8), splits, tiles, RULE, output)
    check(grids, fewest=MAX_ROWS * KV_HEADS)
