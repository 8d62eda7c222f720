"""One step's attention on the GPU: rows of one query to the decode kernel, the others to a kernel for chunks.

Prepared once a step and used by every layer. Knows which rows decode from the host alone and reads nothing back. Where
another library was chosen for a part of the step, that part is handed to it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.kernels.gpu.attention.decode import decode_attention, decode_scratch, decode_tiles
from quire.kernels.gpu.attention.decode_schedule import list_pieces, longest_first
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.attention.prefill import chunk_attention, chunk_scratch, chunk_tiles
from quire.kernels.gpu.attention.prefill_contiguous import ContextCopy, gathered_attention, is_gatherable
from quire.kernels.gpu.attention.split_merge import SplitScratch
from quire.kernels.gpu.backends.interface import OWN, AttentionBackends, BackendAttention, BackendSequences
from quire.kernels.interface import AttentionRule, StepLayout

_FEWEST_GATHERING = 1024  # tokens of one chunk
_FEWEST_ORDERED = 33  # rows: with fewer all programs begin at once


class GpuAttention:
    """The first `num_decodes` sequences have one query each, so theirs are also the first tokens."""

    __slots__ = (
        "_chunk_scratch",
        "_copy",
        "_hopper",
        "_items",
        "_layout",
        "_num_decodes",
        "_order",
        "_others_chunks",
        "_others_decodes",
        "_pieces",
        "_scratch",
        "_settled",
    )  # fmt: skip

    def __init__(
        self,
        layout: StepLayout,
        num_decodes: int,
        backends: AttentionBackends = OWN,
        hopper: HopperPrefill | None = None,
    ) -> None:
        assert 0 <= num_decodes <= len(layout.context_lengths), num_decodes
        self._layout = layout
        self._num_decodes = num_decodes
        self._scratch: SplitScratch | None = None
        self._chunk_scratch: SplitScratch | None = None
        self._pieces: dict[int, Tensor] = {}  # of decodes, by window
        self._settled = 0  # how many of them are older than the last launch
        self._copy = ContextCopy()
        self._hopper = hopper
        self._items: Tensor | None = None
        self._others_decodes = _decodes_of_others(layout, num_decodes, backends)
        self._others_chunks = _chunks_of_others(layout, num_decodes, backends)
        self._order: Tensor | None = None
        if num_decodes >= _FEWEST_ORDERED and self._others_decodes is None:
            self._order = longest_first(layout.context_lengths[:num_decodes])

    @property
    def uses_backend(self) -> bool:
        """Whether another library does a part of it."""
        return self._others_decodes is not None or self._others_chunks is not None

    def cut_decodes(self, kv_layer: Tensor, windows: Iterable[int]) -> None:
        """Into pieces, unless they are, for layers with these windows: once a step. A window that nobody cut for is cut
        for when it comes up, and its first layer waits for that."""
        if self._num_decodes and self._others_decodes is None:
            for window in windows:
                self._cut_for(window, kv_layer)

    def has_launched(self) -> None:
        """Behind all that was cut, something else that waited for it: attention may begin while that ends."""
        self._settled = len(self._pieces)

    def _cut_for(self, window: int, kv_layer: Tensor) -> None:
        if window in self._pieces:
            return
        _, _, block_size, kv_heads, _ = kv_layer.shape
        tiles = decode_tiles(self._num_decodes, kv_layer)
        lengths = self._layout.context_lengths[: self._num_decodes]
        self._pieces[window] = list_pieces(
            lengths, self._order, window, kv_heads=kv_heads, tile=tiles.keys, block_size=block_size,
            slots=tiles.slots, overhead=tiles.overhead,
        )  # fmt: skip

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """query: [tokens, heads, dim]; kv_layer: [blocks, 2, block_size, kv_heads, dim], strided.

        Returns [tokens, heads * dim], as query: zeros for decodes of padding, anything for tokens of no sequence.
        """
        num_tokens, heads, dim = query.shape
        output = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
        first, others = self._num_decodes, self._others_decodes
        if others is not None and others.takes(kv_layer):
            others.attend(query[:first], kv_layer, rule, output[:first])
        elif first:
            self._decode(query[:first], kv_layer, rule, output)
        others = self._others_chunks
        if others is not None and others.takes(kv_layer):
            others.attend(query[first:], kv_layer, rule, output[first:])
        elif first < min(num_tokens, len(self._layout.context_lengths)):
            self._attend_chunks(query, kv_layer, rule, output)
        return output

    def _attend_chunks(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        chunks = slice(self._num_decodes, None)
        tables, starts = self._layout.tables[chunks], self._layout.query_starts[chunks]
        lengths = self._layout.context_lengths[chunks]
        is_long = self._is_long(query, kv_layer, tables, rule)
        workspace = self._copy.gather(kv_layer, tables[0], lengths) if is_long else None
        if self._attend_on_hopper(query, kv_layer, tables, workspace, rule, output):
            return
        if workspace is not None:
            gathered_attention(query, workspace, starts, lengths, rule, output)
        else:
            self._attend_short(query, kv_layer, tables, starts, lengths, rule, output)

    def _attend_on_hopper(
        self,
        query: Tensor,
        kv_layer: Tensor,
        tables: Tensor,
        workspace: Tensor | None,
        rule: AttentionRule,
        output: Tensor,
    ) -> bool:
        """False: it is not for this, and nothing was done."""
        first, is_gathered = self._num_decodes, workspace is not None
        if self._hopper is None or not self._hopper.takes(
            query, kv_layer, rule, len(query) - first, gathered=is_gathered
        ):
            return False
        if self._items is None:
            starts, lengths = self._layout.query_starts[first:], self._layout.context_lengths[first:]
            self._items = self._hopper.list_work(query, kv_layer, starts, lengths, first)
        return self._hopper.attend(query, kv_layer, tables, workspace, self._items, rule, output)

    def _attend_short(
        self,
        query: Tensor,
        kv_layer: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        rule: AttentionRule,
        output: Tensor,
    ) -> None:
        first, kv_heads = self._num_decodes, kv_layer.shape[3]
        tiles = chunk_tiles(query, kv_layer, tables, rule, first)
        if tiles.splits > 1 and self._chunk_scratch is None:
            self._chunk_scratch = chunk_scratch(query, kv_heads, len(tables), tiles, first)
        chunk_attention(query, kv_layer, tables, starts, lengths, rule, output, first, self._chunk_scratch, tiles)

    def _is_long(self, query: Tensor, kv_layer: Tensor, tables: Tensor, rule: AttentionRule) -> bool:
        """Whether there is one chunk, and copying its keys first is little beside its products."""
        num_tokens, heads, dim = query.shape
        if len(tables) > 1 or num_tokens - self._num_decodes < _FEWEST_GATHERING:
            return False
        regular = is_gatherable(dim, heads // kv_layer.shape[3], kv_layer.element_size())
        return regular and rule.window == 0 and ContextCopy.fits(kv_layer, tables[0])

    def _decode(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        rows, heads, dim = query.shape
        self._cut_for(rule.window, kv_layer)
        pieces, kv_heads = self._pieces[rule.window], kv_layer.shape[3]
        if self._scratch is None or not self._scratch.holds(len(pieces) * heads, len(pieces) * kv_heads, dim):
            self._scratch = decode_scratch(query, kv_heads, pieces)
        tables, tiles = self._layout.tables[:rows], decode_tiles(rows, kv_layer)
        early = self._settled == len(self._pieces)
        decode_attention(query, kv_layer, tables, pieces, tiles, rule, output, self._scratch, early=early)
        self.has_launched()


def _decodes_of_others(layout: StepLayout, num_decodes: int, backends: AttentionBackends) -> BackendAttention | None:
    """The decodes, if there are any and they are not ours."""
    if backends.decodes is None or not num_decodes:
        return None
    rows = slice(num_decodes)
    starts = layout.query_starts[: num_decodes + 1]
    return backends.decodes.share(
        BackendSequences(layout.tables[rows], starts, layout.context_lengths[rows], max_queries=1)
    )


def _chunks_of_others(layout: StepLayout, num_decodes: int, backends: AttentionBackends) -> BackendAttention | None:
    """The chunks, if there are any and they are not ours."""
    num_chunks = len(layout.context_lengths) - num_decodes
    num_tokens = len(layout.positions) - num_decodes
    is_long = num_chunks == 1 and num_tokens >= _FEWEST_GATHERING
    backend = backends.long_chunk if is_long else backends.chunks
    if backend is None or not num_chunks:
        return None
    chunks = slice(num_decodes, None)
    starts = layout.query_starts[chunks]
    starts = starts - num_decodes if num_decodes else starts
    return backend.share(BackendSequences(layout.tables[chunks], starts, layout.context_lengths[chunks], num_tokens))
