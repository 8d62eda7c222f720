"""Model interface of the runner. The decoder and the integer oracle implement it."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.core.ids import IntArray
from quire.kernels.interface import StepLayout
from quire.kernels.row_interface import EndColumns, RowColumns


class KvGeometry(NamedTuple):
    """Shape and dtype of one token's keys and values."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def store_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, self.num_layers, 2, block_size, self.kv_heads, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        return 2 * self.num_layers * block_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class RowDecoder(Protocol):
    """A model whose decode steps read the row table themselves. Call in inference mode."""

    def decode_greedy(self, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor) -> Tensor:
        """A whole step of rows that decode greedily, their tokens appended. [5, rows] int64, as `FinishRows`."""

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
