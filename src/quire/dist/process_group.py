"""Collectives between ranks, and tensors sent from one to another: torch's gloo on CPUs, NCCL where each rank has a GPU.

The ranks are processes of one machine. They find each other through a file without a name (`memfd`), which they inherit:
no port is published and no file is left behind. Gloo's own connections are on 127.0.0.1. Sums have the same bits on
every rank: each part of a tensor is added up by one rank, in the order of the ranks, and sent to the others.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceOp
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
    """The ranks of a group, seen from one of them. Its methods are called by all ranks, in the same order. By gloo,
    which takes tensors of a GPU, too, and waits for them."""

    __slots__ = ("_alone", "_group", "_rendezvous", "_sending", "shard", "store")

    capturable = False  # whether collectives can be part of a CUDA graph

    def __init__(self, shard: Shard, rendezvous: int, name: str = "") -> None:
        """Waits for the other ranks. `rendezvous`: from `new_rendezvous`. `name`: of this group, where several share
        that."""
        self.shard = shard
        self._rendezvous = rendezvous
        self._alone = False
        self.store = PrefixStore(name, FileStore(f"/proc/self/fd/{rendezvous}", shard.num_ranks))
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _TIMEOUT
        options._threads = 1
        self._group: Any = ProcessGroupGloo(self.store, shard.rank, shard.size, options)

        self._sending: Any = None  # the last send, and its tensor

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Sums and gathered tensors have this rank's part only, and no other takes part: for a dry run."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

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
        """The sum of the ranks' tensors, as x. x may be changed."""
        return x if self._alone else self._sum(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, which have one shape. [ranks, *x.shape]"""
        gathered = torch.empty(self.shard.size, *x.shape, dtype=x.dtype, device=x.device)
        if self._alone:
            return gathered.copy_(x.expand_as(gathered))
        self._gather(x.contiguous(), gathered)
        return gathered

    def least(self, number: int) -> int:
        """The least of the ranks' numbers. Does not wait for a GPU."""
        numbers = torch.tensor([-number])
        options: Any = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        self._group.allreduce([numbers], options).wait()
        return -int(numbers)

    def close(self) -> None:
        """Collectives of the other ranks that wait for this one fail, and so do its own."""
        self._group.abort()

    def _sum(self, x: Tensor) -> Tensor:
        """Added in float32."""
        summed = x.float().contiguous()
        self._group.allreduce([summed]).wait()
        return summed.to(x.dtype)

    def _gather(self, x: Tensor, gathered: Tensor) -> None:
        self._group.allgather([list(gathered.unbind(0))], [x]).wait()


class NcclGroup(ProcessGroup):
    """By NCCL, on the stream of the caller, and captured where that captures. Each rank has a GPU of its own, which is
    the current one. Sums are added in the dtype of the tensors. Numbers of the host go by gloo."""

    __slots__ = ("_nccl",)

    capturable = True

    def __init__(self, shard: Shard, rendezvous: int, name: str = "") -> None:
        super().__init__(shard, rendezvous, name)
        nccl: Any = torch.distributed.ProcessGroupNCCL  # not in builds for CPUs
        options = nccl.Options()
        options._timeout = _TIMEOUT
        self._nccl = nccl(PrefixStore("nccl", self.store), shard.rank, shard.size, options)
        self._sum(torch.zeros(1, device="cuda"))  # connects the ranks, which cannot be captured
        torch.cuda.synchronize()

    def close(self) -> None:
        """Kernels of this rank that wait for another one end."""
        super().close()
        self._nccl.abort()

    def _sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        options: Any = AllreduceOptions()
        options.asyncOp = False  # on the current stream, and nothing to wait for
        self._nccl.allreduce([x], options)
        return x

    def _gather(self, x: Tensor, gathered: Tensor) -> None:
        options: Any = AllgatherOptions()
        options.asyncOp = False
        self._nccl._allgather_base(gathered, x, options)
