"""Kernel interface: the operations a device must offer, the layout of one step, and precompilation.

Does not depend on models, requests or devices.

The KV store is one tensor [blocks, layers, 2, block_size, kv_heads, dim]: a block is one contiguous run
across layers. Kernels get the strided view of one layer, `store[:, layer]`. An int8 store has dim + KV_SCALE_BYTES
numbers for each head of a token: its codes and their scale, so that whatever moves a block moves its scales.
Slot = block * block_size + offset.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray
from quire.kernels.row_interface import EndColumns, GreedyStep, RowColumns

MAX_CAPTURED = 4  # layers whose inputs a step may copy
KV_SCALE_BYTES = 4  # a float32 behind the codes of a head: number = code * scale, scale = highest magnitude / 127


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
    max_queries: int = 0  # that any sequence has, where all are decoding rows with drafts; 0: unknown


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


class StoredRows(NamedTuple):
    """Some rows of a matrix as a file stores them."""

    encoding: str  # ggml's name: F32, F16, BF16, Q4_0, …
    num_rows: int
    row_bytes: int
    read: Callable[[], NDArray[np.uint8]]  # [stored rows, bytes], when they are needed
    order: NDArray[np.int32] | None = None  # [rows]: the stored row of each; None: as stored


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in] that stays as its file stores it, its rows in parts of one encoding each. On the CPU."""

    parts: tuple[StoredRows, ...]
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """What its values would be rounded to."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return sum(part.row_bytes * part.num_rows for part in self.parts)


Weight = Tensor | QuantizedWeight
PackedMatrix = Any  # what `Kernels.pack` returns: opaque to callers


class StackedLayer(NamedTuple):
    """One layer, for kernels that compute all layers of a step in one call."""

    attention_norm: Tensor
    qkv: PackedMatrix
    qkv_bias: Tensor | None  # biases and norms are float32
    head_norm: HeadNorm | None
    output: PackedMatrix
    output_bias: Tensor | None
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedMatrix
    gate_up_bias: Tensor | None
    down: PackedMatrix
    down_bias: Tensor | None
    mlp_post_norm: Tensor | None
    rule: AttentionRule  # scale and softcap are those of the first layer
    rope: int  # index into the rotations of a step


class StackSpec(NamedTuple):
    """What the layers of a stack have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    activation: str
    norm_eps: float
    final_norm: Tensor


class RopeColumns(NamedTuple):
    """cos and sin of every position: of a rope's table, and for LongRoPE of a second one behind it."""

    cos: Tensor  # [tables * positions, 1, rotary_dim]
    sin: Tensor
    num_positions: int
    long_from: int  # sequences that may hold more tokens use the second table; 0: there is one


class DecoderTables(NamedTuple):
    """What a decoder has beside its layers."""

    embedding: PackedMatrix
    embedding_scale: float
    head: PackedMatrix
    softcap: float  # of logits; 0: none
    ropes: tuple[RopeColumns, ...]


class LayerCapture:
    """Copies of what enters some layers, of all tokens of the latest step: heads that draft read them. The number of
    layers stands for what leaves the last one, before the final norm."""

    __slots__ = ("layers", "sink", "states")

    def __init__(self, layers: tuple[int, ...]) -> None:
        assert len(layers) <= MAX_CAPTURED, layers
        self.layers = layers
        self.states: Tensor | None = None  # [tokens, layers * hidden], dtype of the activations or float32
        # Reads the states as a part of the step, with the slot of each token: where steps are captured or in flight.
        # They are not kept then: they may be in the memory of a CUDA graph, which others use after it.
        self.sink: Callable[[Tensor, Tensor], None] | None = None

    def take(self, states: Tensor, slots: Tensor) -> None:
        """states: [tokens, layers * hidden]; slots: [tokens] int64."""
        if self.sink is None:
            self.states = states
        else:
            self.sink(slots, states)


class LayerStack(Protocol):
    """All layers of a decoder for one step."""

    def capture_into(self, capture: LayerCapture) -> None:
        """Fill this with every step from now on; where rows decode, without rows that are not alive."""

    def __call__(
        self, embedded: Tensor, layout: StepLayout, rotations: Sequence[Rotation], kv: Tensor, selected: Tensor | None
    ) -> Tensor:
        """embedded: [tokens, hidden] float32, changed; kv: the whole store; selected: [n] int64, or all tokens.
        Returns [n, hidden], normed."""

    def greedy_step(
        self, tables: DecoderTables, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor
    ) -> GreedyStep:
        """A whole step of rows that decode greedily."""

    def decode_logits(
        self, tables: DecoderTables, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor
    ) -> Tensor:
        """A step of rows that decode, up to their logits: [rows, vocab] float32."""


class StepAttention(Protocol):
    """Attention for one step, prepared once and used by every layer."""

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        """QK norm if there is one, RoPE on the first rotary_dim of queries and keys, then write keys and values.

        qkv: [tokens, heads + 2 * kv_heads, dim]: queries, keys, values; kv_layer: [blocks, 2, block_size, kv_heads,
        dim], strided. Queries change in place; keys and values are rounded to the store's dtype, or quantized where
        that is int8. The keys in qkv are undefined afterwards: read them from the store.
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
    packs_embedding: bool  # whether `embed` reads a packed table; else it reads the weight

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of x, queries, rotations and all results for a model of this dtype: the same, or float32."""

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the KV store for a model of this dtype, unless another was asked for."""

    def pack(self, weight: Weight) -> PackedMatrix:
        """Once, at load: the weight [out, in] in the layout that `linear` reads."""

    def pack_head(self, weight: Weight) -> PackedMatrix:
        """The same for the head, which `logits` reads."""

    def embed(self, tokens: Tensor, table: PackedMatrix) -> Tensor:
        """Rows of the embedding, packed by `pack_head` or not. tokens: [tokens] int64. [tokens, hidden]."""

    def stack(self, spec: StackSpec, layers: Sequence[StackedLayer]) -> LayerStack | None:
        """All layers in one call; None: the operations below are called layer by layer."""

    def linear(self, x: Tensor, packed: PackedMatrix, bias: Tensor | None) -> Tensor:
        """x: [tokens, in]; packed: [out, in], packed; bias: [out]. Returns [tokens, out], as x."""

    def linear_unreduced(self, x: Tensor, packed: PackedMatrix, bias: Tensor | None) -> Tensor | PartialSums:
        """`linear` for `add_rms_norm` only, which reads the output anyway and may reduce partial sums itself."""

    def logits(self, x: Tensor, packed: PackedMatrix, weight: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x: [rows, in]; packed: [vocab, in], packed; weight: the same, not packed, unless the embedding
        is packed too. Returns [rows, vocab] float32: `out`, if given.

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


class LayerByLayer:
    """Part of a kernel set that reads weights as tensors, and computes layer by layer."""

    packs_embedding = False

    def pack(self, weight: Weight) -> Tensor:
        assert isinstance(weight, Tensor), "quantized weights are dequantized for these kernels"
        return weight

    def pack_head(self, weight: Weight) -> Tensor:
        return self.pack(weight)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens, table)

    def stack(self, spec: StackSpec, layers: Sequence[StackedLayer]) -> LayerStack | None:
        return None


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
