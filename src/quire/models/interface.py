"""What a runner needs of a model: the real decoder and the integer oracle answer alike."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.interface import StepLayout


class KvGeometry(NamedTuple):
    """What one token stores, and in which type."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def store_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, self.num_layers, 2, block_size, self.kv_heads, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        return 2 * self.num_layers * block_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class Model(Protocol):
    """Tokens in, hidden states out; logits only for the rows that ask."""

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""

    @property
    def kv_geometry(self) -> KvGeometry: ...

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, wanted: Tensor | None = None) -> Tensor:
        """tokens: [tokens] int64; kv: the store, which takes the new keys and values; wanted: [n] int64, the tokens
        whose states are asked for, at least one of them; None: all. [n, hidden]."""

    def truncated(self) -> "Model":
        """One that launches all that this does, though not as often: for whoever would see what is launched."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden], some rows of what `forward` gave. Returns [rows, vocab] float32: `out`, if given."""
