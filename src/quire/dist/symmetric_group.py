"""Collectives through torch's symmetric memory: each rank reads what the others wrote into their buffers.

For tests: it works where several ranks are on one GPU, which NCCL refuses, and it can be captured, which gloo cannot.
There torch wants TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. Ranks that each have a GPU use NCCL; whether this is faster
there, for small tensors, was not measured.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from quire.core.sharding import Shard
from quire.dist.process_group import ProcessGroup

_BUFFER_BYTES = 64 << 20  # of each rank; larger tensors go in pieces


class SymmetricGroup(ProcessGroup):
    """By buffers that all ranks map. A barrier on the stream comes before and after each reading of them."""

    __slots__ = ("_buffer", "_memory", "_registered")

    capturable = True

    def __init__(self, shard: Shard, rendezvous: int, name: str = "") -> None:
        super().__init__(shard, rendezvous, name)
        group_name = f"quire-{os.fstat(rendezvous).st_ino}"  # in each process another one for each group
        store = PrefixStore("symmetric", self.store)
        self._registered = torch.distributed.ProcessGroup(store, shard.rank, shard.size)
        _register_process_group(group_name, self._registered)  # type: ignore[arg-type]
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffer = _SymmetricMemory.empty_strided_p2p((_BUFFER_BYTES,), (1,), torch.uint8, device)
        self._memory: Any = _SymmetricMemory.rendezvous(self._buffer, group_name)

    def _sum(self, x: Tensor) -> Tensor:
        """Added in float32, in the order of the ranks."""
        summed = x.float().flatten()
        for piece in torch.split(summed, _BUFFER_BYTES // summed.itemsize):
            theirs = self._exchange(piece)
            torch.sum(torch.stack(theirs), 0, out=piece)
            self._memory.barrier()
        return summed.view(x.shape).to(x.dtype)

    def _gather(self, x: Tensor, gathered: Tensor) -> None:
        flat, start = gathered.view(self.shard.size, -1), 0
        for piece in torch.split(x.flatten(), _BUFFER_BYTES // x.itemsize):
            for line, theirs in zip(flat, self._exchange(piece), strict=True):
                line[start : start + len(piece)] = theirs
            self._memory.barrier()
            start += len(piece)

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """What each rank has in place of this piece, until the next barrier."""
        buffers = [self._memory.get_buffer(rank, piece.shape, piece.dtype) for rank in range(self.shard.size)]
        buffers[self.shard.rank].copy_(piece)
        self._memory.barrier()
        return buffers
