"""Self-attention of a layer: QKV projection, QK norm, RoPE, KV write, attention, output projection."""

from typing import NamedTuple

from torch import Tensor

from quire.kernels.interface import AttentionRule, HeadNorm, PartialSums, Rotation, StepAttention
from quire.layers.linear import Linear, Projection


class Heads(NamedTuple):
    """How many query heads and key heads there are, and how wide each is."""

    queries: int
    keys: int
    dim: int


class Attention:
    """Self-attention over the KV store."""

    __slots__ = ("_head_norm", "_heads", "_output", "_qkv", "_rule")

    def __init__(
        self, heads: Heads, rule: AttentionRule, qkv: Linear, output: Projection, head_norm: HeadNorm | None
    ) -> None:
        self._heads = heads
        self._rule = rule
        self._qkv = qkv
        self._output = output
        self._head_norm = head_norm

    def __call__(
        self, x: Tensor, rotation: Rotation, step: StepAttention, kv_layer: Tensor, selected: Tensor | None = None
    ) -> Tensor | PartialSums:
        """x: [tokens, hidden]; kv_layer: [blocks, 2, block_size, kv_heads, dim]; selected: [n] int64, or all
        tokens.

        Returns [n, hidden], like the output projection.
        """
        queries, keys, dim = self._heads
        qkv = self._qkv(x).view(-1, queries + 2 * keys, dim)
        step.rope_and_write_kv(qkv, self._head_norm, rotation, kv_layer)
        attended = step.attend(qkv[:, :queries], kv_layer, self._rule)
        return self._output(attended if selected is None else attended.index_select(0, selected))
