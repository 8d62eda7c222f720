"""Kernel interface: the operations a device must offer, the layout of one step, and precompilation.

Does not depend on models, requests or devices.

The KV store is one tensor [blocks, layers, 2, block_size, kv_heads, dim]: a block is one contiguous run
across layers. Kernels get the strided view of one layer, `store[:, layer]`.
Slot = block * block_size + offset.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step: the tokens of its sequences end to end. A decode is a sequence of one query.

    A ragged batch. A sequence without keys (context length 0) is padding, and so are tokens behind the last sequence:
    their attention output has no meaning. They write to the null block, which is never read.
    """

    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: where each token's key and value are written
    tables: Tensor  # [sequences, width] int32: block tables; only the blocks that hold keys are read
    query_starts: Tensor  # [sequences + 1] int32: sequence s has tokens query_starts[s] to query_starts[s + 1]
    context_lengths: Tensor  # [sequences] int32: keys the last query of the sequence sees, itself included
    max_lengths: Tensor  # [tokens] int64: the most tokens that the token's sequence may hold
    num_decodes: int = 0  # leading sequences that are known to be decodes; others may be


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Attention parameters of a layer."""

    scale: float
    window: int = 0  # a key is seen if query position - key position < window; 0 means every key before the query
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 means unchanged


class Rotation(NamedTuple):
    """RoPE at each token's position, over the full rotary width: x * cos + swap_halves(x) * sin."""

    cos: Tensor  # [tokens, 1, rotary_dim], dtype of the activations
    sin: Tensor  # [tokens, 1, rotary_dim], dtype of the activations; the first half is negated


class HeadNorm(NamedTuple):
    """QK norm: RMSNorm over each query head and key head by itself."""

    weight: Tensor  # [heads + kv_heads, dim] float32: query heads, then key heads
    epsilon: float


class PartialSums(NamedTuple):
    """An unreduced split-K matmul: each split covers some of the input's columns."""

    sums: Tensor  # [splits, tokens, out] float32
    dtype: torch.dtype  # of the reduced result

    def reduce(self) -> Tensor:
        """[tokens, out]: added in the order of the splits, rounded once."""
        total = self.sums[0]
        for split in self.sums[1:]:
            total = total + split
        return total.to(self.dtype)


class StepAttention(Protocol):
    """Attention for one step, prepared once and used by every layer."""

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        """QK norm if there is one, RoPE on the first rotary_dim of queries and keys, then write keys and values.

        qkv: [tokens, heads + 2 * kv_heads, dim]: queries, keys, values; kv_layer: [blocks, 2, block_size, kv_heads,
        dim], strided. Queries change in place; keys and values are rounded to the store's dtype. The keys in qkv are
        undefined afterwards: read them from the store.
        """

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """Each query over the keys of its own sequence, at or before its own position.

        query: [tokens, heads, dim]; kv_layer: [blocks, 2, block_size, kv_heads, dim], strided.
        Returns [tokens, heads * dim], as query. Query head h reads key head h // (heads / kv_heads).
        """


class Kernels(Protocol):
    """One set of operations. Sums and roots are computed in float32, whatever the dtype of the tensors.

    Weights have the model's dtype, the KV store has `kv_dtype`, and activations have `activation_dtype`: wider where
    that is cheap, because rounding errors of bfloat16 add up.
    """

    name: str

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of x, queries, rotations and all results for a model of this dtype: the same, or float32."""

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the KV store for a model of this dtype: the same, or another of the same size."""

    def pack(self, weight: Tensor) -> Tensor:
        """Once, at load: the weight [out, in] in the layout that `linear` reads (opaque to callers)."""

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """x: [tokens, in]; packed: [out, in], packed; bias: [out]. Returns [tokens, out], as x."""

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor | PartialSums:
        """`linear` for `add_rms_norm` only, which reads the output anyway and may reduce partial sums itself."""

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [rows, in]; packed: [vocab, in], packed; weight: the same, not packed. Returns [rows, vocab] float32:
        `out`, if given.

        The largest logits of each row are not rounded to bfloat16, where ties are common.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x: [tokens, width] or [tokens, heads, width], at most 16,384 wide; weight: [width] float32. As x."""

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """residual += x in place, then its norm, in x's dtype.

        x: [tokens, width] or partial sums; residual: [tokens, width], float32 or x's dtype; weight: [width] float32.
        """

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up ("silu" or "gelu_tanh"). gate_up: [tokens, 2 * ffn]. [tokens, ffn]."""

    def plan(self, layout: StepLayout, block_size: int) -> StepAttention:
        """Prepare the attention of one step."""


class CompiledKernels(NamedTuple):
    """Result of a precompilation."""

    num_kernels: int
    num_compiled: int  # compiled now; the others were in the cache
    workers: str  # "8 processes" or "4 threads"
    errors: tuple[str, ...]  # a kernel that failed is compiled again when it is launched

    def describe(self) -> str:
        num_found = max(self.num_kernels - self.num_compiled, 0)
        compiled = f"{self.num_compiled} compiled in {self.workers}" if self.num_compiled else ""
        found = f"{num_found} found compiled" if num_found or not compiled else ""
        left = f"{len(self.errors)} left for later: {self.errors[0]}" if self.errors else ""
        return ", ".join(filter(None, (compiled, found, left)))


Finish = Callable[[], CompiledKernels]  # waits until all kernels are compiled


class Precompiling(NamedTuple):
    """How to compile kernels before their first launch."""

    first: Callable[[], None]  # compile one kernel, which loads the compiler; may be called in a thread
    # Compile all that a function would launch, in this number of processes: starts on entry, ends on exit.
    launched: Callable[[Callable[[], None], int], AbstractContextManager[Finish]]
