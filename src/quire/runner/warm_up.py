"""One small step before the first request, so that compiling and packing are paid for before anybody waits."""

import torch

from quire.core.ids import NULL_BLOCK
from quire.kernels.contract import Ragged
from quire.models.model import Model
from quire.runner.kv_store import KvStores


@torch.inference_mode()
def warm_up(model: Model, stores: KvStores) -> None:
    """A chunk of two tokens and a decode, in the null block, which nobody reads."""
    kv = stores.device
    device = kv.device
    positions = torch.tensor([0, 1, 0], device=device) % stores.block_size
    ragged = Ragged(
        positions=positions,
        slots=positions + NULL_BLOCK * stores.block_size,
        tables=torch.full((2, 2), NULL_BLOCK, dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 2, 3], dtype=torch.int32, device=device),
        context_lengths=torch.tensor([2, 1], dtype=torch.int32, device=device),
        reaches=torch.tensor([2, 2, 1], device=device),
    )
    hidden = model.forward(torch.zeros(3, dtype=torch.int64, device=device), ragged, kv)
    model.logits(hidden[1:])
