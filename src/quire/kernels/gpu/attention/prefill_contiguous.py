"""Prefill of one long chunk over contiguous keys: its pages are gathered into one run, then tiles are loaded by TMA.

The same result as prefill over pages, for chunks so long that gathering costs little beside the matmuls. One sequence
at a time, head dims that are powers of two, no window (all early pages must still be there). The run is padded with
zeros to the next multiple of TILE_KEYS, so that no tile shows old values.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.gpu.attention.prefill import PrefillTiles
from quire.kernels.gpu.attention.softmax_tile import (
    LOWEST,
    SoftmaxScale,
    block_ids,
    key_offsets,
    normalize,
    online_softmax_update,
    qk_scores,
)
from quire.kernels.gpu.attention.split_merge import attention_bytes, shared_memory_budget
from quire.kernels.gpu.launch import launch, next_power_of_2
from quire.kernels.interface import AttentionRule

_NARROWEST = 16  # head dim that TMA loads
_ROWS = 128  # per tile


def is_gatherable(dim: int, group: int, element_bytes: int) -> bool:
    """Whether it supports such heads, `group` query heads per key head, within the shared-memory budget."""
    if not (_NARROWEST <= dim == next_power_of_2(dim) and group <= _ROWS and element_bytes == 2):
        return False
    tiles = _tiles(dim)
    return attention_bytes(tiles.rows, tiles.keys, dim, element_bytes, tiles.stages) <= shared_memory_budget()


def _tiles(dim: int) -> PrefillTiles:
    """Measured on an H200 with heads of 128 (docs/performance/ledger): two programs hide each other's softmax."""
    return PrefillTiles(_ROWS, 64, 4, 2) if dim <= 128 else PrefillTiles(_ROWS, 64, 8, 2)


