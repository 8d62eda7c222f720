"""The integer model of `core.oracle` behind the real runner: it checks slots and block tables without float noise.

A token's key slot holds the token, its value slot the position. The next token is a sum over what is read back through
the block table, plus the index of the sequence that writes the slot: a misrouted or early-freed slot changes it at
once. A model sees no rows; but a block that is written has one owner, and so one index. No shape here depends on tensor
values, so a step can be captured as a CUDA graph.
"""

import torch
from torch import Tensor

from quire.core.oracle import DEFICITS_PER_UNIT, deficit, mix
from quire.kernels.interface import StepLayout
from quire.models.interface import KvGeometry


class OracleModel:
    """next = (Σ mix(token_i, i) + index) mod V. A hidden state is that sum."""

    def __init__(self, vocab_size: int, index_of_block: Tensor | None = None) -> None:
        self._vocab_size = vocab_size
        self._index_of_block = index_of_block  # [blocks] int64: of the sequence that writes it; None: all are 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def truncated(self) -> "OracleModel":
        return self

    @property
    def row_decoder(self) -> None:
        return None

    @property
    def kv_geometry(self) -> KvGeometry:
        return KvGeometry(num_layers=1, kv_heads=1, head_dim=1, dtype=torch.int32)

    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        """tokens: [tokens] int64; kv: [blocks, 1, 2, block_size, 1, 1]. [n, 1] int64: the sum up to each."""
        store = kv[:, 0, :, :, 0, 0].transpose(1, 2)  # [blocks, block_size, 2]
        block_size = store.shape[1]
        written = torch.stack([tokens, layout.positions], dim=1).to(store.dtype)
        store.index_put_((layout.slots // block_size, layout.slots % block_size), written)

        places = torch.arange(layout.tables.shape[1] * block_size, device=kv.device)
        blocks = layout.tables[:, places // block_size].long().clamp(max=len(store) - 1)  # unused entries: any
        key, position = store[blocks, places % block_size].long().unbind(dim=-1)  # each [sequences, width]
        totals = mix(key, position).cumsum(dim=1)  # [sequence, k]: the sum over its keys up to the k-th

        flat = torch.arange(len(tokens), dtype=torch.int32, device=kv.device)
        sequence = torch.searchsorted(layout.query_starts[1:-1], flat, right=True)  # padding: the last sequence
        still_to_come = layout.query_starts[sequence + 1] - flat
        last_key = layout.context_lengths[sequence] - still_to_come
        sums = totals[sequence, last_key.clamp(0, len(places) - 1)]  # undefined for padding
        if self._index_of_block is not None:
            sums += self._index_of_block[layout.slots // block_size]
        return sums[:, None] if selected is None else sums[selected, None]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, 1] int64. Returns [rows, vocab] float32; a softmax leaves them as they are."""
        ranks = (torch.arange(self._vocab_size, device=hidden.device) - hidden) % self._vocab_size
        logits = -deficit(hidden, ranks).float() / DEFICITS_PER_UNIT
        return logits if out is None else out.copy_(logits)
