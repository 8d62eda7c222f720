"""Copies the pages of one sequence into one run of keys, which the copy engine can then read a tile at a time.

Knows nothing of queries. Up to the next multiple of TILE_KEYS the run ends in zeros, so that no tile shows old values.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.host_sizes import next_power_of_2
from quire.kernels.gpu.key_tile import block_ids, key_offsets
from quire.kernels.gpu.launch import launch

TILE_KEYS = 128  # the largest tile that may be read from the workspace
_COPIED_KEYS = 16  # by a program, and of one side
_MOST_BYTES = 1 << 28  # that a copy may take


@triton.jit(do_not_specialize_on_alignment=["table", "context_length"])
def _gather_kernel(
    store, table, context_length, workspace, block_stride, side_stride, slot_stride,
    KEYS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    """One program: one side of KEYS keys, all heads: WIDTH elements that lie together in the store too."""
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
    """The keys and values of one sequence, one behind the other. What holds them serves every layer of a step."""

    __slots__ = ("_workspace",)

    def __init__(self) -> None:
        self._workspace: Tensor | None = None

    @staticmethod
    def fits(kv_layer: Tensor, table: Tensor) -> bool:
        """Whether all that the table can name is little enough to be copied."""
        num_keys = len(table) * kv_layer.shape[2]
        return 2 * num_keys * kv_layer.stride(2) * kv_layer.element_size() <= _MOST_BYTES

    def gather(self, kv_layer: Tensor, table: Tensor, context_length: Tensor) -> Tensor:
        """[keys, 2, kv_heads, dim]."""
        _, sides, block_size, kv_heads, dim = kv_layer.shape
        if self._workspace is None:
            num_keys = -(-len(table) * block_size // TILE_KEYS) * TILE_KEYS
            self._workspace = kv_layer.new_empty(num_keys, sides, kv_heads, dim)
        gather_context(kv_layer, table, context_length, self._workspace)
        return self._workspace
