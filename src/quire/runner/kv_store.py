"""The KV store: the bytes of all blocks on the device."""

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.models.model import KvGeometry


def new_store(geometry: KvGeometry, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """Not filled: no slot is read before it was written. Block 0, the null block, comes on top of the pool's."""
    try:
        return torch.empty(geometry.store_shape(num_blocks + 1, block_size), dtype=geometry.dtype, device=device)
    except RuntimeError as error:  # what torch's allocators raise, torch.OutOfMemoryError included
        raise ConfigError(
            f"There is no memory for a KV cache of {num_blocks} blocks "
            f"({geometry.block_bytes(block_size) * num_blocks} bytes); use a smaller --kv-cache-memory.",
            param="kv_cache_memory",
        ) from error
