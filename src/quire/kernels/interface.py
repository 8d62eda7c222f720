"""What a set of kernels must offer, and the shape of one step. Knows nothing of models, requests or devices.

The KV store is one tensor [blocks, layers, 2, block_size, kv_heads, dim]: a block is one contiguous run
across layers. Kernels get the strided view of one layer, `store[:, layer]`.
Slot = block * block_size + offset.

How kernels come to be compiled before they are launched: what is said between those who do it and those who ask.
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

    A sequence without keys (context length 0) is padding, and so are tokens behind the last sequence: what attention
    gives them has no meaning. They write to the null block, which nobody reads.
    """

    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: where each token's key and value are written
    tables: Tensor  # [sequences, width] int32: block tables; only the blocks that hold keys are read
    query_starts: Tensor  # [sequences + 1] int32: sequence s has tokens query_starts[s] to query_starts[s + 1]
    context_lengths: Tensor  # [sequences] int32: keys the last query of the sequence sees, itself included
    max_lengths: Tensor  # [tokens] int64: the most tokens that the token's sequence may come to hold
    num_decodes: int = 0  # so many sequences, the first ones, are known to be decodes; others may be


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer scores its keys."""

    scale: float
    window: int = 0  # a key is seen if query position - key position < window; 0 means every key before the query
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 means unchanged


class Rotation(NamedTuple):
    """The turn of each token's position, over the full rotary width: x * cos + swap_halves(x) * sin."""

    cos: Tensor  # [tokens, 1, rotary_dim] as what is turned
    sin: Tensor  # [tokens, 1, rotary_dim] as what is turned; the first half is negated


class HeadNorm(NamedTuple):
    """RMSNorm over each query head and key head by itself."""

    weight: Tensor  # [heads + kv_heads, dim] float32: query heads, then key heads
    epsilon: float


class PartialSums(NamedTuple):
    """A product that nobody has added up yet: each part is that of some of the input's columns."""

    sums: Tensor  # [parts, tokens, out] float32
    dtype: torch.dtype  # of the product

    def whole(self) -> Tensor:
        """[tokens, out]: added in the order of the parts, and rounded once."""
        total = self.sums[0]
        for part in self.sums[1:]:
            total = total + part
        return total.to(self.dtype)


class StepAttention(Protocol):
    """Attention for one step, prepared once and used by every layer."""

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        """Norm queries and keys if there is a norm, turn the first rotary_dim of each, and store keys and values.

        qkv: [tokens, heads + 2 * kv_heads, dim]: queries, keys, values; kv_layer: [blocks, 2, block_size, kv_heads,
        dim], strided. Queries change in place, keys and values are rounded to the store's dtype. What qkv has in the
        place of the keys afterwards is not said: whoever wants them reads the store.
        """

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        """Each query over the keys of its own sequence, at or before its own position.

        query: [tokens, heads, dim]; kv_layer: [blocks, 2, block_size, kv_heads, dim], strided.
        Returns [tokens, heads * dim], as query. Query head h reads key head h // (heads / kv_heads).
        """


class Kernels(Protocol):
    """One set of operations. Sums and roots are taken in float32, whatever the dtype of the tensors.

    Weights have the model's dtype, keys and values in the store the one that `stored` names. What flows between the
    operations has the one of `activations`: wider where that is cheap, because roundings of bfloat16 add up.
    """

    name: str

    def activations(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of x, queries, rotations and all results, for a model of that dtype: the same, or float32."""

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the KV store, for a model of that dtype: the same, or another of the same size."""

    def pack(self, weight: Tensor) -> Tensor:
        """Once, at load: the weight [out, in] in the form `linear` likes best (opaque to everyone else)."""

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """x: [tokens, in]; packed: [out, in], packed; bias: [out]. Returns [tokens, out], as x."""

    def linear_unreduced(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor | PartialSums:
        """The same for `add_rms_norm` alone, which reads it anyway and so may be left to add up parts."""

    def logits(self, x: Tensor, packed: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [rows, in]; packed: [vocab, in], packed; weight: the same, not packed. Returns [rows, vocab] float32:
        `out`, if given.

        The largest of each row, and what comes close to it, are not rounded to bfloat16: there, ties are common.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x: [tokens, width] or [tokens, heads, width], of at most 16,384 numbers; weight: [width] float32. As x."""

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """residual += x in place, then its norm, in x's dtype.

        x: [tokens, width], or parts of it; residual: [tokens, width], float32 or x's dtype; weight: [width] float32.
        """

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up ("silu" or "gelu_tanh"). gate_up: [tokens, 2 * ffn]. [tokens, ffn]."""

    def plan(self, layout: StepLayout, block_size: int) -> StepAttention:
        """Prepare the attention of one step."""


class CompiledKernels(NamedTuple):
    """Kernels that are ready ahead."""

    num_kernels: int
    num_made: int  # compiled for it; others were found compiled
    workers: str  # who compiled them side by side
    errors: tuple[str, ...]  # what could not be compiled is tried again when it is launched

    def describe(self) -> str:
        num_found = max(self.num_kernels - self.num_made, 0)
        made = f"{self.num_made} compiled in {self.workers}" if self.num_made else ""
        found = f"{num_found} found compiled" if num_found or not made else ""
        left = f"{len(self.errors)} left for later: {self.errors[0]}" if self.errors else ""
        return ", ".join(filter(None, (made, found, left)))


Finish = Callable[[], CompiledKernels]  # waits until all is compiled


class Precompiling(NamedTuple):
    """For kernels that are compiled when they are first launched."""

    first: Callable[[], None]  # compile one, with all that comes before the first; may be called in a thread
    # All that a function would launch, so many at once: begun when it is entered, and over when it is left.
    launched: Callable[[Callable[[], None], int], AbstractContextManager[Finish]]