@triton.jit
def _attend_run(
    queries, places, run, key_column, value_column, begin, end, rate, cap_rate, acc, running_max, running_sum,
    TILE: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Whole tiles from begin on; places: [rows], each query's position. Unmasked if every query sees every key."""
    for start in range(begin, end, TILE):
        scores = qk_scores(queries, run.load([start, key_column]), cap_rate, CAPPED)
        if MASKED:
            positions = start + tl.arange(0, TILE)
            scores = tl.where(positions[None, :] <= places[:, None], scores, float("-inf"))
        values = run.load([start, value_column]).to(queries.dtype)
        acc, running_max, running_sum = online_softmax_update(scores, values, rate, acc, running_max, running_sum)
    return acc, running_max, running_sum


@triton.jit(do_not_specialize_on_alignment=["query_starts", "context_length"])
def _gathered_kernel(
    query, run, query_starts, context_length, output,
    query_row_stride, query_head_stride, output_stride, rate, cap_rate,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    KV_HEADS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens, and a key head with its GROUP of query heads."""
    kv_head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS  # the last tokens have most keys: scheduled first
    first_query = tile * TOKENS
    start = tl.load(query_starts)
    num_queries = tl.load(query_starts + 1) - start
    if first_query >= num_queries:
        return
    last_query = tl.minimum(first_query + TOKENS, num_queries) - 1
    num_before = tl.load(context_length) - num_queries

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    queries_of_rows = tl.minimum(first_query + rows // GROUP, last_query)  # surplus rows repeat the last
    tokens = (start + queries_of_rows).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    queries = tl.load(query + tokens[:, None] * query_row_stride + heads[:, None] * query_head_stride + dims[None, :])
    places = num_before + queries_of_rows
    key_column, value_column = kv_head * DIM, (KV_HEADS + kv_head) * DIM
    acc = tl.zeros([ROWS, DIM], tl.float32)
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    edge = (num_before + first_query + 1) // TILE * TILE  # before it no mask is needed
    acc, running_max, running_sum = _attend_run(
        queries, places, run, key_column, value_column, 0, edge, rate, cap_rate,
        acc, running_max, running_sum, TILE, False, CAPPED,
    )  # fmt: skip
    acc, running_max, running_sum = _attend_run(
        queries, places, run, key_column, value_column, edge, num_before + last_query + 1, rate, cap_rate,
        acc, running_max, running_sum, TILE, True, CAPPED,
    )  # fmt: skip
    answer = normalize(acc, running_sum).to(output.dtype.element_ty)
    targets = output + tokens[:, None] * output_stride + heads[:, None] * DIM + dims[None, :]
    tl.store(targets, answer, mask=(first_query + rows // GROUP <= last_query)[:, None])


def gathered_attention(
    query: Tensor,  # [tokens, heads, dim], strided
    workspace: Tensor,  # [keys, 2, kv_heads, dim], of gather_context
    query_starts: Tensor,  # [2] int32: the sequence has tokens query_starts[0] to query_starts[1]
    context_length: Tensor,  # [1] int32
    rule: AttentionRule,
    output: Tensor,  # [tokens, heads * dim]; other tokens are left as they are
    tiles: PrefillTiles | None = None,
) -> None:
    """Causal attention of one sequence's queries over its gathered keys, into output."""
    num_tokens, heads, dim = query.shape
    kv_heads = workspace.shape[2]
    assert _NARROWEST <= dim == next_power_of_2(dim), dim
    assert query.stride(2) == output.stride(1) == 1 and not rule.window, rule
    tiles = tiles or _tiles(dim)
    group = heads // kv_heads
    tokens_per_tile = tiles.rows // group
    assert tokens_per_tile > 0, (tiles, group)
    rates = SoftmaxScale.of(rule)
    run = TensorDescriptor.from_tensor(workspace.flatten(1), [tiles.keys, dim])
    launch(
        _gathered_kernel, (-(-num_tokens // tokens_per_tile) * kv_heads,),
        query, run, query_starts, context_length, output,
        query.stride(0), query.stride(1), output.stride(0), rates.rate, rates.cap_rate,
        ROWS=tiles.rows, TOKENS=tokens_per_tile, TILE=tiles.keys, GROUP=group, DIM=dim,
        KV_HEADS=kv_heads, CAPPED=rule.softcap > 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


TILE_KEYS = 128  # the largest tile read from the workspace
_COPIED_KEYS = 16  # per program, of keys or of values
_MAX_BYTES = 1 << 28  # of the workspace


@triton.jit(do_not_specialize_on_alignment=["table", "context_length"])
def _gather_kernel(
    store, table, context_length, workspace, block_stride, side_stride, slot_stride,
    KEYS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    """One program: keys or values of KEYS positions, all heads: WIDTH elements, contiguous in the store too."""
    start, side = tl.program_id(0) * KEYS, tl.program_id(1)
    length = tl.load(context_length)
    if start >= tl.cdiv(length, TILE) * TILE:
        return
    in_tile = tl.arange(0, KEYS)
    columns = tl.arange(0, WIDTH_PADDED)
    blocks = block_ids(table, start, in_tile, length, BLOCK_SIZE)
    offsets = key_offsets(blocks, start, in_tile, block_stride, slot_stride, BLOCK_SIZE)
    inside = columns[None, :] < WIDTH
    present = (start + in_tile < length)[:, None] & inside
    copied = tl.load(store + side * side_stride + offsets[:, None] + columns[None, :], mask=present, other=0.0)
    places = (start + in_tile).to(tl.int64) * (2 * WIDTH) + side * WIDTH
    tl.store(workspace + places[:, None] + columns[None, :], copied, mask=inside)


def gather_context(
    kv_layer: Tensor,  # [blocks, 2, block_size, kv_heads, dim], strided
    table: Tensor,  # [width] int32
    context_length: Tensor,  # [1] int32
    workspace: Tensor,  # [keys, 2, kv_heads, dim]; keys: a multiple of TILE_KEYS that holds the whole context
) -> None:
    """The first context_length keys and values of one sequence, in order, into the workspace."""
    _, _, block_size, kv_heads, dim = kv_layer.shape
    assert len(workspace) % TILE_KEYS == 0 and workspace.is_contiguous(), workspace.shape
    assert kv_layer.stride(3) == dim and kv_layer.stride(4) == 1, kv_layer.stride()
    width = kv_heads * dim
    launch(
        _gather_kernel, (len(workspace) // _COPIED_KEYS, 2),
        kv_layer, table, context_length, workspace, *kv_layer.stride()[:3],
        KEYS=_COPIED_KEYS, TILE=TILE_KEYS, BLOCK_SIZE=block_size,
        WIDTH=width, WIDTH_PADDED=next_power_of_2(width), num_warps=8,
    )  # fmt: skip


class ContextCopy:
    """Contiguous copy of one sequence's keys and values. One workspace serves every layer of a step."""

    __slots__ = ("_workspace",)

    def __init__(self) -> None:
        self._workspace: Tensor | None = None

    @staticmethod
    def fits(kv_layer: Tensor, table: Tensor) -> bool:
        """Whether the largest context of this table fits in the workspace limit."""
        num_keys = len(table) * kv_layer.shape[2]
        return 2 * num_keys * kv_layer.stride(2) * kv_layer.element_size() <= _MAX_BYTES

    def gather(self, kv_layer: Tensor, table: Tensor, context_length: Tensor) -> Tensor:
        """[keys, 2, kv_heads, dim]."""
        _, sides, block_size, kv_heads, dim = kv_layer.shape
        if self._workspace is None:
            num_keys = -(-len(table) * block_size // TILE_KEYS) * TILE_KEYS
            self._workspace = kv_layer.new_empty(num_keys, sides, kv_heads, dim)
        gather_context(kv_layer, table, context_length, self._workspace)
        return self._workspace
