"""Which chunks the Hopper prefill kernel computes, as long as it compiles. Depends on the kernel's limits only."""

import torch
from torch import Tensor

from quire.kernels.gpu.attention.prefill_schedule import work_list
from quire.kernels.gpu.hopper_support import hopper_num_sms, is_unrelated, log_broken
from quire.kernels.interface import AttentionRule

try:
    from quire.kernels.gpu.attention.hopper import TILE_ROWS, gathered_pages, hopper_attention, largest_page
except (ImportError, AttributeError) as error:
    _missing = f"{type(error).__name__}: {error}"
else:
    _missing = ""

_INSTEAD = "prefill attention by the portable kernels"
_DTYPES = (torch.bfloat16, torch.float16)
_DIMS = range(40, 257, 8)  # multiples of 16 bytes; narrower heads would leave most of a tile empty
_PAGE_SIZES = (8, 16, 32, 64, 128)  # multiples of eight that fill a tile of keys
_MAX_ROWS = 1 << 31  # of the store: TMA coordinates have 32 bits


class HopperPrefill:
    """The Hopper prefill kernel on one GPU."""

    __slots__ = ("_is_broken", "_num_sms")

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms
        self._is_broken = False

    @staticmethod
    def find() -> "HopperPrefill | None":
        num_sms = hopper_num_sms(_missing, _INSTEAD)
        return None if num_sms is None else HopperPrefill(num_sms)

    def takes(
        self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, num_tokens: int, *, gathered: bool = False
    ) -> bool:
        """Whether the kernel computes chunks of `num_tokens` in total, over pages or over gathered keys. With tiles for
        only half of the SMs split-KV is faster, which this kernel does not have."""
        _, heads, dim = query.shape
        kv_heads = kv_layer.shape[3]
        group = heads // kv_heads
        if self._is_broken or dim not in _DIMS or query.dtype not in _DTYPES:
            return False
        if kv_layer.dtype != query.dtype or query.data_ptr() % 16 or not (gathered or _has_pages(kv_layer, rule)):
            return False
        num_tiles = -(-num_tokens * group // TILE_ROWS) * kv_heads
        return 2 * num_tiles > self._num_sms

    def list_work(self, query: Tensor, kv_layer: Tensor, starts: Tensor, lengths: Tensor, first_token: int) -> Tensor:
        """The work list, for every layer of a step."""
        num_tokens, heads, _ = query.shape
        group = heads // kv_layer.shape[3]
        return work_list(starts, lengths, num_tokens - first_token, first_token, TILE_ROWS, group)

    def attend(
        self,
        query: Tensor,
        kv_layer: Tensor,
        tables: Tensor,
        workspace: Tensor | None,  # gathered keys of the only sequence, if any
        items: Tensor,
        rule: AttentionRule,
        output: Tensor,
    ) -> bool:
        """False: it does not compile; nothing was launched, and it is not tried again."""
        pages, named = (kv_layer, tables) if workspace is None else (gathered_pages(workspace), None)
        try:
            hopper_attention(query, pages, named, items, rule, output, self._num_sms)
        except Exception as error:  # any incompatibility of this Triton
            if is_unrelated(error):
                raise
            self._is_broken = True
            log_broken(error, _INSTEAD)
        return not self._is_broken


def _has_pages(kv_layer: Tensor, rule: AttentionRule) -> bool:
    """Whether blocks fill tiles of keys and keys are rows at equal strides, as TMA needs."""
    _, _, block_size, _, dim = kv_layer.shape
    if block_size not in _PAGE_SIZES or block_size > largest_page(dim, rule.window):
        return False
    block_stride, side_stride, slot_stride, head_stride, _ = kv_layer.stride()
    whole_rows = block_stride % slot_stride == 0 and side_stride % slot_stride == 0
    is_aligned = kv_layer.data_ptr() % 16 == 0 and head_stride == kv_layer.shape[4]
    return whole_rows and is_aligned and kv_layer.shape[0] * (block_stride // slot_stride) < _MAX_ROWS
