"""Which chunks go to the kernel for Hopper, as long as it can be compiled. Knows the kernel's bounds, not its ways."""

import torch
from torch import Tensor

from quire.kernels.gpu.attention.prefill_schedule import work_list
from quire.kernels.gpu.hopper_support import hopper_processors, is_elsewhere, tell_broken
from quire.kernels.interface import AttentionRule

try:
    from quire.kernels.gpu.attention.hopper import TILE_ROWS, gathered_pages, hopper_attention, largest_page
except (ImportError, AttributeError) as error:
    _missing = f"{type(error).__name__}: {error}"
else:
    _missing = ""

_INSTEAD = "attention of chunks by the kernels for every card"
_DTYPES = (torch.bfloat16, torch.float16)
_DIMS = range(40, 257, 8)  # of 16 bytes each; narrower ones would leave most of a tile empty
_PAGE_SIZES = (8, 16, 32, 64, 128)  # of whole rows of eight, that fill a tile of keys
_MOST_ROWS = 1 << 31  # of the store: the copy engine counts in 32 bits


class HopperPrefill:
    """The kernel on one card."""

    __slots__ = ("_is_broken", "_num_processors")

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        self._is_broken = False

    @staticmethod
    def find() -> "HopperPrefill | None":
        num_processors = hopper_processors(_missing, _INSTEAD)
        return None if num_processors is None else HopperPrefill(num_processors)

    def takes(
        self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, num_tokens: int, *, gathered: bool = False
    ) -> bool:
        """Whether the kernel is for chunks of so many tokens in all, over pages or over keys that were gathered. Where
        they have tiles for half of the processors only, programs should share their keys: it has none that do."""
        _, heads, dim = query.shape
        kv_heads = kv_layer.shape[3]
        group = heads // kv_heads
        if self._is_broken or dim not in _DIMS or query.dtype not in _DTYPES:
            return False
        if kv_layer.dtype != query.dtype or query.data_ptr() % 16 or not (gathered or _has_pages(kv_layer, rule)):
            return False
        num_tiles = -(-num_tokens * group // TILE_ROWS) * kv_heads
        return 2 * num_tiles > self._num_processors

    def list_work(self, query: Tensor, kv_layer: Tensor, starts: Tensor, lengths: Tensor, first_token: int) -> Tensor:
        """For every layer of a step."""
        num_tokens, heads, _ = query.shape
        group = heads // kv_layer.shape[3]
        return work_list(starts, lengths, num_tokens - first_token, first_token, TILE_ROWS, group)

    def attend(
        self,
        query: Tensor,
        kv_layer: Tensor,
        tables: Tensor,
        workspace: Tensor | None,  # the keys of the only sequence, if they were gathered
        items: Tensor,
        rule: AttentionRule,
        output: Tensor,
    ) -> bool:
        """False: it could not be compiled, and nothing was launched; nor will anything be."""
        pages, named = (kv_layer, tables) if workspace is None else (gathered_pages(workspace), None)
        try:
            hopper_attention(query, pages, named, items, rule, output, self._num_processors)
        except Exception as error:  # whatever it is that this Triton does not know
            if is_elsewhere(error):
                raise
            self._is_broken = True
            tell_broken(error, _INSTEAD)
        return not self._is_broken


def _has_pages(kv_layer: Tensor, rule: AttentionRule) -> bool:
    """Whether blocks fill tiles of keys, and keys are rows at equal distances, as the copy engine wants them."""
    _, _, block_size, _, dim = kv_layer.shape
    if block_size not in _PAGE_SIZES or block_size > largest_page(dim, rule.window):
        return False
    block_stride, side_stride, slot_stride, head_stride, _ = kv_layer.stride()
    whole_rows = block_stride % slot_stride == 0 and side_stride % slot_stride == 0
    is_aligned = kv_layer.data_ptr() % 16 == 0 and head_stride == kv_layer.shape[4]
    return whole_rows and is_aligned and len(kv_layer) * (block_stride // slot_stride) < _MOST_ROWS
