"""Attention of one long chunk over keys that were gathered into one run: tiles come through the copy engine.

The same result as chunk attention over pages, for chunks so long that copying the keys first costs little beside the
products. One sequence at a time, head dims that are powers of two, no window: early pages must still be there. Knows
nothing of pages itself.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.contract import AttentionRule
from quire.kernels.gpu.chunk_attention import ChunkTiles
from quire.kernels.gpu.host_sizes import next_power_of_2
from quire.kernels.gpu.key_tile import LOWEST, Rates, divided, fold, score
from quire.kernels.gpu.launch import launch
from quire.kernels.gpu.shared_room import attention_bytes, shared_room

_NARROWEST = 16  # heads that the copy engine brings
_ROWS = 128  # of a tile


def is_gatherable(dim: int, group: int, element_bytes: int) -> bool:
    """Whether it is for such heads, `group` of them to a key head, and has room on this card."""
    if not (_NARROWEST <= dim == next_power_of_2(dim) and group <= _ROWS and element_bytes == 2):
        return False
    tiles = _tiles(dim)
    return attention_bytes(tiles.rows, tiles.keys, dim, element_bytes, tiles.stages) <= shared_room()


def _tiles(dim: int) -> ChunkTiles:
    """Measured on an H200 with heads of 128 (docs/performance/gpu.md): two programs hide each other's softmax."""
    return ChunkTiles(_ROWS, 64, 4, 2) if dim <= 128 else ChunkTiles(_ROWS, 64, 8, 2)


@triton.jit
def _over_run(
    queries, places, run, key_column, value_column, begin, end, rate, cap_rate, gathered, running_max, running_sum,
    TILE: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Whole tiles from begin on; places: [rows], each query's position. Unmasked if every query sees every key."""
    for start in range(begin, end, TILE):
        scores = score(queries, run.load([start, key_column]), cap_rate, CAPPED)
        if MASKED:
            positions = start + tl.arange(0, TILE)
            scores = tl.where(positions[None, :] <= places[:, None], scores, float("-inf"))
        values = run.load([start, value_column]).to(queries.dtype)
        gathered, running_max, running_sum = fold(scores, values, rate, gathered, running_max, running_sum)
    return gathered, running_max, running_sum


@triton.jit(do_not_specialize_on_alignment=["query_starts", "context_length"])
def _gathered_kernel(
    query, run, query_starts, context_length, output,
    query_row_stride, query_head_stride, output_stride, rate, cap_rate,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    KV_HEADS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens, and a key head with its GROUP of query heads."""
    kv_head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS  # the last tokens see most: they begin first
    first_query = tile * TOKENS
    start = tl.load(query_starts)
    num_queries = tl.load(query_starts + 1) - start
    if first_query >= num_queries:
        return
    last_query = tl.minimum(first_query + TOKENS, num_queries) - 1
    num_before = tl.load(context_length) - num_queries

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    queries_of_rows = tl.minimum(first_query + rows // GROUP, last_query)  # rows left over repeat the last
    tokens = (start + queries_of_rows).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    queries = tl.load(query + tokens[:, None] * query_row_stride + heads[:, None] * query_head_stride + dims[None, :])
    places = num_before + queries_of_rows
    key_column, value_column = kv_head * DIM, (KV_HEADS + kv_head) * DIM
    gathered = tl.zeros([ROWS, DIM], tl.float32)
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    edge = (num_before + first_query + 1) // TILE * TILE  # before it no query meets a key later than itself
    gathered, running_max, running_sum = _over_run(
        queries, places, run, key_column, value_column, 0, edge, rate, cap_rate,
        gathered, running_max, running_sum, TILE, False, CAPPED,
    )  # fmt: skip
    gathered, running_max, running_sum = _over_run(
        queries, places, run, key_column, value_column, edge, num_before + last_query + 1, rate, cap_rate,
        gathered, running_max, running_sum, TILE, True, CAPPED,
    )  # fmt: skip
    answer = divided(gathered, running_sum).to(output.dtype.element_ty)
    targets = output + tokens[:, None] * output_stride + heads[:, None] * DIM + dims[None, :]
    tl.store(targets, answer, mask=(first_query + rows // GROUP <= last_query)[:, None])


def gathered_attention(
    query: Tensor,  # [tokens, heads, dim], strided
    workspace: Tensor,  # [keys, 2, kv_heads, dim], as gather_context left it
    query_starts: Tensor,  # [2] int32: the sequence has tokens query_starts[0] to query_starts[1]
    context_length: Tensor,  # [1] int32
    rule: AttentionRule,
    output: Tensor,  # [tokens, heads * dim]; other tokens are left as they are
    tiles: ChunkTiles | None = None,
) -> None:
    """The queries of one sequence over its gathered keys, up to each one's own, into output."""
    num_tokens, heads, dim = query.shape
    kv_heads = workspace.shape[2]
    assert _NARROWEST <= dim == next_power_of_2(dim), dim
    assert query.stride(2) == output.stride(1) == 1 and not rule.window, rule
    tiles = tiles or _tiles(dim)
    group = heads // kv_heads
    tokens_per_tile = tiles.rows // group
    assert tokens_per_tile > 0, (tiles, group)
    rates = Rates.of(rule)
    run = TensorDescriptor.from_tensor(workspace.flatten(1), [tiles.keys, dim])
    launch(
        _gathered_kernel, (-(-num_tokens // tokens_per_tile) * kv_heads,),
        query, run, query_starts, context_length, output,
        query.stride(0), query.stride(1), output.stride(0), rates.rate, rates.cap_rate,
        ROWS=tiles.rows, TOKENS=tokens_per_tile, TILE=tiles.keys, GROUP=group, DIM=dim,
        KV_HEADS=kv_heads, CAPPED=rule.softcap > 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
