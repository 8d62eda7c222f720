"""Attention of one step on the GPU: decodes (one query, or a few with drafts) to the decode kernel, chunks to a
prefill kernel.

Prepared once per step and used by every layer. Which rows decode is known on the host; nothing is read back. A part of
the step may be computed by another library (`AttentionBackends`).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.kernels.gpu.attention.decode import (
    RowQueries,
    decode_attention,
    decode_scratch,
    decode_tiles,
    max_query_heads,
)
from quire.kernels.gpu.attention.decode_schedule import list_splits, longest_first
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.gpu.attention.prefill import prefill_attention, prefill_scratch, prefill_tiles
from quire.kernels.gpu.attention.prefill_contiguous import ContextCopy, gathered_attention, is_gatherable
from quire.kernels.gpu.attention.split_merge import SplitScratch
from quire.kernels.gpu.backends.interface import OWN, AttentionBackends, BackendAttention, BackendSequences
from quire.kernels.interface import AttentionRule, StepLayout

_MIN_GATHERED = 1024  # tokens of one chunk whose keys are gathered first
_MIN_ORDERED = 33  # decodes sorted by length: with fewer, all programs start at once


class GpuAttention:
    """The first `num_decodes` sequences have one query each: the first tokens of the step. Or all sequences are rows
    with drafts, which have up to `layout.max_queries`."""

    __slots__ = (
        "_backend_chunks",
        "_backend_decodes",
        "_chunk_scratch",
        "_copy",
        "_hopper",
        "_items",
        "_layout",
        "_num_decodes",
        "_order",
        "_queries",
        "_scratch",
        "_settled",
        "_splits",
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
        self._splits: dict[int, Tensor] = {}  # split-KV lists of decodes, by window
        self._settled = 0  # how many of them are older than the last launch
        self._copy = ContextCopy()
        self._hopper = hopper
        self._items: Tensor | None = None
        self._backend_decodes = _prepare_decodes(layout, num_decodes, backends)
        self._backend_chunks = _prepare_chunks(layout, num_decodes, backends)
        self._order: Tensor | None = None
        self._queries: RowQueries | None = None
        if layout.max_queries:
            assert not num_decodes, "rows have one query, or all may have several"
            self._queries = RowQueries(layout.query_starts, layout.context_lengths, layout.max_queries)
        num_rows = len(layout.context_lengths) if layout.max_queries else num_decodes
        if num_rows >= _MIN_ORDERED and self._backend_decodes is None:
            self._order = longest_first(layout.context_lengths[:num_rows])

    @property
    def uses_backend(self) -> bool:
        """Whether another library computes a part of it."""
        return self._backend_decodes is not None or self._backend_chunks is not None

    def split_decodes(self, kv_layer: Tensor, windows: Iterable[int]) -> None:
        """List the splits of the decodes (split-KV) for layers with these windows, once per step. Another window gets
        its list at its first layer, which waits for that launch."""
        if (self._num_decodes and self._backend_decodes is None) or self._queries is not None:
            for window in windows:
                self._split_for(window, kv_layer)

    def has_launched(self) -> None:
        """A kernel that waited for the lists was launched: attention may overlap its end (PDL)."""
        self._settled = len(self._splits)

    def _split_for(self, window: int, kv_layer: Tensor) -> None:
        if window in self._splits:
            return
        _, _, block_size, kv_heads, _ = kv_layer.shape
        lengths, widest = self._layout.context_lengths[: self._num_decodes], window
        if self._queries is not None:
            lengths = self._queries.lengths
            widest = window + self._queries.most - 1 if window else 0  # what the first query sees, too
        tiles = decode_tiles(len(lengths), kv_layer)
        self._splits[window] = list_splits(
            lengths, self._order, widest, kv_heads=kv_heads, tile=tiles.keys, block_size=block_size,
            slots=tiles.slots, overhead=tiles.overhead,
        )  # fmt: skip

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """query: [tokens, heads, dim]; kv_layer: [blocks, 2, block_size, kv_heads, dim], strided.

        Returns [tokens, heads * dim], as query: zeros for padding decodes, undefined for tokens of no sequence.
        """
        num_tokens, heads, dim = query.shape
        output = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
        if self._queries is not None and self._fits_tile(query, kv_layer):
            self._decode(query, kv_layer, rule, output)
            return output
        first, backend = self._num_decodes, self._backend_decodes
        if backend is not None and backend.takes(kv_layer):
            backend.attend(query[:first], kv_layer, rule, output[:first])
        elif first:
            self._decode(query[:first], kv_layer, rule, output)
        backend = self._backend_chunks
        if backend is not None and backend.takes(kv_layer):
            backend.attend(query[first:], kv_layer, rule, output[first:])
        elif first < min(num_tokens, self._layout.context_lengths.shape[0]):
            self._attend_chunks(query, kv_layer, rule, output)
        return output

    def _fits_tile(self, query: Tensor, kv_layer: Tensor) -> bool:
        """Whether all queries of a row fit one program; else they are chunks."""
        assert self._queries is not None
        _, heads, dim = query.shape
        group = heads // kv_layer.shape[3]
        return self._queries.most * group <= max_query_heads(dim, kv_layer.element_size())

    def _attend_chunks(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        chunks = slice(self._num_decodes, None)
        tables, starts = self._layout.tables[chunks], self._layout.query_starts[chunks]
        lengths = self._layout.context_lengths[chunks]
        is_long = self._is_long(query, kv_layer, tables, rule)
        workspace = self._copy.gather(kv_layer, tables[0], lengths) if is_long else None
        if self._attend_hopper(query, kv_layer, tables, workspace, rule, output):
            return
        if workspace is not None:
            gathered_attention(query, workspace, starts, lengths, rule, output)
        else:
            self._attend_short(query, kv_layer, tables, starts, lengths, rule, output)

    def _attend_hopper(
        self,
        query: Tensor,
        kv_layer: Tensor,
        tables: Tensor,
        workspace: Tensor | None,
        rule: AttentionRule,
        output: Tensor,
    ) -> bool:
        """False: not supported, and nothing was launched."""
        first, is_gathered = self._num_decodes, workspace is not None
        if self._hopper is None or not self._hopper.takes(
            query, kv_layer, rule, query.shape[0] - first, gathered=is_gathered
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
        tiles = prefill_tiles(query, kv_layer, tables, rule, first)
        if tiles.splits > 1 and self._chunk_scratch is None:
            self._chunk_scratch = prefill_scratch(query, kv_heads, len(tables), tiles, first)
        prefill_attention(query, kv_layer, tables, starts, lengths, rule, output, first, self._chunk_scratch, tiles)

    def _is_long(self, query: Tensor, kv_layer: Tensor, tables: Tensor, rule: AttentionRule) -> bool:
        """Whether there is one chunk, long enough that gathering its keys costs little beside its matmuls."""
        num_tokens, heads, dim = query.shape
        if tables.shape[0] > 1 or num_tokens - self._num_decodes < _MIN_GATHERED:
            return False
        regular = is_gatherable(dim, heads // kv_layer.shape[3], kv_layer.element_size())
        return regular and rule.window == 0 and ContextCopy.fits(kv_layer, tables[0])

    def _decode(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        num_tokens, heads, dim = query.shape
        self._split_for(rule.window, kv_layer)
        splits, kv_heads = self._splits[rule.window], kv_layer.shape[3]
        queries, num_splits = self._queries, splits.shape[0]
        rows, most = (num_tokens, 1) if queries is None else (len(queries.lengths), queries.most)
        if self._scratch is None or not self._scratch.holds(num_splits * heads * most, num_splits * kv_heads, dim):
            self._scratch = decode_scratch(query, kv_heads, splits, most)
        tables, tiles = self._layout.tables[:rows], decode_tiles(rows, kv_layer)
        pdl = self._settled == len(self._splits)
        decode_attention(query, kv_layer, tables, splits, tiles, rule, output, self._scratch, queries=queries, pdl=pdl)
        self.has_launched()


def _prepare_decodes(layout: StepLayout, num_decodes: int, backends: AttentionBackends) -> BackendAttention | None:
    """The decodes, if another library computes them."""
    if backends.decodes is None or not num_decodes:
        return None
    rows = slice(num_decodes)
    starts = layout.query_starts[: num_decodes + 1]
    return backends.decodes.prepare(
        BackendSequences(layout.tables[rows], starts, layout.context_lengths[rows], max_queries=1)
    )


def _prepare_chunks(layout: StepLayout, num_decodes: int, backends: AttentionBackends) -> BackendAttention | None:
    """The chunks, if another library computes them."""
    if layout.max_queries:
        return None
    num_chunks = len(layout.context_lengths) - num_decodes
    num_tokens = len(layout.positions) - num_decodes
    is_long = num_chunks == 1 and num_tokens >= _MIN_GATHERED
    backend = backends.long_chunk if is_long else backends.chunks
    if backend is None or not num_chunks:
        return None
    chunks = slice(num_decodes, None)
    starts = layout.query_starts[chunks]
    starts = starts - num_decodes if num_decodes else starts
    return backend.prepare(BackendSequences(layout.tables[chunks], starts, layout.context_lengths[chunks], num_tokens))
