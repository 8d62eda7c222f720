"""Collectives between ranks, and tensors sent from one to another, with torch's gloo over the loopback interface.

The ranks are processes of one machine. They find each other through a file without a name (`memfd`), which they inherit:
no port is published and no file is left behind. Gloo's own connections are on 127.0.0.1. Sums have the same bits on
every rank: each part of a tensor is added up by one rank, in the order of the ranks, and sent to the others.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from quire.core.sharding import Shard

_LOOPBACK = "127.0.0.1"
# Of a collective. Ranks that died or stopped are found sooner by the thread that watches them; a step of a rank that
# computes slowly may take long.
_TIMEOUT = timedelta(hours=1)


def new_rendezvous() -> int:
    """A descriptor that all ranks inherit."""
    return os.memfd_create("quire-ranks")


class ProcessGroup:
    """The ranks of a group, seen from one of them. Its methods are called by all ranks, in the same order."""

    __slots__ = ("_group", "_rendezvous", "_sending", "shard")

    def __init__(self, shard: Shard, rendezvous: int, name: str = "") -> None:
        """Waits for the other ranks. `rendezvous`: from `new_rendezvous`. `name`: of this group, where several share
        that."""
        self.shard = shard
        self._rendezvous = rendezvous
        store = PrefixStore(name, FileStore(f"/proc/self/fd/{rendezvous}", shard.num_ranks))
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _TIMEOUT
        options._threads = 1
        self._group: Any = ProcessGroupGloo(store, shard.rank, shard.size, options)

        self._sending: Any = None  # the last send, and its tensor

    def send(self, x: Tensor, rank: int) -> None:
        """To another rank, which receives it later; waits until the tensor before that has arrived."""
        x = x.contiguous()
        if self._sending is not None:
            self._sending[0].wait()
        self._sending = self._group.send([x], rank, 0), x

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """What another rank sends, which has the shape of x, in x."""
        self._group.recv([x], rank, 0).wait()
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, added in float32, as x. x may be changed."""
        summed = x.float().contiguous()
        self._group.allreduce([summed]).wait()
        return summed.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, which have one shape. [ranks, *x.shape]"""
        x = x.contiguous()
        gathered = torch.empty(self.shard.size, *x.shape, dtype=x.dtype)
        self._group.allgather([list(gathered.unbind(0))], [x]).wait()
        return gathered

    def close(self) -> None:
        """Collectives of the other ranks that wait for this one fail."""
        self._group.abort()
