"""GPU kernel set of the batch-invariant mode: a token's logits have the same bits in every batch.

Whatever runs beside it, however its prompt is cut into chunks, whether its prefix was cached, drafted or computed
again: each number is a sum in one order that follows from the model alone. GEMMs are not split and do not depend on the
number of rows (`gemm/batch_invariant.py`); one attention kernel serves decodes and chunks, with the same tiles of keys
and without split-KV; norms have the same tiles for any number of tokens. Slower than `GpuKernels`: docs/attention.md
has the figures. Other libraries are not used.
"""

import torch
from torch import Tensor

from quire.kernels.gpu.attention.prefill import batch_invariant_tiles, prefill_attention
from quire.kernels.gpu.gemm.batch_invariant import batch_invariant_gemm
from quire.kernels.gpu.kernels import GpuKernels
from quire.kernels.gpu.rope_and_kv_write import rope_and_write_kv
from quire.kernels.interface import AttentionRule, HeadNorm, Rotation, StepAttention, StepLayout


class BatchInvariantKernels(GpuKernels):
    """As `GpuKernels`, with one order of additions for every batch."""

    name = "gpu, batch-invariant"

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return batch_invariant_gemm(x.contiguous(), packed, bias)

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, packed, bias)

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor | None, out: Tensor | None = None) -> Tensor:
        assert weight is not None
        if out is None:
            out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
        return batch_invariant_gemm(x.contiguous(), weight, None, out)

    def plan(self, layout: StepLayout, block_size: int) -> StepAttention:
        return BatchInvariantStep(layout)


class BatchInvariantStep:
    """Attention of one step: every sequence is a chunk, of one token or more."""

    __slots__ = ("_layout",)

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        rope_and_write_kv(qkv, head_norm, rotation, self._layout.slots, kv_layer, batch_invariant=True)

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """query: [tokens, heads, dim]. [tokens, heads * dim]; undefined for tokens of no sequence."""
        num_tokens, heads, dim = query.shape
        output = torch.empty(num_tokens, heads * dim, dtype=query.dtype, device=query.device)
        layout = self._layout
        prefill_attention(
            query, kv_layer, layout.tables, layout.query_starts, layout.context_lengths, rule, output,
            tiles=batch_invariant_tiles(heads // kv_layer.shape[3], dim, kv_layer.element_size()),
        )  # fmt: skip
        return output
