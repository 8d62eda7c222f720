"""One step's attention on the GPU: rows of one query to the decode kernel, the others to the chunk kernel.

Prepared once a step and used by every layer. Knows which rows decode from the host alone and reads nothing back.
"""

import torch
from torch import Tensor

from quire.kernels.contract import AttentionRule, Ragged
from quire.kernels.gpu.chunk_attention import chunk_attention
from quire.kernels.gpu.decode_attention import decode_attention, decode_tiles
from quire.kernels.gpu.split_merge import SplitScratch


class GpuAttention:
    """The first `num_decodes` sequences have one query each, so theirs are also the first tokens."""

    __slots__ = ("_num_decodes", "_ragged", "_scratch")

    def __init__(self, ragged: Ragged, num_decodes: int) -> None:
        assert 0 <= num_decodes <= len(ragged.context_lengths), num_decodes
        self._ragged = ragged
        self._num_decodes = num_decodes
        self._scratch: SplitScratch | None = None

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """query: [tokens, heads, dim]; kv_layer: [blocks, 2, block_size, kv_heads, dim], strided.

        Returns [tokens, heads * dim], as query: zeros for decodes of padding, anything for tokens of no sequence.
        """
        num_tokens, heads, dim = query.shape
        output = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
        if self._num_decodes:
            self._decode(query[: self._num_decodes], kv_layer, rule, output)
        if self._num_decodes < len(self._ragged.context_lengths):
            chunks = slice(self._num_decodes, None)
            chunk_attention(
                query,
                kv_layer,
                self._ragged.tables[chunks],
                self._ragged.query_starts[chunks],
                self._ragged.context_lengths[chunks],
                rule,
                output,
                first_token=self._num_decodes,
            )
        return output

    def _decode(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        rows, heads, dim = query.shape
        tables = self._ragged.tables[:rows]
        tiles = decode_tiles(query, kv_layer, tables)
        need = (rows, heads, kv_layer.shape[3], dim, tiles.splits)
        if self._scratch is None or not self._scratch.holds(*need):
            self._scratch = SplitScratch.allocate(*need, query.device)
        lengths = self._ragged.context_lengths[:rows]
        decode_attention(query, kv_layer, tables, lengths, rule, output, self._scratch, tiles)
