"""Model interface of the runner. The decoder and the integer oracle implement it."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.core.ids import IntArray
from quire.core.model import ModelSpec
from quire.kernels.interface import KV_SCALE_BYTES, StepLayout
from quire.kernels.row_interface import EndColumns, GreedyStep, RowColumns


class KvGeometry(NamedTuple):
    """Shape and dtype of one token's keys and values."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # int8: with a scale behind each head

    @staticmethod
    def of(spec: ModelSpec, dtype: torch.dtype) -> "KvGeometry":
        return KvGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)

    def describe(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} with a scale per token and head" if self.dtype is torch.int8 else name

    def store_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        width = self.head_dim + (KV_SCALE_BYTES if self.dtype is torch.int8 else 0)
        return (num_blocks, self.num_layers, 2, block_size, self.kv_heads, width)

    @property
    def token_bytes(self) -> int:
        return self.block_bytes(1)

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.store_shape(1, block_size)) * self.dtype.itemsize


class RowDecoder(Protocol):
    """A model whose decode steps read the row table themselves. Call in inference mode."""

    def greedy_step(self, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor) -> GreedyStep:
        """A whole step of rows that decode greedily."""

    def decode_logits(self, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor) -> Tensor:
        """A step of rows that decode, up to their logits: [rows, vocab] float32."""


class Model(Protocol):
    """Tokens in, hidden states out; logits only for selected rows."""

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""

    @property
    def kv_geometry(self) -> KvGeometry: ...

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        """tokens: [tokens] int64; kv: the store, which takes the new keys and values; selected: [n] int64, the
        tokens whose hidden states are returned, at least one; None: all. [n, hidden]."""

    @property
    def row_decoder(self) -> "RowDecoder | None":
        """Decodes rows straight from the row table; None: a step is built for `forward`."""

    def truncated(self) -> "Model":
        """A smaller model that launches every kernel variant of this one: for precompilation."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden], some rows of `forward`'s output. Returns [rows, vocab] float32: `out`, if given."""
