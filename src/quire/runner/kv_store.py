"""The KV stores: the bytes of all blocks, on the device and, with a second tier, on the host.

Executes moves between blocks; does not depend on their contents. On a CPU the host tier is a second buffer.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.moves import Move, MoveRun, Tier, runs
from quire.core.shared_blocks import SharedBlocks
from quire.kernels.transfers import upload_integers
from quire.models.interface import KvGeometry

CopyBlocks = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # two stores, and blocks of each: [blocks] int64


class KvStores:
    """One tensor per tier. Block 0 of each is the null block, which no pool owns."""

    __slots__ = ("_copy_blocks", "device", "host", "shared")

    def __init__(
        self,
        device: Tensor,
        host: Tensor | None = None,
        copy_blocks: CopyBlocks | None = None,
    ) -> None:
        self.device = device  # [blocks + 1, layers, 2, block_size, kv_heads, dim]
        self.host = host  # [host blocks + 1, …], pinned if the device is not the CPU
        self.shared: SharedBlocks | None = None  # where other processes read or write the device's store
        self._copy_blocks = copy_blocks  # inside the device's store; None: block by block

    @property
    def block_size(self) -> int:
        return self.device.shape[3]

    @property
    def block_bytes(self) -> NDArray[np.uint8]:
        """The blocks of a store on the CPU: [blocks + 1, bytes], the same memory."""
        blocks: NDArray[np.uint8] = self.raw_blocks.numpy()
        return blocks

    @property
    def raw_blocks(self) -> Tensor:
        """The blocks of the device's store: [blocks + 1, bytes] uint8, the same memory."""
        return self.device.view(len(self.device), -1).view(torch.uint8)

    def copy_from(self, origin: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of another store with the same layout, [blocks, bytes] uint8, into the device's. Does not
        synchronise."""
        if self._copy_blocks is not None:
            indices = upload_integers(self.device.device, np.array(sources), np.array(targets))
            self._copy_blocks(origin, self.raw_blocks, *indices)
            return
        for source, target in zip(sources, targets, strict=True):
            self.raw_blocks[target].copy_(origin[source], non_blocking=True)

    def carry(self, moves: Iterable[Move]) -> None:
        """Copy blocks in the order of the moves. Does not synchronise."""
        for run in runs(moves):
            self._copy(run)

    def _copy(self, run: MoveRun) -> None:
        assert (run.src, run.dst) != (Tier.HOST, Tier.HOST), f"a move inside the host's store: {run}"
        source, target = self._store(run.src), self._store(run.dst)
        if source is target and self._copy_blocks is not None:  # one launch for the run
            indices = upload_integers(source.device, np.array(run.sources), np.array(run.targets))
            self._copy_blocks(source, target, *indices)
            return
        for src, dst in zip(run.sources, run.targets, strict=True):  # a plain copy each: 10 x an indexed one on the CPU
            target[dst].copy_(source[src], non_blocking=True)

    def _store(self, tier: Tier) -> Tensor:
        if tier is Tier.DEVICE:
            return self.device
        assert self.host is not None, "a move to or from the host, which has no store"
        return self.host


def new_store(
    geometry: KvGeometry,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    num_host_blocks: int = 0,
    copy_blocks: CopyBlocks | None = None,
    memory: NDArray[np.uint8] | None = None,
) -> KvStores:
    """Allocate, uninitialised: no slot is read before it was written. `memory`: of the device's store on a CPU, instead
    of memory of its own: [blocks + 1, bytes]."""
    block_bytes = geometry.block_bytes(block_size)
    shape = geometry.store_shape(num_blocks + 1, block_size)
    try:
        if memory is not None:
            store = torch.from_numpy(memory).view(geometry.dtype).view(shape)
        else:
            store = torch.empty(shape, dtype=geometry.dtype, device=device)
    except RuntimeError as error:  # what torch's allocators raise, torch.OutOfMemoryError included
        raise ConfigError(
            f"Not enough memory for a KV cache of {num_blocks} blocks ({block_bytes * num_blocks} bytes); "
            f"use a smaller --kv-cache-memory.",
            param="kv_cache_memory",
        ) from error
    if num_host_blocks == 0:
        return KvStores(store, copy_blocks=copy_blocks)
    shape = geometry.store_shape(num_host_blocks + 1, block_size)
    try:
        host = torch.empty(shape, dtype=geometry.dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise ConfigError(
            f"Not enough host memory for {num_host_blocks} swapped KV blocks "
            f"({block_bytes * num_host_blocks} bytes); make the host's share of the KV cache smaller."
        ) from error
    return KvStores(store, host, copy_blocks)
